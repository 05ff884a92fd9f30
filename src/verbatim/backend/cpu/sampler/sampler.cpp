// Samples one token from one row of logits, or scores a given token, bit for bit as
// sampling/pipeline.py and sampling/logprobs.py. Compiled once per instruction set (VB_NS). The
// stages, in order: sampler_math.h (arithmetic), _logits.h (the row), _edits.h (bias, bans,
// penalties), _filters.h, _draw.h.
#include "sampler.h"

#include "sampler_draw.h"
#include "sampler_edits.h"
#include "sampler_filters.h"

namespace VB_NS {
namespace {

using vb::SampleOut;

// A log-probability is (value - peak) - norm, for the raw and the processed distribution alike.
void report_list(const Filters& list, double norm, SampleOut& out, int64_t count, Scratch& w) {
    const int32_t* ids = list.ids();
    const double* value = list.d();
    const int32_t* at = std::lower_bound(ids, ids + list.size(), (int32_t)out.token);
    out.logprob = (value[at - ids] - list.peak()) - norm;
    count = std::min(count, list.size());
    int32_t* order = w.order.reserve(list.size());
    for (int64_t i = 0; i < list.size(); i++) order[i] = (int32_t)i;
    std::partial_sort(order, order + count, order + list.size(), [value](int32_t a, int32_t b) {
        return value[a] > value[b] || (value[a] == value[b] && a < b);
    });
    // A tiny temperature turns a finite logit into -inf; such a token cannot be sampled.
    for (int64_t i = 0; i < count && value[order[i]] > NEG_INF; i++)
        out.top.emplace_back(ids[order[i]], (value[order[i]] - list.peak()) - norm);
}

void report_processed(Filters& list, SampleOut& out, int64_t count, Scratch& w) {
    double norm = log_mass(list.compute_masses());
    report_list(list, norm, out, count, w);
}

// The raw distribution of the model.
void report_raw(const Logits& x, SampleOut& out, int64_t count, Scratch& w) {
    const float* raw = x.raw();
    double top = x.raw_top(), norm = log_mass(total_mass(raw, x.vocab(), top));
    out.logprob = ((double)raw[out.token] - top) - norm;
    if (count <= 0) return;
    int32_t* ids = w.ids.reserve(x.vocab());
    int64_t n = x.raw_at_least(std::max(x.raw_value_reached_by(count), -FLT_MAX), ids);
    count = std::min(count, n);
    std::partial_sort(ids, ids + count, ids + n, [raw](int32_t a, int32_t b) {
        return raw[a] > raw[b] || (raw[a] == raw[b] && a < b);
    });
    for (int64_t i = 0; i < count; i++)
        out.top.emplace_back(ids[i], ((double)raw[ids[i]] - top) - norm);
}

void run(const float* logits, const float* chunk_maxes, int64_t vocab, const SampleRow& row,
         SampleOut& out, Scratch& w) {
    Logits x(logits, chunk_maxes, vocab, w);
    out.finite = x.scan();
    if (!out.finite) return;
    if (row.target >= 0) {
        out.token = row.target;
        return report_raw(x, out, row.target_top, w);
    }
    const SampleParams& p = *row.params;
    Edits edits(x, row, w);
    if (edits.needed()) edits.run();
    if (!(x.top() > NEG_INF)) {
        out.logprob = NEG_INF;
        return;
    }
    Filters left(x, row, w);
    bool greedy = p.temperature == 0.0;
    if (greedy) {
        out.token = x.first_best();
    } else {
        left.run();
        Draw draw(row.key, row.counter());
        if (left.listed()) draw.from_list(left.ids(), left.d(), left.size());
        else
            draw.from_row(
                x, x.top(), p.temperature, [&](double logit) { return left.d_of(logit); }, w);
        out.token = draw.winner();
    }
    if (row.step >= 0) {
        greedy ? left.list_logits() : left.list();
        report_processed(left, out, 0, w);
        out.denoised = true;
        out.confidence = out.logprob;
        out.logprob = 0;
    }
    if (!p.report) return;
    if (!p.processed) return report_raw(x, out, p.logprobs, w);
    greedy ? left.list_logits() : left.list();
    report_processed(left, out, p.logprobs, w);
}

}  // namespace

void sample_row(const float* logits, const float* chunk_maxes, int64_t vocab, const SampleRow& row,
                SampleOut& out) {
    static thread_local Scratch work;
    run(logits, chunk_maxes, vocab, row, out, work);
}

}  // namespace VB_NS
