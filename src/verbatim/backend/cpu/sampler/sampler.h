// The sampler's native twin: the same token, log-probability and alternatives as sampling/pipeline.py, to the bit.
// In: one row of float32 logits and a SampleRow. Out: a SampleOut. No state: a row is a function of itself alone.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

namespace vb {

// What a request asks of the sampler; made once a request. Names and meanings as in base/params.py.
struct SampleParams {
    double temperature = 1, top_p = 1, min_p = 0, typical_p = 1, top_n_sigma = 0, xtc_probability = 0, xtc_threshold = 0.1;
    double repetition = 1, frequency = 0, presence = 0, dry_multiplier = 0, dry_base = 1.75;
    int64_t top_k = 0, dry_allowed_length = 2, dry_range = 0, no_repeat_ngram = 0, min_tokens = 0, logprobs = 0;
    bool report = false;      // somebody reads the log-probability; without, it stays 0 and costs nothing
    bool processed = false;   // report log-probabilities of the distribution that was drawn from
    bool restricted = false;  // allowed_token_ids was given
    std::vector<std::pair<int32_t, double>> bias;
    std::vector<int32_t> allowed, banned, withheld;
    std::vector<int32_t> breaker_ids;                // DRY: ids that break a repeat, ascending (there may be thousands)
    std::vector<std::vector<int32_t>> breaker_runs;  // and runs of two or more ids
};

struct SampleRow {
    const SampleParams* params;
    uint64_t key;
    int64_t position, prompt_len;
    const int32_t* history;
    int64_t history_len;
    const uint8_t* mask;  // nullptr: no grammar
    int64_t mask_bytes;
};

struct SampleOut {
    int64_t token = -1;  // -1: bans left nothing to draw
    double logprob = 0;
    bool finite = true;  // false: the row held a NaN or an infinity
    std::vector<std::pair<int32_t, double>> top;
};

constexpr int64_t CHUNK = 64;  // ids whose largest logit is kept

// `tops`: the largest logit of each chunk, NaN where there is one, from whoever made the logits; null: they are looked for.
using SampleFn = void (*)(const float* logits, const float* tops, int64_t vocab, const SampleRow& row, SampleOut& out);

}  // namespace vb
