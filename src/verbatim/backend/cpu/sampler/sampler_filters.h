// Temperature, top-k, top-p, min-p, typical-p, top-n-sigma and XTC: the ids that remain to be
// sampled from. Names and order as in sampling/filters.py.
//
// Until a filter acts, all ids of the Logits that are not removed remain ("the row"), and d =
// (logit - best) / temperature is computed where needed. The first filter that acts makes a list of
// ids (ascending) and their d; later filters shorten it.
#pragma once
#include <cmath>

#include "sampler.h"
#include "sampler_logits.h"

namespace VB_NS {
namespace {

using vb::SampleParams;
using vb::SampleRow;

constexpr int TILE = 512;  // ids per tile: its arrays fit the L1 cache

// Vectors per call of exp_vectors: their polynomials are evaluated side by side, because one alone
// waits for the latency of each multiplication. Limited by the number of vector registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int EXP_VECTORS = 8;
#else
constexpr int EXP_VECTORS = 4;
#endif
constexpr int EXP_GROUP = EXP_VECTORS * WIDE;  // numbers per call

// exp_live(above_floor(x)) of EXP_GROUP numbers: for each number the same operations in the same
// order.
inline void exp_vectors(const double* x, double* e) {
    typedef double Doubles __attribute__((vector_size(VECTOR)));
    typedef uint64_t Bits __attribute__((vector_size(VECTOR)));
    constexpr double TERMS[] = {1.0 / 479001600.0,
                                1.0 / 39916800.0,
                                1.0 / 3628800.0,
                                1.0 / 362880.0,
                                1.0 / 40320.0,
                                1.0 / 5040.0,
                                1.0 / 720.0,
                                1.0 / 120.0,
                                1.0 / 24.0,
                                1.0 / 6.0,
                                1.0 / 2.0,
                                1.0,
                                1.0};
    Doubles p[EXP_VECTORS], r[EXP_VECTORS], t[EXP_VECTORS];
    for (int v = 0; v < EXP_VECTORS; v++) {
        Doubles some, least = Doubles{} + MASS_FLOOR;
        std::memcpy(&some, x + v * WIDE, VECTOR);
        some = some > least ? some : least;
        t[v] = some * LOG2E + ROUND;
        Doubles k = t[v] - ROUND;
        r[v] = (some - k * LN2_HI) - k * LN2_LO;
        p[v] = Doubles{} + 1.0 / 6227020800.0;
    }
    for (double term : TERMS)
        for (int v = 0; v < EXP_VECTORS; v++) p[v] = p[v] * r[v] + term;
    for (int v = 0; v < EXP_VECTORS; v++) {
        Bits bits = (Bits)p[v] + ((Bits)t[v] << 52);
        std::memcpy(e + v * WIDE, &bits, VECTOR);
    }
}

struct Tile {
    double d[TILE], e[TILE];  // e = e^d, at least e^-30
    int64_t mass[TILE];

    void compute_masses(int64_t n) {
        int64_t i = 0;
        for (; i + EXP_GROUP <= n; i += EXP_GROUP) exp_vectors(d + i, e + i);
        for (; i < n; i++) e[i] = exp_live(above_floor(d[i]));
        for (int64_t j = 0; j < n; j++) mass[j] = floor_int(e[j] * MASS_ONE);
    }
    int64_t spread(int64_t n) const {
        int64_t part[TILE];
        for (int64_t j = 0; j < n; j++)
            part[j] = d[j] > MASS_FLOOR ? floor_int((e[j] * -d[j]) * MASS_ONE) : 0;
        return sum_of(part, n);
    }
};

inline void set_relative(const float* x, int64_t n, double top, double temperature, double* d) {
    if (temperature == 1.0)  // x / 1 is x, exactly
        for (int64_t j = 0; j < n; j++) d[j] = (double)x[j] - top;
    else
        for (int64_t j = 0; j < n; j++) d[j] = ((double)x[j] - top) / temperature;
}

// The total mass of a row of float32 logits.
inline int64_t total_mass(const float* x, int64_t n, double top) {
    Tile tile;
    int64_t total = 0;
    for (int64_t from = 0; from < n; from += TILE) {
        int64_t count = std::min<int64_t>(TILE, n - from);
        set_relative(x + from, count, top, 1.0, tile.d);
        tile.compute_masses(count);
        total += sum_of(tile.mass, count);
    }
    return total;
}

// Moves the shortest prefix, by ascending key then id, with at least `need` mass to the front and
// returns its length; all candidates if their mass is less.
inline int64_t prefix_to_front(std::vector<Candidate>& all, int64_t need) {
    auto before = [](const Candidate& a, const Candidate& b) {
        return a.key < b.key || (a.key == b.key && a.id < b.id);
    };
    int64_t low = 0, high = (int64_t)all.size();  // the length is in (low, high]
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2, mass = 0;
        std::nth_element(all.begin() + low, all.begin() + middle, all.begin() + high, before);
        for (int64_t i = low; i < middle; i++) mass += all[i].mass;
        if (mass >= need) {
            high = middle;
        } else {
            need -= mass;
            low = middle;
        }
    }
    return high;
}

// Ids in buckets of equal width by |-d - centre|, the order of top-p (centre 0: most probable
// first) and of typical-p (centre: entropy). Only the bucket in which the required mass is reached
// has to be sorted.
constexpr int BUCKETS = 1024;

struct Buckets {
    double centre, scale;
    int64_t sums[BUCKETS] = {0};

