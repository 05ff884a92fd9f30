// Compiled once for each instruction set (VB_NS). Plain loops over IEEE float64, no fused multiply-add, no library function and no float
// sum of open order: the compiler may use any vectors it has and the bits stay those of sampling/numerics.py, whose names are kept here.
#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <unordered_map>

namespace VB_NS {
namespace {

using vb::SampleOut;
using vb::SampleParams;
using vb::SampleRow;

constexpr double NONE = -std::numeric_limits<double>::infinity();
constexpr double LOG2E = 0x1.71547652b82fep+0, LN2_HI = 0x1.62e42fee00000p-1, LN2_LO = 0x1.a39ef35793c76p-33;
constexpr double ROUND = 0x1.8p+52;
constexpr uint64_t SQRT2_MANTISSA = 0x6A09E667F3BCD, MANTISSA = 0xFFFFFFFFFFFFF;
constexpr double MASS_ONE = 0x1p42, MASS_FLOOR = -30.0;
constexpr int64_t DRY_GROWTH = 63;
constexpr uint32_t DOMAIN_TOKEN = 0, DOMAIN_XTC = 1;

inline uint64_t as_bits(double x) { uint64_t b; std::memcpy(&b, &x, 8); return b; }
inline double as_double(uint64_t b) { double x; std::memcpy(&x, &b, 8); return x; }

// e^x for -708 <= x <= 0. t's low mantissa bits hold k, so shifting them into the exponent needs no conversion.
inline double exp_live(double x) {
    double t = x * LOG2E + ROUND, k = t - ROUND;
    double r = (x - k * LN2_HI) - k * LN2_LO;
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 1.0 / 2.0;
    p = p * r + 1.0;
    p = p * r + 1.0;
    return as_double(as_bits(p) + (as_bits(t) << 52));
}

inline double log_of(double x) {
    uint64_t bits = as_bits(x), mantissa = bits & MANTISSA;
    uint64_t upper = mantissa >= SQRT2_MANTISSA;
    double k = (double)((int64_t)(bits >> 52) - 1023 + (int64_t)upper);
    double m = as_double(mantissa | ((1023 - upper) << 52));
    double f = m - 1.0, s = f / (2.0 + f), z = s * s;
    double p = 1.0 / 21.0;
    p = p * z + 1.0 / 19.0;
    p = p * z + 1.0 / 17.0;
    p = p * z + 1.0 / 15.0;
    p = p * z + 1.0 / 13.0;
    p = p * z + 1.0 / 11.0;
    p = p * z + 1.0 / 9.0;
    p = p * z + 1.0 / 7.0;
    p = p * z + 1.0 / 5.0;
    p = p * z + 1.0 / 3.0;
    p = p * z + 1.0;
    return k * LN2_HI + ((s + s) * p + k * LN2_LO);
}

// Whole numbers below 2^52 from and to float64 by the mantissa alone: these vectorise where a conversion instruction does not.
inline int64_t whole_part(double x) {
    double t = (x + 0x1p52) - 0x1p52;
    t -= t > x ? 1.0 : 0.0;
    return (int64_t)(as_bits(t + 0x1p52) - as_bits(0x1p52));
}
inline double from_whole(uint64_t n) { return as_double(n | as_bits(0x1p52)) - 0x1p52; }

inline double log_mass(int64_t total) { return log_of((double)total / MASS_ONE); }

inline int64_t mass_needed(double share, int64_t total) {
    double asked = share * (double)total;
    int64_t whole = (int64_t)asked;
    whole += asked > (double)whole;
    return std::max<int64_t>(1, std::min(total, whole));
}

// floor(e^(x - peak) * 2^42) of each; returns their sum, which is one of integers and so has no order.
int64_t masses(const double* x, double peak, int64_t n, int64_t* out) {
    for (int64_t i = 0; i < n; i++) {
        double d = x[i] - peak;
        d = d > MASS_FLOOR ? d : MASS_FLOOR;  // e^-30 * 2^42 is below 1: its whole part is 0
        out[i] = whole_part(exp_live(d) * MASS_ONE);
    }
    int64_t total = 0;  // a loop of its own: together the compiler gives up on vectors
    for (int64_t i = 0; i < n; i++) total += out[i];
    return total;
}

// ---------------------------------------------------------------------------------------------------------- noise

struct Words { uint32_t w[4]; };

inline Words philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key) {
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)c0 * 0xD2511F53u, p1 = (uint64_t)c2 * 0xCD9E8D57u;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c0 = n0; c1 = (uint32_t)p1; c2 = n2; c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

inline double uniform(uint64_t key, int64_t position, uint32_t id, uint32_t domain) {
    Words r = philox(id >> 1, (uint32_t)position, (uint32_t)((uint64_t)position >> 32), domain, key);
    uint64_t bits = id & 1 ? (r.w[2] | (uint64_t)r.w[3] << 32) : (r.w[0] | (uint64_t)r.w[1] << 32);
    return (from_whole(bits >> 12) + 0.5) * 0x1p-52;
}

// ---------------------------------------------------------------------------------------------------------- the row

// Scratch of one thread: a row's arrays, kept between rows so that no memory is asked for while writing.
struct Work {
    std::vector<double> logits, d, keys;
    std::vector<int64_t> mass;
    std::vector<int32_t> ids, order, text;
    std::vector<uint8_t> flags;
    std::vector<std::pair<double, int32_t>> heap;
};

double peak_of(const double* x, int64_t n) {
    double lanes[8];
    std::fill(lanes, lanes + 8, NONE);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
    double best = NONE;
    for (double lane : lanes) best = lane > best ? lane : best;
    for (; i < n; i++) best = x[i] > best ? x[i] : best;
    return best;
}

template <class T> int64_t first_at(const T* x, T value, int64_t n) {
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        int any = 0;
        for (int j = 0; j < 32; j++) any |= x[i + j] == value;
        if (any) break;
    }
    while (i < n && x[i] != value) i++;
    return i < n ? i : 0;
}

