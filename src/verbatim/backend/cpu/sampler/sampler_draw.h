// The draw: the id with the largest d + g, ties to the lower id, as in sampling/draw.py, where g = -log(-log(u)) and u comes from (key, position, id).
//
// Two logarithms are spared for nearly every id, exactly. Since -log u >= 1 - u, g <= -log(1 - u), and an id can win only if d - log(1 - u) reaches the
// best score so far. That bound is computed in float32 from the upper 32 of u's bits: v = floor((1 - u) * 2^31) or less, and for a float w > 0 the
// integer of its bits, over 2^23, less 127, is at most log2 w. All roundings together are far below the slack by which the bar is lowered, so
// a bound can only let an id through in vain. Whoever gets through is computed as the specification says.
#pragma once
#include <cmath>

#include "sampler_logits.h"

namespace VB_NS {
namespace {

constexpr double MOST_NOISE = 36.75;  // u is at most 1 - 2^-53: g is at most 53 log 2 = 36.737

// An upper bound of d + g in units of log 2; d2 is d in these units, and `word` the upper half of the noise bits.
inline float score_bound(float d2, uint32_t word) {
    float v = (float)(int32_t)(~word >> 1);
    return d2 + (158.0f - (float)bits_of<int32_t>(v) * 0x1p-23f);  // 158 = 31 + 127; v = 0 gives 158, past all doubt
}

class Draw {
  public:
    Draw(uint64_t key, int64_t position) : key_(key), position_(position) {}

    int64_t winner() const { return winner_; }

    void from_list(const int32_t* ids, const double* d, int64_t n) {
        uint64_t even[COUNTERS], odd[COUNTERS];
        int64_t i = 0;
        for (; i + COUNTERS <= n; i += COUNTERS) {
            noise_words(key_, position_, counters_of(ids + i), even, odd);
            float bound[COUNTERS];
            for (int j = 0; j < COUNTERS; j++)
                bound[j] = score_bound((float)(d[i + j] * LOG2E), (uint32_t)(ids[i + j] & 1 ? odd[j] : even[j]));
            for (int j = 0; j < COUNTERS; j++)
                if (!(bound[j] < bar_)) offer(ids[i + j], d[i + j]);
        }
        for (; i < n; i++) offer(ids[i], d[i]);
    }

    // All live ids of a row with d = (logit - top) / temperature.
    template <class D> void from_row(const Logits& x, double top, double temperature, D d_of, Work& w) {
        scale_ = (float)(LOG2E / temperature);
        top_ = (float)top;
        double rounding = std::fabs(top) * 0x1p-22 * (double)scale_;  // what top's float and the difference may be off
        // The best of the float row first: it raises the bar for the rest.
        const float* row = x.row();
        int64_t best = x.best_chunk() * CHUNK;
        for (int64_t i = best, stop = std::min(best + CHUNK, x.vocab()); i < stop; i++) best = row[i] > row[best] ? i : best;
        if (row[best] > NONE_F) offer((int32_t)best, d_of((double)row[best]));
        int32_t* ids = w.ids.room(x.vocab());
        double* d = w.d.room(x.vocab());
        int64_t n = 0;
        x.each_edited([&](int32_t id, double logit) { ids[n] = id, d[n++] = d_of(logit); });
        from_list(ids, d, n);
        for (int64_t c = 0; c < x.chunks(); c++) {
            if ((double)x.chunk_top(c) < top + (score_ - MOST_NOISE) * temperature * 1.000001 - std::fabs(top) * 1e-6) continue;
            if ((c + 1) * CHUNK <= x.vocab()) from_chunk(row, c * CHUNK, (float)rounding, d_of);
            else
                for (int64_t i = c * CHUNK; i < x.vocab(); i++)
                    if (row[i] > NONE_F) offer((int32_t)i, d_of((double)row[i]));
        }
    }

  private:
    template <class D> void from_chunk(const float* row, int64_t from, float rounding, D d_of) {
        const float* x = row + from;
        uint32_t words[CHUNK];
        for (int64_t half = 0; half < CHUNK; half += 2 * COUNTERS) {
            uint64_t even[COUNTERS], odd[COUNTERS];
            noise_words(key_, position_, counters_from((uint64_t)(from + half) / 2), even, odd);
            for (int j = 0; j < COUNTERS; j++) even[j] = (even[j] & 0xFFFFFFFFu) | odd[j] << 32;
            std::memcpy(words + half, even, sizeof even);  // little-endian: an even id's word, then its odd neighbour's
        }
        float bar = bar_ - rounding;
        int may[CHUNK], any = 0;
        for (int64_t j = 0; j < CHUNK; j++) may[j] = !(score_bound((x[j] - top_) * scale_, words[j]) < bar);
        for (int64_t j = 0; j < CHUNK; j++) any |= may[j];
        if (!any) return;
        for (int64_t j = 0; j < CHUNK; j++)
            if (may[j] && x[j] > NONE_F) offer((int32_t)(from + j), d_of((double)x[j]));
    }

    void offer(int32_t id, double d) {
        double u = uniform_of(noise_bits(key_, position_, (uint32_t)id, DOMAIN_TOKEN));
        double score = d + -log_of(-log_of(u));
        if (winner_ >= 0 && (score < score_ || (score == score_ && id > winner_))) return;
        winner_ = id;
        score_ = score;
        double bar = score * LOG2E;
        bar_ = (float)(bar - 0.01 - std::fabs(bar) * 1e-6);
    }

    uint64_t key_;
    int64_t position_, winner_ = -1;
    double score_ = NONE;
    float bar_ = NONE_F, top_ = 0, scale_ = 1;
};

}  // namespace
}  // namespace VB_NS
