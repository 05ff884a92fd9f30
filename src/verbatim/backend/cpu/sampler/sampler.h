// The native sampler: the same token, log-probability and alternatives as sampling/pipeline.py, bit
// for bit. In: one row of float32 logits and a SampleRow. Out: a SampleOut. Stateless: the result
// depends on nothing else.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

namespace vb {

// Sampling parameters, built once per request. Names and meanings as in base/params.py.
struct SampleParams {
    double temperature = 1, top_p = 1, min_p = 0, typical_p = 1, top_n_sigma = 0,
           xtc_probability = 0, xtc_threshold = 0.1;
    double repetition = 1, frequency = 0, presence = 0, dry_multiplier = 0, dry_base = 1.75;
    int64_t top_k = 0, dry_allowed_length = 2, dry_range = 0, no_repeat_ngram = 0, min_tokens = 0,
            logprobs = 0;
    bool report = false;      // compute the log-probability; otherwise it stays 0
    bool processed = false;   // report the distribution after all filters, not the raw one
    bool restricted = false;  // allowed_token_ids is set
    std::vector<std::pair<int32_t, double>> bias;
    std::vector<int32_t> allowed, banned, withheld;
    std::vector<int32_t>
        breaker_ids;  // DRY sequence breakers of one id, ascending (may be thousands)
    std::vector<std::vector<int32_t>> breaker_runs;  // DRY sequence breakers of two or more ids
};

struct SampleRow {
    const SampleParams* params;
    uint64_t key;
    int64_t position, prompt_len;
    const int32_t* history;
    int64_t history_len;
    const uint8_t* mask;  // nullptr: no grammar
    int64_t mask_bytes;
    // >= 0: score this id of a prompt instead of sampling; params is not read. The distribution is
    // the model's own.
    int64_t target = -1;
    int64_t target_top = 0;  // best ids to report with the target
    int64_t step = -1;       // denoising step; -1: autoregressive
    // What the noise counts: position + 2^32 * step.
    int64_t counter() const { return position | (step > 0 ? step << 32 : 0); }
};

struct SampleOut {
    int64_t token = -1;  // -1: no token is left to sample
    double logprob = 0;
    bool denoised = false;  // `confidence` is set
    double confidence = 0;  // log-probability in the distribution that is sampled
    bool finite = true;  // false: the row holds a NaN or an infinity
    std::vector<std::pair<int32_t, double>> top;
};

constexpr int64_t CHUNK = 64;  // token ids per chunk; the largest logit of each chunk is known

// chunk_maxes: the largest logit of each chunk, NaN if it holds one; null: computed here.
using SampleFn = void (*)(const float* logits, const float* chunk_maxes, int64_t vocab,
                          const SampleRow& row, SampleOut& out);

}  // namespace vb