// The `count` largest, largest first, ties to the lower index: a heap whose least member is on top; most entries lose against it at once.
void best(const double* x, int64_t n, int64_t count, std::vector<std::pair<double, int32_t>>& heap) {
    count = std::min(count, n);
    auto better = [](const auto& a, const auto& b) { return a.first > b.first || (a.first == b.first && a.second < b.second); };
    heap.clear();
    if (count <= 0) return;
    if (count * 8 > n) {
        for (int64_t i = 0; i < n; i++) heap.emplace_back(x[i], (int32_t)i);
        std::nth_element(heap.begin(), heap.begin() + (count - 1), heap.end(), better);
        heap.resize(count);
        std::sort(heap.begin(), heap.end(), better);
        return;
    }
    for (int64_t i = 0; i < count; i++) heap.emplace_back(x[i], (int32_t)i);
    std::make_heap(heap.begin(), heap.end(), better);
    double least = heap.front().first;
    for (int64_t i = count; i < n;) {
        if (i + 16 <= n) {  // sixteen at a time: is there any that could enter?
            int any = 0;
            for (int j = 0; j < 16; j++) any |= x[i + j] > least;
            if (!any) { i += 16; continue; }
        }
        int64_t stop = std::min(i + 16, n);
        for (; i < stop; i++) {
            if (!(x[i] > least)) continue;  // an equal one has the higher index and loses
            std::pop_heap(heap.begin(), heap.end(), better);
            heap.back() = {x[i], (int32_t)i};
            std::push_heap(heap.begin(), heap.end(), better);
            least = heap.front().first;
        }
    }
    std::sort_heap(heap.begin(), heap.end(), better);
}

class Row {
  public:
    Row(const float* logits, int64_t vocab, const SampleRow& row, Work& w)
        : raw_(logits), vocab_(vocab), row_(row), p_(*row.params), w_(w) {}

    void run(SampleOut& out) {
        raw_peak_ = scan(out);
        if (!out.finite) return;
        edited_ = wants_edits();
        double top = raw_peak_;
        if (edited_ || p_.top_n_sigma > 0.0) {
            w_.logits.resize(vocab_);
            for (int64_t i = 0; i < vocab_; i++) w_.logits[i] = (double)raw_[i];
        }
        if (edited_) {
            before();
            top = peak_of(w_.logits.data(), vocab_);
            if (!(top > NONE)) { out.token = -1; out.logprob = NONE; return; }
        }
        if (p_.temperature == 0.0) {
            out.token = edited_ ? first_at(w_.logits.data(), top, vocab_) : first_at(raw_, (float)top, vocab_);
            p_.processed && edited_ ? report_logits(out, top) : report_raw(out);
            return;
        }
        edited_ ? temper(w_.logits.data(), top) : temper(raw_, top);
        filter();
        out.token = draw();
        p_.processed ? report_processed(out) : report_raw(out);
    }

