// Bias, bans and penalties: what happens to a row of logits before the temperature. Names and order as in sampling/processors.py.
#pragma once
#include "sampler.h"
#include "sampler_logits.h"

namespace VB_NS {
namespace {

using vb::SampleParams;
using vb::SampleRow;

constexpr int64_t DRY_GROWTH = 63;

class Edits {
  public:
    Edits(Logits& x, const SampleRow& row, Work& w) : x_(x), row_(row), p_(*row.params), w_(w), text_(row.history), len_(row.history_len) {}

    bool wanted() const {
        return !p_.bias.empty() || row_.mask || p_.restricted || !p_.banned.empty() || withholds() || len_;
    }

    // What removes ids comes first here and second in the specification: the bias of a removed id is lost either way.
    void run() {
        x_.own();
        if (row_.mask) grammar();
        if (p_.restricted) allow();
        for (auto [id, value] : p_.bias) x_.edit(id) += value;
        for (int32_t id : p_.banned) x_.edit(id) = NONE;
        if (withholds())
            for (int32_t id : p_.withheld) x_.edit(id) = NONE;
        if (len_) penalties();
        x_.settle();
    }

  private:
    bool withholds() const { return !p_.withheld.empty() && row_.position - row_.prompt_len < p_.min_tokens; }

    void grammar() {
        float* x = x_.mine();
        int64_t vocab = x_.vocab(), whole = std::min(vocab / 8, row_.mask_bytes), i = whole * 8;
        for (int64_t b = 0; b < whole; b++) {
            uint8_t open = row_.mask[b];
            if (open == 0xff) continue;
            for (int j = 0; j < 8; j++) x[b * 8 + j] = open >> j & 1 ? x[b * 8 + j] : NONE_F;
        }
        if (whole < row_.mask_bytes)
            for (; i < vocab && i / 8 == whole; i++) x[i] = row_.mask[whole] >> (i % 8) & 1 ? x[i] : NONE_F;
        std::fill(x + i, x + vocab, NONE_F);
    }

    void allow() {
        float* x = x_.mine();
        w_.candidates.clear();
        for (int32_t id : p_.allowed) w_.candidates.push_back({(double)x[id], 0, id});
        std::fill(x, x + x_.vocab(), NONE_F);
        for (const Candidate& c : w_.candidates) x[c.id] = (float)c.key;
    }

    void penalties() {
        if (p_.repetition != 1.0) repetition();
        if (len_ > row_.prompt_len && (p_.frequency != 0.0 || p_.presence != 0.0)) counts();
        if (p_.dry_multiplier != 0.0 && len_ > 1) dry();
        if (0 < p_.no_repeat_ngram && p_.no_repeat_ngram <= len_) no_repeat();
    }

    void repetition() {
        x_.look();
        for (int64_t i = 0; i < len_; i++) {
            if (!x_.first(text_[i])) continue;
            double& x = x_.edit(text_[i]);
            x = x > 0.0 ? x / p_.repetition : x * p_.repetition;
        }
    }

    void counts() {
        x_.look();
        w_.loose.clear();
        for (int64_t i = row_.prompt_len; i < len_; i++) {
            if (x_.first(text_[i])) w_.loose.push_back(text_[i]);
            x_.count(text_[i])++;
        }
        for (int32_t id : w_.loose) {
            double& x = x_.edit(id);
            if (p_.frequency != 0.0) x -= p_.frequency * (double)x_.count(id);
            if (p_.presence != 0.0) x -= p_.presence;
        }
    }

    // Does a breaker, an id or a run of ids, cover this place of the text?
    bool breaks(const int32_t* text, int64_t n, int64_t at) const {
        if (std::binary_search(p_.breaker_ids.begin(), p_.breaker_ids.end(), text[at])) return true;
        for (const auto& run : p_.breaker_runs) {
            int64_t len = (int64_t)run.size();
            for (int64_t from = std::max<int64_t>(0, at - len + 1); from <= at && from + len <= n; from++)
                if (std::equal(run.begin(), run.end(), text + from)) return true;
        }
        return false;
    }

    // As `repeat_lengths`: for each id that followed an earlier run equal to the text's end, the longest such run.
    void dry() {
        int64_t n = p_.dry_range ? std::min(len_, p_.dry_range) : len_, last = n - 1;
        const int32_t* text = text_ + (len_ - n);
        if (last < 1 || breaks(text, n, last)) return;
        int64_t limit = p_.dry_allowed_length + DRY_GROWTH, bound = 1;  // how far back the end of the text runs without a breaker
        while (bound < limit && bound <= last && !breaks(text, n, last - bound)) bound++;
        x_.look();
        w_.loose.clear();
        for (int64_t end = 0; end < last; end++) {
            if (text[end] != text[last] || breaks(text, n, end + 1)) continue;
            int64_t length = 1;
            while (length < bound && end >= length && text[end - length] == text[last - length]) length++;
            int32_t id = text[end + 1];
            if (x_.first(id)) w_.loose.push_back(id);
            x_.count(id) = std::max(x_.count(id), length);
        }
        for (int32_t id : w_.loose) {
            if (x_.count(id) < p_.dry_allowed_length) continue;
            double growth = 1.0;
            for (int64_t i = p_.dry_allowed_length; i < x_.count(id); i++) growth *= p_.dry_base;
            x_.edit(id) -= p_.dry_multiplier * growth;
        }
    }

    void no_repeat() {
        int64_t n = p_.no_repeat_ngram;
        for (int64_t at = 0; at + n <= len_; at++)
            if (std::equal(text_ + at, text_ + at + n - 1, text_ + len_ - n + 1)) x_.edit(text_[at + n - 1]) = NONE;
    }

    Logits& x_;
    const SampleRow& row_;
    const SampleParams& p_;
    Work& w_;
    const int32_t* text_;
    int64_t len_;
};

}  // namespace
}  // namespace VB_NS