    Buckets(double centre, double span)
        : centre(centre), scale(BUCKETS / (span > 1e-6 ? span : 1e-6)) {}

    double key(double d) const { return std::fabs(-d - centre); }
    uint16_t of(double d) const {
        double at = key(d) * scale;
        return (uint16_t)(int32_t)(at < BUCKETS - 1 ? at : BUCKETS - 1);
    }
    void add_one(double d, int64_t mass) { sums[of(d)] += mass; }
    void add(const double* d, const int64_t* mass, int64_t n, uint16_t* bucket) {
        for (int64_t j = 0; j < n; j++) bucket[j] = of(d[j]);
        for (int64_t j = 0; j < n; j++) sums[bucket[j]] += mass[j];
    }
    // The bucket in which `need` is reached; need becomes the mass still missing there.
    int edge(int64_t& need) const {
        int at = 0;
        while (at < BUCKETS - 1 && sums[at] < need) need -= sums[at++];
        return at;
    }
};

class Filters {
  public:
    Filters(Logits& x, const SampleRow& row, Scratch& w)
        : x_(x), row_(row), p_(*row.params), w_(w), top_(x.top()), t_(row.params->temperature) {}

    void run() {
        if (0 < p_.top_k && p_.top_k < x_.vocab()) top_k();
        if (p_.top_p < 1.0) listed_ ? top_p_of_list() : top_p_of_row();
        if (p_.min_p > 0.0) min_p();
        if (p_.typical_p < 1.0) listed_ ? typical_of_list() : typical_of_row();
        if (p_.top_n_sigma > 0.0) n_sigma();
        if (p_.xtc_probability > 0.0 &&
            uniform_of(noise_bits(row_.key, row_.counter(), 0, DOMAIN_XTC)) < p_.xtc_probability)
            listed_ ? xtc_of_list() : xtc_of_row();
    }

    bool listed() const { return listed_; }
    const int32_t* ids() const { return w_.ids.get(); }
    const double* d() const { return w_.d.get(); }
    int64_t size() const { return n_; }
    double d_of(double logit) const { return (logit - top_) / t_; }

    // Turns all that remains into a list.
    void list() {
        if (!listed_) list_if([](double) { return true; });
    }

    // Lists all remaining ids with their logits instead of d, for the report at temperature 0.
    void list_logits() {
        list_where(-FLT_MAX, [](double) { return true; });
    }

    // Masses of the list relative to its best, and their total. They stay in the scratch memory
    // until the next call.
    int64_t compute_masses() {
        const double* d = w_.d.get();
        int64_t* mass = w_.mass.reserve(x_.vocab());
        const double peak = peak_ = largest(d, n_);
        for (int64_t i = 0; i < n_; i++) mass[i] = mass_of(d[i] - peak);
        return sum_of(mass, n_);
    }
    double peak() const { return peak_; }

  private:
    // --------------------------------------------------------------------------------- row to list
    // Lists the ids whose d satisfies a monotone rule (true for d means true for all larger d).
    template <class Rule> void list_if(Rule rule) {
        list_where(smallest_float_where([&](double logit) { return rule(d_of(logit)); }),
                   [&](double logit) { return rule(d_of(logit)); });
        apply_temperature();
    }

    // Lists the ids whose float logit is at least `least`, and the edited ids that satisfy the
    // rule.
    template <class Rule> void list_where(float least, Rule rule) {
        n_ = x_.at_least(least, w_.ids.reserve(x_.vocab()));
        w_.extra_ids.clear();
        x_.each_edited([&](int32_t id, double logit) {
            if (rule(logit)) w_.extra_ids.push_back(id);
        });
        finish_list();
    }