  private:
    // The largest logit; out.finite is false if it, or any entry, is no number.
    double scan(SampleOut& out) const {
        float lanes[16], best = -std::numeric_limits<float>::infinity();
        int bad = 0;
        std::fill(lanes, lanes + 16, best);
        int64_t i = 0;
        for (; i + 16 <= vocab_; i += 16)
            for (int j = 0; j < 16; j++) {
                lanes[j] = raw_[i + j] > lanes[j] ? raw_[i + j] : lanes[j];
                bad |= raw_[i + j] != raw_[i + j];
            }
        for (float lane : lanes) best = lane > best ? lane : best;
        for (; i < vocab_; i++) {
            best = raw_[i] > best ? raw_[i] : best;
            bad |= raw_[i] != raw_[i];
        }
        out.finite = !bad && std::isfinite(best);
        return (double)best;
    }

    bool wants_edits() const {
        bool withheld = !p_.withheld.empty() && row_.position - row_.prompt_len < p_.min_tokens;
        return !p_.bias.empty() || row_.mask || p_.restricted || !p_.banned.empty() || withheld || row_.history_len;
    }

    // ------------------------------------------------------------------------------------- bias, bans, penalties
    void before() {
        double* x = w_.logits.data();
        for (auto [id, value] : p_.bias) x[id] += value;
        if (row_.mask) grammar();
        if (p_.restricted) allow();
        for (int32_t id : p_.banned) x[id] = NONE;
        if (row_.position - row_.prompt_len < p_.min_tokens)
            for (int32_t id : p_.withheld) x[id] = NONE;
        if (!row_.history_len) return;
        penalties();
        if (p_.dry_multiplier != 0.0 && row_.history_len > 1) dry();
        if (0 < p_.no_repeat_ngram && p_.no_repeat_ngram <= row_.history_len) no_repeat();
    }

    void grammar() {
        double* x = w_.logits.data();
        for (int64_t i = 0; i < vocab_; i++) {
            bool open = i / 8 < row_.mask_bytes && (row_.mask[i / 8] >> (i % 8) & 1);
            if (!open) x[i] = NONE;
        }
    }

    void allow() {
        std::vector<std::pair<int32_t, double>> kept;
        for (int32_t id : p_.allowed) kept.emplace_back(id, w_.logits[id]);
        std::fill(w_.logits.begin(), w_.logits.end(), NONE);
        for (auto [id, value] : kept) w_.logits[id] = value;
    }

    void penalties() {
        double* x = w_.logits.data();
        if (p_.repetition != 1.0) {
            w_.text.assign(row_.history, row_.history + row_.history_len);
            std::sort(w_.text.begin(), w_.text.end());
            w_.text.erase(std::unique(w_.text.begin(), w_.text.end()), w_.text.end());
            for (int32_t id : w_.text) x[id] = x[id] > 0.0 ? x[id] / p_.repetition : x[id] * p_.repetition;
        }
        if (row_.history_len <= row_.prompt_len || (p_.frequency == 0.0 && p_.presence == 0.0)) return;
        w_.text.assign(row_.history + row_.prompt_len, row_.history + row_.history_len);
        std::sort(w_.text.begin(), w_.text.end());
        for (size_t i = 0; i < w_.text.size();) {
            size_t j = i;
            while (j < w_.text.size() && w_.text[j] == w_.text[i]) j++;
            if (p_.frequency != 0.0) x[w_.text[i]] -= p_.frequency * (double)(j - i);
            if (p_.presence != 0.0) x[w_.text[i]] -= p_.presence;
            i = j;
        }
    }

    void breaker_places(const int32_t* text, int64_t n) {
        w_.flags.resize(n);
        for (int64_t i = 0; i < n; i++) w_.flags[i] = std::binary_search(p_.breaker_ids.begin(), p_.breaker_ids.end(), text[i]);
        for (const auto& run : p_.breaker_runs) {
            int64_t len = (int64_t)run.size();
            for (int64_t at = 0; at + len <= n; at++)
                if (std::equal(run.begin(), run.end(), text + at)) std::fill_n(w_.flags.begin() + at, len, 1);
        }
    }

