// Python bindings of the sampler: SampleParams, built once per request, and sampling of rows on the
// thread pool of the engine.
#pragma once
#include <nanobind/nanobind.h>

#include "sampler.h"
#include "thread_pool.h"

namespace verbatim {
void bind_sampler(nanobind::module_& m);
// rows: per row of logits a tuple (SampleParams, key, position, prompt_len, history tuple, mask
// bytes or None) to sample, a tuple (token, top) to score, or None to skip the row. Returns
// (token, logprob, top) or None per row; raises ValueError for logits that are not finite.
nanobind::list sample_rows(ThreadPool& pool, vb::SampleFn sample, const float* logits,
                           const float* chunk_maxes, int64_t vocab, nanobind::list rows);
}  // namespace verbatim