    // Merges extra_ids (ascending, like the list) into the list, and looks up the logit of every
    // id.
    void finish_list() {
        int32_t* ids = w_.ids.get();
        int64_t a = n_ - 1, b = (int64_t)w_.extra_ids.size() - 1;
        n_ += b + 1;
        for (int64_t to = n_ - 1; b >= 0; to--)
            ids[to] = a >= 0 && ids[a] > w_.extra_ids[b] ? ids[a--] : w_.extra_ids[b--];
        double* d = w_.d.reserve(x_.vocab());
        for (int64_t i = 0; i < n_; i++) d[i] = x_.value(ids[i]);
        listed_ = true;
    }

    void apply_temperature() {
        double* d = w_.d.get();
        for (int64_t i = 0; i < n_; i++) d[i] = d_of(d[i]);
    }

    template <class Rule> void keep(Rule rule) {  // rule(index)
        int32_t* ids = w_.ids.get();
        double* d = w_.d.get();
        int64_t n = 0;
        for (int64_t i = 0; i < n_; i++) {
            bool stays = rule(i);
            ids[n] = ids[i];
            d[n] = d[i];
            n += stays;
        }
        n_ = n;
    }

    // -------------------------------------------------------------------------------- top-k, min-p
    void top_k() {
        if (p_.top_k > x_.chunks()) return top_k_by_buckets();
        double sure = x_.value_reached_by(p_.top_k);
        double least =
            sure > NEG_INF ? d_of(sure) : NEG_INF;  // compare d: it may tie where logits differ
        list_if([&](double d) { return d >= least; });
        if (n_ <= p_.top_k) return;
        const double* d = w_.d.get();
        int32_t* order = w_.order.reserve(x_.vocab());
        for (int64_t i = 0; i < n_; i++) order[i] = (int32_t)i;
        std::nth_element(order, order + (p_.top_k - 1), order + n_, [d](int32_t a, int32_t b) {
            return d[a] > d[b] || (d[a] == d[b] && a < b);
        });
        int64_t last = order[p_.top_k - 1];
        double edge = d[last];
        keep([&](int64_t i) { return d[i] > edge || (d[i] == edge && i <= last); });
    }

    // Top-k with a large k: the prefix of total weight k, each id with weight one.
    void top_k_by_buckets() {
        Buckets buckets(0.0, -d_of(x_.lowest_live()));
        uint16_t* bucket = w_.bucket.reserve(x_.vocab());
        each_tile([&](int64_t from, int64_t n, Tile& tile) {
            for (int64_t j = 0; j < n; j++) tile.mass[j] = x_.row()[from + j] > NEG_INF_F;
            buckets.add(tile.d, tile.mass, n, bucket + from);
        });
        x_.each_edited([&](int32_t, double logit) { buckets.add_one(d_of(logit), 1); });
        list_prefix(buckets, p_.top_k, [](double) { return (int64_t)1; });
    }

    void min_p() {
        double least = log_of(p_.min_p > 0x1p-1022 ? p_.min_p : 0x1p-1022);
        if (!listed_)
            return list_if([&](double d) { return d >= least; });  // the best id has d = 0
        const double* d = w_.d.get();
        double peak = largest(d, n_);
        keep([&](int64_t i) { return d[i] - peak >= least; });
    }

    // ---------------------------------------------------------------------------- top-p, typical-p
    template <class Visit> void each_tile(Visit visit) {  // each(from, n, tile)
        Tile tile;
        for (int64_t from = 0; from < x_.vocab(); from += TILE) {
            int64_t n = std::min<int64_t>(TILE, x_.vocab() - from);
            set_relative(x_.row() + from, n, top_, t_, tile.d);
            visit(from, n, tile);
        }
    }

    double span() const {
        return std::min(32.0, -d_of(x_.lowest_live()));
    }  // masses are 0 from 30 below the best