    // As `repeat_lengths`: for each id that followed an earlier run equal to the text's end, the longest such run.
    void dry() {
        int64_t n = p_.dry_range ? std::min(row_.history_len, p_.dry_range) : row_.history_len;
        const int32_t* text = row_.history + (row_.history_len - n);
        int64_t last = n - 1;
        if (last < 1) return;
        breaker_places(text, n);
        if (w_.flags[last]) return;
        int64_t limit = p_.dry_allowed_length + DRY_GROWTH;
        int64_t bound = 0;  // how far back the end of the text runs without a breaker
        while (bound < limit && bound <= last && !w_.flags[last - bound]) bound++;
        std::unordered_map<int32_t, int64_t> longest;
        for (int64_t end = 0; end < last; end++) {
            if (text[end] != text[last] || w_.flags[end + 1]) continue;
            int64_t length = 1;
            while (length < bound && end >= length && text[end - length] == text[last - length]) length++;
            int64_t& known = longest[text[end + 1]];
            known = std::max(known, length);
        }
        for (auto [id, length] : longest) {
            if (length < p_.dry_allowed_length) continue;
            double growth = 1.0;
            for (int64_t i = p_.dry_allowed_length; i < length; i++) growth *= p_.dry_base;
            w_.logits[id] -= p_.dry_multiplier * growth;
        }
    }

    void no_repeat() {
        int64_t n = p_.no_repeat_ngram, len = row_.history_len;
        const int32_t* text = row_.history;
        for (int64_t at = 0; at + n <= len; at++)
            if (std::equal(text + at, text + at + n - 1, text + len - n + 1)) w_.logits[text[at + n - 1]] = NONE;
    }

    // --------------------------------------------------------------------------------------------------- filters
    template <class T> void temper(const T* x, double top) {
        w_.ids.resize(vocab_);
        w_.d.resize(vocab_);
        int64_t n = 0;
        int removed = 0;
        for (int64_t i = 0; i < vocab_; i++) removed |= !(x[i] > NONE);
        if (removed) {
            for (int64_t i = 0; i < vocab_; i++) {
                w_.ids[n] = (int32_t)i;
                w_.d[n] = ((double)x[i] - top) / p_.temperature;
                n += x[i] > NONE;
            }
        } else {
            n = vocab_;
            for (int64_t i = 0; i < n; i++) w_.ids[i] = (int32_t)i;
            if (p_.temperature == 1.0)  // x / 1 is x
                for (int64_t i = 0; i < n; i++) w_.d[i] = (double)x[i] - top;
            else
                for (int64_t i = 0; i < n; i++) w_.d[i] = ((double)x[i] - top) / p_.temperature;
        }
        w_.ids.resize(n);
        w_.d.resize(n);
        weighed_ = false;
    }

    int64_t size() const { return (int64_t)w_.ids.size(); }

    void weigh() {
        if (weighed_) return;
        w_.mass.resize(size());
        peak_ = peak_of(w_.d.data(), size());
        total_ = masses(w_.d.data(), peak_, size(), w_.mass.data());
        weighed_ = true;
    }

    template <class T> int64_t squeeze(std::vector<T>& values) {
        int64_t n = 0, count = (int64_t)values.size();
        const uint8_t* flags = w_.flags.data();
        T* v = values.data();
        for (int64_t i = 0; i < count; i++) {
            v[n] = v[i];
            n += flags[i];
        }
        values.resize(n);
        return n;
    }

    // Keep the ids with a flag; order (ascending ids) stays. Masses stay valid as long as the best id does.
    void keep() {
        double before = weighed_ ? peak_ : 0.0;
        int64_t n = squeeze(w_.ids), total = 0;  // without branches: which ids stay is as good as random
        squeeze(w_.d);
        if (weighed_) {
            squeeze(w_.mass);
            for (int64_t i = 0; i < n; i++) total += w_.mass[i];
            total_ = total;
            weighed_ = peak_of(w_.d.data(), n) == before;
        }
    }

