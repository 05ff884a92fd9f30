// The sampler's Python side: SampleParams made once a request, and rows drawn over the engine's pool of threads.
#pragma once
#include <nanobind/nanobind.h>

#include "sampler.h"
#include "thread_pool.h"

namespace verbatim {
void bind_sampler(nanobind::module_& m);
// rows: (SampleParams, key, position, prompt_len, history as a tuple, mask bytes or None) for each row of logits, or None for one that is not drawn here.
// Gives (token, logprob, top) for each, or None; raises ValueError where a row is not made of finite numbers.
nanobind::list sample_rows(ThreadPool& pool, vb::SampleFn sample, const float* logits, const float* tops, int64_t vocab, nanobind::list rows);
}  // namespace verbatim
