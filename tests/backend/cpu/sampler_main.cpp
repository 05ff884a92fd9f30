// Samples recorded rows without Python, for emulated processors and for sanitizers. Reads rows from
// stdin as test_native_sampler.py writes them (little-endian 64-bit numbers, then arrays). Prints
// one line per row: the token, the bits of its log-probability, then id and bits of each
// alternative.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "sampler.h"

namespace VB_NS {
void sample_row(const float* logits, const float* tops, int64_t vocab, const vb::SampleRow& row,
                vb::SampleOut& out);
}

namespace {

template <class T> bool read(T* out, size_t count) {
    return fread(out, sizeof(T), count, stdin) == count;
}

template <class T> T read_one() {
    T value;
    if (!read(&value, 1)) exit(2);
    return value;
}

template <class T> std::vector<T> read_array() {
    std::vector<T> out((size_t)read_one<int64_t>());
    if (!read(out.data(), out.size())) exit(2);
    return out;
}

void read_scalars(vb::SampleParams& p) {
    for (double* x : {&p.temperature, &p.top_p, &p.min_p, &p.typical_p, &p.top_n_sigma,
                      &p.xtc_probability, &p.xtc_threshold, &p.repetition, &p.frequency,
                      &p.presence, &p.dry_multiplier, &p.dry_base})
        *x = read_one<double>();
    for (int64_t* x : {&p.top_k, &p.dry_allowed_length, &p.dry_range, &p.no_repeat_ngram,
                       &p.min_tokens, &p.logprobs})
        *x = read_one<int64_t>();
    for (bool* x : {&p.report, &p.processed, &p.restricted}) *x = read_one<int64_t>() != 0;
}

void read_lists(vb::SampleParams& p) {
    std::vector<int32_t> ids = read_array<int32_t>();
    std::vector<double> values = read_array<double>();
    for (size_t i = 0; i < ids.size(); i++) p.bias.emplace_back(ids[i], values[i]);
    for (auto* x : {&p.allowed, &p.banned, &p.withheld, &p.breaker_ids}) *x = read_array<int32_t>();
    for (int64_t runs = read_one<int64_t>(); runs; runs--)
        p.breaker_runs.push_back(read_array<int32_t>());
}

void print(double value) {
    uint64_t bits;
    memcpy(&bits, &value, 8);
    printf(" %016llx", (unsigned long long)bits);
}

}  // namespace

int main() {
    for (int64_t rows = read_one<int64_t>(); rows; rows--) {
        vb::SampleParams p;
        vb::SampleRow row{};
        row.params = &p;
        read_scalars(p);
        read_lists(p);
        row.key = read_one<uint64_t>();
        row.position = read_one<int64_t>();
        row.prompt_len = read_one<int64_t>();
        std::vector<int32_t> history = read_array<int32_t>();
        bool masked = read_one<int64_t>() != 0;
        std::vector<uint8_t> mask = read_array<uint8_t>();
        std::vector<float> logits = read_array<float>();
        row.history = history.data();
        row.history_len = (int64_t)history.size();
        if (masked)
            row.mask = mask.data() ? mask.data() : (const uint8_t*)"",
            row.mask_bytes = (int64_t)mask.size();
        vb::SampleOut out;
        VB_NS::sample_row(logits.data(), nullptr, (int64_t)logits.size(), row, out);
        printf("%lld", (long long)out.token);
        print(out.logprob);
        for (auto [id, value] : out.top) printf(" %d", id), print(value);
        printf("\n");
    }
}