    // The shortest prefix, by ascending key then index, with at least `need` mass. Only the bucket in which the mass is reached is sorted.
    // `least` is the smallest key; subtracting it is monotone, so buckets are in order even where the difference rounds.
    void keep_prefix(int64_t need, double least) {
        constexpr int BUCKETS = 1024;
        constexpr double SCALE = BUCKETS / 32.0;  // masses vanish 30 below the best
        int64_t sums[BUCKETS] = {0};
        auto bucket = [&](double key) {
            double at = (key - least) * SCALE;
            return at < BUCKETS - 1 ? (int)at : BUCKETS - 1;
        };
        int64_t n = size();
        for (int64_t i = 0; i < n; i++)
            if (w_.mass[i]) sums[bucket(w_.keys[i])] += w_.mass[i];
        int edge = 0;
        int64_t mass = 0;
        while (edge < BUCKETS - 1 && mass + sums[edge] < need) mass += sums[edge++];
        w_.flags.assign(n, 0);
        w_.order.clear();
        for (int64_t i = 0; i < n; i++) {
            int at = bucket(w_.keys[i]);
            w_.flags[i] = at < edge;
            if (at == edge) w_.order.push_back((int32_t)i);
        }
        std::stable_sort(w_.order.begin(), w_.order.end(), [&](int32_t a, int32_t b) { return w_.keys[a] < w_.keys[b]; });
        for (int32_t i : w_.order) {
            w_.flags[i] = 1;
            mass += w_.mass[i];
            if (mass >= need) break;
        }
        keep();
    }

    void filter() {
        if (0 < p_.top_k && p_.top_k < size()) top_k();
        if (p_.top_p < 1.0) top_p();
        if (p_.min_p > 0.0) min_p();
        if (p_.typical_p < 1.0) typical();
        if (p_.top_n_sigma > 0.0) n_sigma();
        if (p_.xtc_probability > 0.0) xtc();
    }

