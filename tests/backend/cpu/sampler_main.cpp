// Draws recorded rows without Python: for other processors under an emulator, and for sanitizers. Reads rows from stdin as test_native_sampler.py writes
// them (little-endian 64-bit numbers, then arrays); prints one line a row: token, log-probability's bits, then id and bits of each alternative.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "sampler.h"

namespace VB_NS {
void sample_row(const float* logits, const float* tops, int64_t vocab, const vb::SampleRow& row, vb::SampleOut& out);
}

namespace {

template <class T> bool read(T* out, size_t count) { return fread(out, sizeof(T), count, stdin) == count; }

template <class T> T one() {
    T value;
    if (!read(&value, 1)) exit(2);
    return value;
}

template <class T> std::vector<T> many() {
    std::vector<T> out((size_t)one<int64_t>());
    if (!read(out.data(), out.size())) exit(2);
    return out;
}

void numbers(vb::SampleParams& p) {
    for (double* x : {&p.temperature, &p.top_p, &p.min_p, &p.typical_p, &p.top_n_sigma, &p.xtc_probability, &p.xtc_threshold, &p.repetition, &p.frequency,
                      &p.presence, &p.dry_multiplier, &p.dry_base})
        *x = one<double>();
    for (int64_t* x : {&p.top_k, &p.dry_allowed_length, &p.dry_range, &p.no_repeat_ngram, &p.min_tokens, &p.logprobs}) *x = one<int64_t>();
    for (bool* x : {&p.report, &p.processed, &p.restricted}) *x = one<int64_t>() != 0;
}

void lists(vb::SampleParams& p) {
    std::vector<int32_t> ids = many<int32_t>();
    std::vector<double> values = many<double>();
    for (size_t i = 0; i < ids.size(); i++) p.bias.emplace_back(ids[i], values[i]);
    for (auto* x : {&p.allowed, &p.banned, &p.withheld, &p.breaker_ids}) *x = many<int32_t>();
    for (int64_t runs = one<int64_t>(); runs; runs--) p.breaker_runs.push_back(many<int32_t>());
}

void print(double value) {
    uint64_t bits;
    memcpy(&bits, &value, 8);
    printf(" %016llx", (unsigned long long)bits);
}

}  // namespace

int main() {
    for (int64_t rows = one<int64_t>(); rows; rows--) {
        vb::SampleParams p;
        vb::SampleRow row{};
        row.params = &p;
        numbers(p);
        lists(p);
        row.key = one<uint64_t>();
        row.position = one<int64_t>();
        row.prompt_len = one<int64_t>();
        std::vector<int32_t> history = many<int32_t>();
        bool masked = one<int64_t>() != 0;
        std::vector<uint8_t> mask = many<uint8_t>();
        std::vector<float> logits = many<float>();
        row.history = history.data();
        row.history_len = (int64_t)history.size();
        if (masked) row.mask = mask.data() ? mask.data() : (const uint8_t*)"", row.mask_bytes = (int64_t)mask.size();
        vb::SampleOut out;
        VB_NS::sample_row(logits.data(), nullptr, (int64_t)logits.size(), row, out);
        printf("%lld", (long long)out.token);
        print(out.logprob);
        for (auto [id, value] : out.top) printf(" %d", id), print(value);
        printf("\n");
    }
}