    // Lists the shortest prefix of the row, in bucket order, whose weights reach `need`; weight(d)
    // is the weight of an id.
    template <class Weight> void list_prefix(const Buckets& buckets, int64_t need, Weight weight) {
        int edge = buckets.edge(need);
        const uint16_t* bucket = w_.bucket.get();
        const float* x = x_.row();
        int32_t *ids = w_.ids.reserve(x_.vocab()), *order = w_.order.reserve(x_.vocab());
        int64_t n = 0, m = 0;
        for (int64_t c = 0; c < x_.chunks(); c++) {
            double best = d_of((double)x_.chunk_max(c));
            if (best < -buckets.centre && buckets.of(best) > edge)
                continue;  // so are all smaller d
            for (int64_t i = c * CHUNK, stop = std::min(i + CHUNK, x_.vocab()); i < stop; i++) {
                ids[n] = order[m] = (int32_t)i;
                n += bucket[i] < edge;
                m += bucket[i] == edge;
            }
        }
        n_ = n;
        w_.candidates.clear();
        w_.extra_ids.clear();
        auto consider = [&](int32_t id, double d) {
            w_.candidates.push_back({buckets.key(d), weight(d), id});
        };
        for (int64_t j = 0; j < m; j++)
            if (x[order[j]] > NEG_INF_F) consider(order[j], d_of((double)x[order[j]]));
        x_.each_edited([&](int32_t id, double logit) {
            int at = buckets.of(d_of(logit));
            if (at < edge) w_.extra_ids.push_back(id);
            if (at == edge) consider(id, d_of(logit));
        });
        int64_t taken = prefix_to_front(w_.candidates, need);
        for (int64_t j = 0; j < taken; j++) w_.extra_ids.push_back(w_.candidates[j].id);
        std::sort(w_.extra_ids.begin(), w_.extra_ids.end());
        finish_list();
        apply_temperature();
    }

    // The same for a list with masses, where d counts relative to its best.
    void keep_prefix(double centre, int64_t need) {
        const double* d = w_.d.get();
        const int64_t* mass = w_.mass.get();
        uint16_t* bucket = w_.bucket.reserve(x_.vocab());
        Buckets buckets(centre, 32.0);
        double c[TILE];
        for (int64_t from = 0; from < n_; from += TILE) {
            int64_t n = std::min<int64_t>(TILE, n_ - from);
            for (int64_t j = 0; j < n; j++) c[j] = d[from + j] - peak_;
            buckets.add(c, mass + from, n, bucket + from);
        }
        int edge = buckets.edge(need);
        w_.candidates.clear();
        for (int64_t i = 0; i < n_; i++)
            if (bucket[i] == edge)
                w_.candidates.push_back({buckets.key(d[i] - peak_), mass[i], (int32_t)i});
        for (int64_t i = 0; i < n_; i++)
            bucket[i] = bucket[i] < edge;  // from here: whether the id stays
        int64_t taken = prefix_to_front(w_.candidates, need);
        for (int64_t j = 0; j < taken; j++) bucket[w_.candidates[j].id] = 1;
        keep([&](int64_t i) { return bucket[i] != 0; });
    }

    void top_p_of_row() {
        Buckets buckets(0.0, span());
        uint16_t* bucket = w_.bucket.reserve(x_.vocab());
        each_tile([&](int64_t from, int64_t n, Tile& tile) {
            tile.compute_masses(n);
            buckets.add(tile.d, tile.mass, n, bucket + from);
        });
        x_.each_edited(
            [&](int32_t, double logit) { buckets.add_one(d_of(logit), mass_of(d_of(logit))); });
        list_prefix(buckets, mass_needed(p_.top_p, sum_of(buckets.sums, BUCKETS)), mass_of);
    }

    void top_p_of_list() { keep_prefix(0.0, mass_needed(p_.top_p, compute_masses())); }

    void typical_of_row() {
        int64_t total = 0, spread = 0;
        int64_t* mass = w_.mass.reserve(x_.vocab());
        each_tile([&](int64_t from, int64_t n, Tile& tile) {
            tile.compute_masses(n);
            spread += tile.spread(n);
            total += sum_of(tile.mass, n);
            std::memcpy(mass + from, tile.mass, (size_t)n * sizeof(int64_t));
        });
        x_.each_edited([&](int32_t, double logit) {
            total += mass_of(d_of(logit));
            spread += spread_of(d_of(logit));
        });
        // -log p - H = -d - (mean of -d): the normaliser cancels.
        Buckets buckets((double)spread / (double)total, span());
        uint16_t* bucket = w_.bucket.reserve(x_.vocab());
        each_tile([&](int64_t from, int64_t n, Tile& tile) {
            buckets.add(tile.d, mass + from, n, bucket + from);
        });
        x_.each_edited(
            [&](int32_t, double logit) { buckets.add_one(d_of(logit), mass_of(d_of(logit))); });
        list_prefix(buckets, mass_needed(p_.typical_p, total), mass_of);
    }

    void typical_of_list() {
        int64_t total = compute_masses(), spread = 0;
        for (int64_t i = 0; i < n_; i++) spread += spread_of(w_.d.get()[i] - peak_);
        keep_prefix((double)spread / (double)total, mass_needed(p_.typical_p, total));
    }

