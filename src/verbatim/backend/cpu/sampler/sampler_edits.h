// Bias, bans, grammar mask and penalties: the changes of the logits before temperature. Names and
// order as in sampling/processors.py.
#pragma once
#include "sampler.h"
#include "sampler_logits.h"

namespace VB_NS {
namespace {

using vb::SampleParams;
using vb::SampleRow;

constexpr int64_t DRY_GROWTH = 63;  // cap of the exponent of the DRY penalty

class Edits {
  public:
    Edits(Logits& x, const SampleRow& row, Scratch& w)
        : x_(x), row_(row), p_(*row.params), w_(w), history_(row.history), len_(row.history_len) {}

    bool needed() const {
        return !p_.bias.empty() || row_.mask || p_.restricted || !p_.banned.empty() ||
               withholding() || len_;
    }

    // Mask and allow-list run before the bias here and after it in the specification: the bias of a
    // removed id has no effect either way.
    void run() {
        x_.make_writable();
        if (row_.mask) apply_mask();
        if (p_.restricted) apply_allowed();
        for (auto [id, value] : p_.bias) x_.edit(id) += value;
        for (int32_t id : p_.banned) x_.edit(id) = NEG_INF;
        if (withholding())
            for (int32_t id : p_.withheld) x_.edit(id) = NEG_INF;
        if (len_) penalties();
        x_.finish_edits();
    }

  private:
    bool withholding() const {
        return !p_.withheld.empty() && row_.position - row_.prompt_len < p_.min_tokens;
    }

    void apply_mask() {
        float* x = x_.writable();
        int64_t vocab = x_.vocab(), full_bytes = std::min(vocab / 8, row_.mask_bytes),
                i = full_bytes * 8;
        for (int64_t b = 0; b < full_bytes; b++) {
            uint8_t open = row_.mask[b];
            if (open == 0xff) continue;
            for (int j = 0; j < 8; j++) x[b * 8 + j] = open >> j & 1 ? x[b * 8 + j] : NEG_INF_F;
        }
        if (full_bytes < row_.mask_bytes)
            for (; i < vocab && i / 8 == full_bytes; i++)
                x[i] = row_.mask[full_bytes] >> (i % 8) & 1 ? x[i] : NEG_INF_F;
        std::fill(x + i, x + vocab, NEG_INF_F);
    }

    void apply_allowed() {
        float* x = x_.writable();
        w_.candidates.clear();
        for (int32_t id : p_.allowed) w_.candidates.push_back({(double)x[id], 0, id});
        std::fill(x, x + x_.vocab(), NEG_INF_F);
        for (const Candidate& c : w_.candidates) x[c.id] = (float)c.key;
    }

    void penalties() {
        if (p_.repetition != 1.0) repetition();
        if (len_ > row_.prompt_len && (p_.frequency != 0.0 || p_.presence != 0.0)) counts();
        if (p_.dry_multiplier != 0.0 && len_ > 1) dry();
        if (0 < p_.no_repeat_ngram && p_.no_repeat_ngram <= len_) no_repeat();
    }

    void repetition() {
        x_.begin_pass();
        for (int64_t i = 0; i < len_; i++) {
            if (!x_.first_visit(history_[i])) continue;
            double& x = x_.edit(history_[i]);
            x = x > 0.0 ? x / p_.repetition : x * p_.repetition;
        }
    }

    void counts() {
        x_.begin_pass();
        w_.extra_ids.clear();
        for (int64_t i = row_.prompt_len; i < len_; i++) {
            if (x_.first_visit(history_[i])) w_.extra_ids.push_back(history_[i]);
            x_.count(history_[i])++;
        }
        for (int32_t id : w_.extra_ids) {
            double& x = x_.edit(id);
            if (p_.frequency != 0.0) x -= p_.frequency * (double)x_.count(id);
            if (p_.presence != 0.0) x -= p_.presence;
        }
    }

    // Whether a DRY sequence breaker, an id or a run of ids, covers position `at`.
    bool breaks(const int32_t* text, int64_t n, int64_t at) const {
        if (std::binary_search(p_.breaker_ids.begin(), p_.breaker_ids.end(), text[at])) return true;
        for (const auto& run : p_.breaker_runs) {
            int64_t len = (int64_t)run.size();
            for (int64_t from = std::max<int64_t>(0, at - len + 1); from <= at && from + len <= n;
                 from++)
                if (std::equal(run.begin(), run.end(), text + from)) return true;
        }
        return false;
    }

    // As repeat_lengths in sampling/penalties.py: for each id that followed an earlier run equal
    // to the end of the history, the longest such run.
    void dry() {
        int64_t n = p_.dry_range ? std::min(len_, p_.dry_range) : len_, last = n - 1;
        const int32_t* text = history_ + (len_ - n);
        if (last < 1 || breaks(text, n, last)) return;
        // bound: ids at the end of the history without a breaker.
        int64_t limit = p_.dry_allowed_length + DRY_GROWTH, bound = 1;
        while (bound < limit && bound <= last && !breaks(text, n, last - bound)) bound++;
        x_.begin_pass();
        w_.extra_ids.clear();
        for (int64_t end = 0; end < last; end++) {
            if (text[end] != text[last] || breaks(text, n, end + 1)) continue;
            int64_t length = 1;
            while (length < bound && end >= length && text[end - length] == text[last - length])
                length++;
            int32_t id = text[end + 1];
            if (x_.first_visit(id)) w_.extra_ids.push_back(id);
            x_.count(id) = std::max(x_.count(id), length);
        }
        for (int32_t id : w_.extra_ids) {
            if (x_.count(id) < p_.dry_allowed_length) continue;
            double growth = 1.0;
            for (int64_t i = p_.dry_allowed_length; i < x_.count(id); i++) growth *= p_.dry_base;
            x_.edit(id) -= p_.dry_multiplier * growth;
        }
    }

    void no_repeat() {
        int64_t n = p_.no_repeat_ngram;
        for (int64_t at = 0; at + n <= len_; at++)
            if (std::equal(history_ + at, history_ + at + n - 1, history_ + len_ - n + 1))
                x_.edit(history_[at + n - 1]) = NEG_INF;
    }

    Logits& x_;
    const SampleRow& row_;
    const SampleParams& p_;
    Scratch& w_;
    const int32_t* history_;
    int64_t len_;
};

}  // namespace
}  // namespace VB_NS
