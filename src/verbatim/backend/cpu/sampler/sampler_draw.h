// Gumbel-max sampling: the id with the largest d + g, ties to the lower id, as in sampling/draw.py.
// g = -log(-log(u)) is the Gumbel noise, and u is a function of (key, position, id).
//
// Both logarithms are skipped for nearly every id, without changing the result. Since -log u >= 1 -
// u, g <= -log(1 - u), so an id can win only if d - log(1 - u) reaches the best score so far. That
// bound is computed in float32 from the upper 32 bits of u: v <= floor((1 - u) * 2^31), and for a
// float w > 0 its bits as an integer, divided by 2^23, minus 127, are at most log2 w. All rounding
// errors together are far below the slack by which the threshold is lowered, so the bound never
// rejects a winner. An id that passes is computed as specified.
#pragma once
#include <cmath>

#include "sampler_logits.h"

namespace VB_NS {
namespace {

constexpr double MAX_NOISE = 36.75;  // u <= 1 - 2^-53, so g <= 53 log 2 = 36.737

// Upper bound of d + g in units of log 2; d2 is d in these units, `word` the upper half of the
// noise bits.
inline float score_bound(float d2, uint32_t word) {
    float v = (float)(int32_t)(~word >> 1);
    // 158 = 31 + 127; v = 0 gives a bound of 158, which always passes.
    return d2 + (158.0f - (float)bits_of<int32_t>(v) * 0x1p-23f);
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
                bound[j] = score_bound((float)(d[i + j] * LOG2E),
                                       (uint32_t)(ids[i + j] & 1 ? odd[j] : even[j]));
            for (int j = 0; j < COUNTERS; j++)
                if (!(bound[j] < threshold_)) consider(ids[i + j], d[i + j]);
        }
        for (; i < n; i++) consider(ids[i], d[i]);
    }

    // All remaining ids of a row, with d = (logit - top) / temperature.
    template <class D>
    void from_row(const Logits& x, double top, double temperature, D d_of, Scratch& w) {
        scale_ = (float)(LOG2E / temperature);
        top_ = (float)top;
        // Rounding error of top in float32 and of the difference.
        double rounding = std::fabs(top) * 0x1p-22 * (double)scale_;
        // The largest logit first: its score raises the threshold for the rest.
        const float* row = x.row();
        int64_t best = x.best_chunk() * CHUNK;
        for (int64_t i = best, stop = std::min(best + CHUNK, x.vocab()); i < stop; i++)
            best = row[i] > row[best] ? i : best;
        if (row[best] > NEG_INF_F) consider((int32_t)best, d_of((double)row[best]));
        int32_t* ids = w.ids.reserve(x.vocab());
        double* d = w.d.reserve(x.vocab());
        int64_t n = 0;
        x.each_edited([&](int32_t id, double logit) { ids[n] = id, d[n++] = d_of(logit); });
        from_list(ids, d, n);
        for (int64_t c = 0; c < x.chunks(); c++) {
            if ((double)x.chunk_max(c) <
                top + (score_ - MAX_NOISE) * temperature * 1.000001 - std::fabs(top) * 1e-6)
                continue;
            if ((c + 1) * CHUNK <= x.vocab()) from_chunk(row, c * CHUNK, (float)rounding, d_of);
            else
                for (int64_t i = c * CHUNK; i < x.vocab(); i++)
                    if (row[i] > NEG_INF_F) consider((int32_t)i, d_of((double)row[i]));
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
            // Little-endian: the word of an even id, then that of its odd neighbour.
            std::memcpy(words + half, even, sizeof even);
        }
        float threshold = threshold_ - rounding;
        int passes[CHUNK], any = 0;
        for (int64_t j = 0; j < CHUNK; j++)
            passes[j] = !(score_bound((x[j] - top_) * scale_, words[j]) < threshold);
        for (int64_t j = 0; j < CHUNK; j++) any |= passes[j];
        if (!any) return;
        for (int64_t j = 0; j < CHUNK; j++)
            if (passes[j] && x[j] > NEG_INF_F) consider((int32_t)(from + j), d_of((double)x[j]));
    }

    void consider(int32_t id, double d) {
        double u = uniform_of(noise_bits(key_, position_, (uint32_t)id, DOMAIN_TOKEN));
        double score = d + -log_of(-log_of(u));
        if (winner_ >= 0 && (score < score_ || (score == score_ && id > winner_))) return;
        winner_ = id;
        score_ = score;
        double threshold = score * LOG2E;
        threshold_ = (float)(threshold - 0.01 - std::fabs(threshold) * 1e-6);
    }

    uint64_t key_;
    int64_t position_, winner_ = -1;
    double score_ = NEG_INF;
    float threshold_ = NEG_INF_F, top_ = 0, scale_ = 1;
};

}  // namespace
}  // namespace VB_NS