    // --------------------------------------------------------------------------------- top-n-sigma
    // The only float sum: eight lanes, then ((0+4)+(2+6)) + ((1+5)+(3+7)).
    static double fold(const double* a) {
        return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
    }

    // Sums f(logit - best) over all ids in eight lanes; removed ids count as 0.
    template <class F> double lane_sum(F f) {
        double lanes[8] = {0}, z[TILE];
        size_t next = 0;
        for (int64_t from = 0; from < x_.vocab(); from += TILE) {
            int64_t n = std::min<int64_t>(TILE, x_.vocab() - from);
            set_relative(x_.row() + from, n, top_, 1.0, z);
            if (!x_.unedited())
                for (; next < w_.edited.size() && w_.edited[next] < from + n; next++)
                    z[w_.edited[next] - from] = x_.value(w_.edited[next]) - top_;
            for (int64_t j = n; j < TILE; j++) z[j] = NEG_INF;
            for (int64_t j = 0; j < TILE; j++) z[j] = z[j] > NEG_INF ? f(z[j]) : 0.0;
            for (int64_t j = 0; j < TILE; j += 8)
                for (int64_t lane = 0; lane < 8; lane++) lanes[lane] += z[j + lane];
        }
        return fold(lanes);
    }

    void n_sigma() {
        double live = lane_sum([](double) { return 1.0; });  // a count: exact
        double mean = lane_sum([](double z) { return z; }) / live;
        double squares = lane_sum([mean](double z) { return (z - mean) * (z - mean); });
        double least = -(p_.top_n_sigma * std::sqrt(squares / live));
        if (!listed_) {
            auto near = [&](double logit) { return logit - top_ >= least; };
            list_where(smallest_float_where(near), near);
            return apply_temperature();
        }
        const int32_t* ids = w_.ids.get();
        const double* d = w_.d.get();
        int64_t best = 0, any = 0;
        for (int64_t i = 0; i < n_; i++) {
            any += x_.value(ids[i]) - top_ >= least;
            best = d[i] > d[best] ? i : best;
        }
        keep([&](int64_t i) { return any ? x_.value(ids[i]) - top_ >= least : i == best; });
    }

    // ----------------------------------------------------------------------------------------- XTC
    // Of the ids whose mass is at least `least`, all but the last by (d descending, id ascending)
    // are removed: calls remove(index) for each.
    template <class Remove>
    void exclude(double least, int64_t n, const double* d, const int64_t* mass, Remove remove) {
        int64_t last = -1, count = 0;
        for (int64_t i = 0; i < n; i++) {
            if (!((double)mass[i] >= least)) continue;
            count++;
            if (last < 0 || d[i] <= d[last]) last = i;
        }
        if (count < 2) return;
        for (int64_t i = 0; i < n; i++)
            if (i != last && (double)mass[i] >= least) remove(i);
    }

    void xtc_of_list() {
        double least = p_.xtc_threshold * (double)compute_masses();
        uint16_t* stays = w_.bucket.reserve(x_.vocab());
        std::fill(stays, stays + n_, 1);
        exclude(least, n_, w_.d.get(), w_.mass.get(), [&](int64_t i) { stays[i] = 0; });
        keep([&](int64_t i) { return stays[i]; });
    }

    // The row stays a row; only the ids near or above the threshold are listed temporarily.
    void xtc_of_row() {
        int64_t total = 0;
        each_tile([&](int64_t, int64_t n, Tile& tile) {
            tile.compute_masses(n);
            total += sum_of(tile.mass, n);
        });
        x_.each_edited([&](int32_t, double logit) { total += mass_of(d_of(logit)); });
        double least = p_.xtc_threshold * (double)total;
        // Slightly lower, so that rounding excludes no id.
        double near = least >= 1.0 ? log_of(least / MASS_ONE) - 0x1p-20 : NEG_INF;
        list_if([&](double d) { return d >= near; });
        listed_ = false;
        compute_masses();  // the best id is in the list, so these are the masses of the row
        exclude(least, n_, w_.d.get(), w_.mass.get(),
                [&](int64_t i) { x_.remove(w_.ids.get()[i]); });
    }

    Logits& x_;
    const SampleRow& row_;
    const SampleParams& p_;
    Scratch& w_;
    double top_, t_, peak_ = 0;
    int64_t n_ = 0;
    bool listed_ = false;
};

}  // namespace
}  // namespace VB_NS