    void top_k() {
        best(w_.d.data(), size(), p_.top_k, w_.heap);
        std::sort(w_.heap.begin(), w_.heap.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
        int64_t n = 0;
        for (auto [d, at] : w_.heap) {  // indices ascend, so an entry is never overwritten before it is read
            w_.ids[n] = w_.ids[at];
            w_.d[n++] = d;
        }
        w_.ids.resize(n);
        w_.d.resize(n);
    }

    void top_p() {
        weigh();
        w_.keys.resize(size());
        for (int64_t i = 0; i < size(); i++) w_.keys[i] = -w_.d[i];
        keep_prefix(mass_needed(p_.top_p, total_), -peak_);
    }

    void min_p() {
        double share = p_.min_p > 0x1p-1022 ? p_.min_p : 0x1p-1022;
        double least = log_of(share), peak = peak_of(w_.d.data(), size());
        w_.flags.resize(size());
        for (int64_t i = 0; i < size(); i++) w_.flags[i] = w_.d[i] - peak >= least;
        keep();
    }

    void typical() {
        weigh();
        int64_t n = size(), spread = 0;
        for (int64_t i = 0; i < n; i++) {
            double c = w_.d[i] - peak_;
            spread += c > MASS_FLOOR ? whole_part((exp_live(c) * -c) * MASS_ONE) : 0;
        }
        double mean = (double)spread / (double)total_;
        w_.keys.resize(n);
        for (int64_t i = 0; i < n; i++) w_.keys[i] = std::fabs(-(w_.d[i] - peak_) - mean);
        keep_prefix(mass_needed(p_.typical_p, total_), 0.0);
    }

    // The one float sum: eight lanes, then ((0+4)+(2+6)) + ((1+5)+(3+7)).
    static double fold(const double* a) { return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])); }

    void n_sigma() {
        const double* x = w_.logits.data();
        double top = peak_of(x, vocab_), sum[8] = {0}, squares[8] = {0};
        int64_t live = 0;
        for (int64_t i = 0; i < vocab_; i += 8)
            for (int64_t j = 0, stop = std::min<int64_t>(8, vocab_ - i); j < stop; j++) {
                bool in = x[i + j] > NONE;
                sum[j] += in ? x[i + j] - top : 0.0;
                live += in;
            }
        double mean = fold(sum) / (double)live;
        for (int64_t i = 0; i < vocab_; i += 8)
            for (int64_t j = 0, stop = std::min<int64_t>(8, vocab_ - i); j < stop; j++) {
                double off = x[i + j] > NONE ? (x[i + j] - top) - mean : 0.0;
                squares[j] += off * off;
            }
        double least = -(p_.top_n_sigma * std::sqrt(fold(squares) / (double)live));
        w_.flags.resize(size());
        int any = 0;
        for (int64_t i = 0; i < size(); i++) any |= w_.flags[i] = x[w_.ids[i]] - top >= least;
        if (!any) w_.flags[first_at(w_.d.data(), peak_of(w_.d.data(), size()), size())] = 1;
        keep();
    }

    void xtc() {
        if (!(uniform(row_.key, row_.position, 0, DOMAIN_XTC) < p_.xtc_probability)) return;
        weigh();
        double least = p_.xtc_threshold * (double)total_;
        int32_t last = -1, count = 0;  // the least likely of the top choices, ties to the higher id, stays
        w_.flags.assign(size(), 1);
        for (int64_t i = 0; i < size(); i++) {
            if (!((double)w_.mass[i] >= least)) continue;
            count++;
            w_.flags[i] = 0;
            if (last < 0 || w_.d[i] <= w_.d[last]) last = (int32_t)i;
        }
        if (count < 2) return;
        w_.flags[last] = 1;
        keep();
    }

    // ------------------------------------------------------------------------------------------------------ draw
    // argmax of d + g. Since -log u >= 1 - u, g <= -log(1 - u): an id can only win if 1 - u <= e^(d - best so far). With the masses at
    // hand that is one product and spares two logs; the bound is loosened a little, so that rounding never decides.
    int64_t draw() {
        int64_t n = size();
        const int32_t* ids = w_.ids.data();
        weigh();
        uint32_t half[LANES];
        uint64_t even[LANES], odd[LANES], bits[2 * LANES];
        int64_t i = 0;
        while (i + 2 * LANES <= n) {
            bool run = !(ids[i] & 1) && ids[i + 2 * LANES - 1] - ids[i] == 2 * LANES - 1;
            int count = run ? 2 * LANES : LANES;  // consecutive ids share their counter two by two
            for (int j = 0; j < LANES; j++) half[j] = run ? ((uint32_t)ids[i] >> 1) + j : (uint32_t)ids[i + j] >> 1;
            philox_lanes(half, even, odd);
            if (run)
                for (int j = 0; j < LANES; j++) { bits[2 * j] = even[j]; bits[2 * j + 1] = odd[j]; }
            else
                for (int j = 0; j < LANES; j++) bits[j] = ids[i + j] & 1 ? odd[j] : even[j];
            offer_lanes(i, bits, count);
            i += count;
        }
        for (; i < n; i++) {
            uint32_t id = (uint32_t)ids[i];
            Words r = philox(id >> 1, (uint32_t)row_.position, (uint32_t)((uint64_t)row_.position >> 32), DOMAIN_TOKEN, row_.key);
            offer(i, id & 1 ? (r.w[2] | (uint64_t)r.w[3] << 32) : (r.w[0] | (uint64_t)r.w[1] << 32));
        }
        return ids[winner_];
    }

    static constexpr int LANES = 16;

    // The noise bits of the even and of the odd id of each of LANES counters.
    void philox_lanes(const uint32_t* half, uint64_t* even, uint64_t* odd) const {
        uint32_t c0[LANES], c1[LANES], c2[LANES], c3[LANES], k0 = (uint32_t)row_.key, k1 = (uint32_t)(row_.key >> 32);
        for (int j = 0; j < LANES; j++) {
            c0[j] = half[j];
            c1[j] = (uint32_t)row_.position;
            c2[j] = (uint32_t)((uint64_t)row_.position >> 32);
            c3[j] = DOMAIN_TOKEN;
        }
        for (int round = 0; round < 10; round++) {
            for (int j = 0; j < LANES; j++) {
                uint64_t p0 = (uint64_t)c0[j] * 0xD2511F53u, p1 = (uint64_t)c2[j] * 0xCD9E8D57u;
                c0[j] = (uint32_t)(p1 >> 32) ^ c1[j] ^ k0;
                c2[j] = (uint32_t)(p0 >> 32) ^ c3[j] ^ k1;
                c1[j] = (uint32_t)p1;
                c3[j] = (uint32_t)p0;
            }
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        for (int j = 0; j < LANES; j++) {
            even[j] = c0[j] | (uint64_t)c1[j] << 32;
            odd[j] = c2[j] | (uint64_t)c3[j] << 32;
        }
    }

    void offer_lanes(int64_t i, const uint64_t* bits, int count) {
        const int64_t* mass = w_.mass.data() + i;
        uint64_t may[2 * LANES], any = winner_ < 0;
        for (int j = 0; j < count; j++) {
            double u = (from_whole(bits[j] >> 12) + 0.5) * 0x1p-52;
            may[j] = (1.0 - u) * (MASS_ONE * 0.999) <= (from_whole((uint64_t)mass[j]) + 1.0) * cut_;
        }
        for (int j = 0; j < count; j++) any |= may[j];
        if (!any) return;
        for (int j = 0; j < count; j++)
            if (may[j]) offer(i + j, bits[j]);
    }

    void offer(int64_t i, uint64_t bits) {
        double u = (from_whole(bits >> 12) + 0.5) * 0x1p-52;
        double score = w_.d[i] + -log_of(-log_of(u));
        if (winner_ >= 0 && !(score > best_score_)) return;
        winner_ = i;
        best_score_ = score;
        double gap = peak_ - score;
        cut_ = 1.001 * (gap > 600.0 ? 1e260 : gap > 0.0 ? 1.0 / exp_live(-gap) : gap > -700.0 ? exp_live(gap) : 0.0);
    }

    // ---------------------------------------------------------------------------------------------------- report
    void report(SampleOut& out, const double* x, double peak, double norm, const int32_t* names) {
        if (p_.logprobs > 0) {
            int64_t n = names ? size() : vocab_;
            best(x, n, p_.logprobs, w_.heap);
            for (auto [value, at] : w_.heap)
                if (value > NONE) out.top.emplace_back(names ? names[at] : at, (value - peak) - norm);
        }
    }

    void report_raw(SampleOut& out) {
        bool same = weighed_ && size() == vocab_ && p_.temperature == 1.0 && !edited_;  // the masses of the draw are the raw ones
        double norm = log_mass(same ? total_ : raw_total());
        out.logprob = ((double)raw_[out.token] - raw_peak_) - norm;
        if (p_.logprobs <= 0) return;
        w_.logits.resize(vocab_);  // the processed logits are no longer needed
        for (int64_t i = 0; i < vocab_; i++) w_.logits[i] = (double)raw_[i];
        report(out, w_.logits.data(), raw_peak_, norm, nullptr);
    }

    int64_t raw_total() const {
        constexpr int64_t CHUNK = 512;  // stays in the first cache
        double x[CHUNK];
        int64_t mass[CHUNK], total = 0;
        for (int64_t i = 0; i < vocab_; i += CHUNK) {
            int64_t n = std::min(CHUNK, vocab_ - i);
            for (int64_t j = 0; j < n; j++) x[j] = (double)raw_[i + j];
            total += masses(x, raw_peak_, n, mass);
        }
        return total;
    }

    void report_logits(SampleOut& out, double top) {  // temperature 0: the distribution after bans and penalties
        double* x = w_.logits.data();
        w_.mass.resize(vocab_);
        double norm = log_mass(masses(x, top, vocab_, w_.mass.data()));
        out.logprob = (x[out.token] - top) - norm;
        report(out, x, top, norm, nullptr);
    }

    void report_processed(SampleOut& out) {
        weigh();
        double norm = log_mass(total_), peak = peak_of(w_.d.data(), size());
        auto at = std::lower_bound(w_.ids.begin(), w_.ids.end(), (int32_t)out.token) - w_.ids.begin();
        out.logprob = (w_.d[at] - peak) - norm;
        report(out, w_.d.data(), peak, norm, w_.ids.data());
    }

    const float* raw_;
    int64_t vocab_;
    const SampleRow& row_;
    const SampleParams& p_;
    Work& w_;
    double raw_peak_ = 0, peak_ = 0, best_score_ = 0, cut_ = 1e300;  // cut_: e^(peak - best score), loosened
    int64_t total_ = 0, winner_ = -1;
    bool weighed_ = false, edited_ = false;
};

}  // namespace

void sample_row(const float* logits, int64_t vocab, const SampleRow& row, SampleOut& out) {
    static thread_local Work work;
    Row(logits, vocab, row, work).run(out);
}

}  // namespace VB_NS
