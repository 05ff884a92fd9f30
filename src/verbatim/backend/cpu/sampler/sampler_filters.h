// Temperature, top-k, top-p, min-p, typical-p, top-n-sigma, XTC: which ids may be drawn. Names and order as in sampling/processors.py.
//
// As long as no filter has acted, all live ids of the Logits are left ("the row"), and d = (logit - best) / temperature is computed where it is needed.
// The first filter that acts makes a list of ids (ascending) and their d; the later ones shorten it.
#pragma once
#include <cmath>

#include "sampler.h"
#include "sampler_logits.h"

namespace VB_NS {
namespace {

using vb::SampleParams;
using vb::SampleRow;

constexpr int TILE = 512;  // ids at a time: what is computed for them stays in the first cache

struct Tile {
    double d[TILE], e[TILE];  // e^d, at least e^-30
    int64_t mass[TILE];

    void weigh(int64_t n) {
        for (int64_t j = 0; j < n; j++) e[j] = exp_live(above_floor(d[j]));
        for (int64_t j = 0; j < n; j++) mass[j] = whole_part(e[j] * MASS_ONE);
    }
    int64_t spread(int64_t n) const {
        int64_t part[TILE];
        for (int64_t j = 0; j < n; j++) part[j] = d[j] > MASS_FLOOR ? whole_part((e[j] * -d[j]) * MASS_ONE) : 0;
        return sum_of(part, n);
    }
};

inline void set_relative(const float* x, int64_t n, double top, double temperature, double* d) {
    if (temperature == 1.0)  // x / 1 is x
        for (int64_t j = 0; j < n; j++) d[j] = (double)x[j] - top;
    else
        for (int64_t j = 0; j < n; j++) d[j] = ((double)x[j] - top) / temperature;
}

// The mass of a whole row of float32 logits.
inline int64_t total_mass(const float* x, int64_t n, double top) {
    Tile tile;
    int64_t total = 0;
    for (int64_t from = 0; from < n; from += TILE) {
        int64_t count = std::min<int64_t>(TILE, n - from);
        set_relative(x + from, count, top, 1.0, tile.d);
        tile.weigh(count);
        total += sum_of(tile.mass, count);
    }
    return total;
}

// The shortest prefix, by ascending key then id, with at least `need` mass is moved to the front; its length. All of it, if it never gets there.
inline int64_t prefix_to_front(std::vector<Candidate>& all, int64_t need) {
    auto before = [](const Candidate& a, const Candidate& b) { return a.key < b.key || (a.key == b.key && a.id < b.id); };
    int64_t low = 0, high = (int64_t)all.size();  // the prefix ends behind low, at high the latest
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

// Ids sorted into buckets of equal width by their distance from the centre, |-d - centre|: what comes first under top-p (centre 0: the most likely) and
// under typical-p. Only the bucket in which the mass is reached needs an order within.
constexpr int BUCKETS = 1024;

struct Buckets {
    double centre, scale;
    int64_t sums[BUCKETS] = {0};

    Buckets(double centre, double span) : centre(centre), scale(BUCKETS / (span > 1e-6 ? span : 1e-6)) {}

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
    // The bucket in which `need` is reached; need becomes what is still missing there.
    int edge(int64_t& need) const {
        int at = 0;
        while (at < BUCKETS - 1 && sums[at] < need) need -= sums[at++];
        return at;
    }
};

class Filters {
  public:
    Filters(Logits& x, const SampleRow& row, Work& w) : x_(x), row_(row), p_(*row.params), w_(w), top_(x.top()), t_(row.params->temperature) {}

    void run() {
        if (0 < p_.top_k && p_.top_k < x_.vocab()) top_k();
        if (p_.top_p < 1.0) listed_ ? top_p_of_list() : top_p_of_row();
        if (p_.min_p > 0.0) min_p();
        if (p_.typical_p < 1.0) listed_ ? typical_of_list() : typical_of_row();
        if (p_.top_n_sigma > 0.0) n_sigma();
        if (p_.xtc_probability > 0.0 && uniform_of(noise_bits(row_.key, row_.position, 0, DOMAIN_XTC)) < p_.xtc_probability)
            listed_ ? xtc_of_list() : xtc_of_row();
    }

    bool listed() const { return listed_; }
    const int32_t* ids() const { return w_.ids.get(); }
    const double* d() const { return w_.d.get(); }
    int64_t size() const { return n_; }
    double d_of(double logit) const { return (logit - top_) / t_; }

    // Everything that is left, as a list.
    void list() {
        if (!listed_) take([](double) { return true; });
    }

    // All live ids with their logits in the place of d: for what is reported at temperature 0.
    void list_logits() {
        list_where(-FLT_MAX, [](double) { return true; });
    }

    // Masses of the list, relative to its best; the total. They stand in the scratch until the next call.
    int64_t weigh() {
        const double* d = w_.d.get();
        int64_t* mass = w_.mass.room(x_.vocab());
        const double peak = peak_ = largest(d, n_);
        for (int64_t i = 0; i < n_; i++) mass[i] = mass_of(d[i] - peak);
        return sum_of(mass, n_);
    }
    double peak() const { return peak_; }

  private:
    // ----------------------------------------------------------------------------------------------- row to list
    // A rule on d that holds for all larger ones too, if it holds for one.
    template <class Rule> void take(Rule rule) {
        list_where(least_float([&](double logit) { return rule(d_of(logit)); }), [&](double logit) { return rule(d_of(logit)); });
        temper();
    }

    // The ids whose float is at least `least`, and the edited ones that the rule takes.
    template <class Rule> void list_where(float least, Rule rule) {
        n_ = x_.at_least(least, w_.ids.room(x_.vocab()));
        w_.loose.clear();
        x_.each_edited([&](int32_t id, double logit) {
            if (rule(logit)) w_.loose.push_back(id);
        });
        finish_list();
    }

    // Puts the loose ids (ascending, like the list) into the list, and every id's logit beside it.
    void finish_list() {
        int32_t* ids = w_.ids.get();
        int64_t a = n_ - 1, b = (int64_t)w_.loose.size() - 1;
        n_ += b + 1;
        for (int64_t to = n_ - 1; b >= 0; to--) ids[to] = a >= 0 && ids[a] > w_.loose[b] ? ids[a--] : w_.loose[b--];
        double* d = w_.d.room(x_.vocab());
        for (int64_t i = 0; i < n_; i++) d[i] = x_.value(ids[i]);
        listed_ = true;
    }

    void temper() {
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

    // --------------------------------------------------------------------------------------------- top-k, min-p
    void top_k() {
        if (p_.top_k > x_.chunks()) return most_of_row();
        double sure = x_.reached_by(p_.top_k);
        double least = sure > NONE ? d_of(sure) : NONE;  // of d: it may tie where logits do not
        take([&](double d) { return d >= least; });
        if (n_ <= p_.top_k) return;
        const double* d = w_.d.get();
        int32_t* order = w_.order.room(x_.vocab());
        for (int64_t i = 0; i < n_; i++) order[i] = (int32_t)i;
        std::nth_element(order, order + (p_.top_k - 1), order + n_, [d](int32_t a, int32_t b) { return d[a] > d[b] || (d[a] == d[b] && a < b); });
        int64_t last = order[p_.top_k - 1];
        double edge = d[last];
        keep([&](int64_t i) { return d[i] > edge || (d[i] == edge && i <= last); });
    }

    // Top-k with a large k: the prefix by which k ids are reached, each of weight one.
    void most_of_row() {
        Buckets buckets(0.0, -d_of(x_.bottom()));
        uint16_t* bucket = w_.bucket.room(x_.vocab());
        each_tile([&](int64_t from, int64_t n, Tile& tile) {
            for (int64_t j = 0; j < n; j++) tile.mass[j] = x_.row()[from + j] > NONE_F;
            buckets.add(tile.d, tile.mass, n, bucket + from);
        });
        x_.each_edited([&](int32_t, double logit) { buckets.add_one(d_of(logit), 1); });
        take_prefix(buckets, p_.top_k, [](double) { return (int64_t)1; });
    }

    void min_p() {
        double least = log_of(p_.min_p > 0x1p-1022 ? p_.min_p : 0x1p-1022);
        if (!listed_) return take([&](double d) { return d >= least; });  // the best has d = 0
        const double* d = w_.d.get();
        double peak = largest(d, n_);
        keep([&](int64_t i) { return d[i] - peak >= least; });
    }

    // -------------------------------------------------------------------------- top-p, typical-p: by mass, in order
    template <class Each> void each_tile(Each each) {  // each(from, n, tile)
        Tile tile;
        for (int64_t from = 0; from < x_.vocab(); from += TILE) {
            int64_t n = std::min<int64_t>(TILE, x_.vocab() - from);
            set_relative(x_.row() + from, n, top_, t_, tile.d);
            each(from, n, tile);
        }
    }

    double span() const { return std::min(32.0, -d_of(x_.bottom())); }  // masses vanish 30 below the best

    // The row becomes the list of the shortest prefix, in the buckets' order, with at least `need` weight; weight(d) is what each id brings.
    template <class Weight> void take_prefix(const Buckets& buckets, int64_t need, Weight weight) {
        int edge = buckets.edge(need);
        const uint16_t* bucket = w_.bucket.get();
        const float* x = x_.row();
        int32_t *ids = w_.ids.room(x_.vocab()), *order = w_.order.room(x_.vocab());
        int64_t n = 0, m = 0;
        for (int64_t c = 0; c < x_.chunks(); c++) {
            double best = d_of((double)x_.chunk_top(c));
            if (best < -buckets.centre && buckets.of(best) > edge) continue;  // and so are all below it
            for (int64_t i = c * CHUNK, stop = std::min(i + CHUNK, x_.vocab()); i < stop; i++) {
                ids[n] = order[m] = (int32_t)i;
                n += bucket[i] < edge;
                m += bucket[i] == edge;
            }
        }
        n_ = n;
        w_.candidates.clear();
        w_.loose.clear();
        auto consider = [&](int32_t id, double d) { w_.candidates.push_back({buckets.key(d), weight(d), id}); };
        for (int64_t j = 0; j < m; j++)
            if (x[order[j]] > NONE_F) consider(order[j], d_of((double)x[order[j]]));
        x_.each_edited([&](int32_t id, double logit) {
            int at = buckets.of(d_of(logit));
            if (at < edge) w_.loose.push_back(id);
            if (at == edge) consider(id, d_of(logit));
        });
        int64_t taken = prefix_to_front(w_.candidates, need);
        for (int64_t j = 0; j < taken; j++) w_.loose.push_back(w_.candidates[j].id);
        std::sort(w_.loose.begin(), w_.loose.end());
        finish_list();
        temper();
    }

    // The same for a list that has been weighed: d counts relative to its best.
    void keep_prefix(double centre, int64_t need) {
        const double* d = w_.d.get();
        const int64_t* mass = w_.mass.get();
        uint16_t* bucket = w_.bucket.room(x_.vocab());
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
            if (bucket[i] == edge) w_.candidates.push_back({buckets.key(d[i] - peak_), mass[i], (int32_t)i});
        for (int64_t i = 0; i < n_; i++) bucket[i] = bucket[i] < edge;  // from here: does it stay?
        int64_t taken = prefix_to_front(w_.candidates, need);
        for (int64_t j = 0; j < taken; j++) bucket[w_.candidates[j].id] = 1;
        keep([&](int64_t i) { return bucket[i] != 0; });
    }

    void top_p_of_row() {
        Buckets buckets(0.0, span());
        uint16_t* bucket = w_.bucket.room(x_.vocab());
        each_tile([&](int64_t from, int64_t n, Tile& tile) {
            tile.weigh(n);
            buckets.add(tile.d, tile.mass, n, bucket + from);
        });
        x_.each_edited([&](int32_t, double logit) { buckets.add_one(d_of(logit), mass_of(d_of(logit))); });
        take_prefix(buckets, mass_needed(p_.top_p, sum_of(buckets.sums, BUCKETS)), mass_of);
    }

    void top_p_of_list() { keep_prefix(0.0, mass_needed(p_.top_p, weigh())); }

    void typical_of_row() {
        int64_t total = 0, spread = 0;
        int64_t* mass = w_.mass.room(x_.vocab());
        each_tile([&](int64_t from, int64_t n, Tile& tile) {
            tile.weigh(n);
            spread += tile.spread(n);
            total += sum_of(tile.mass, n);
            std::memcpy(mass + from, tile.mass, (size_t)n * sizeof(int64_t));
        });
        x_.each_edited([&](int32_t, double logit) {
            total += mass_of(d_of(logit));
            spread += spread_of(d_of(logit));
        });
        Buckets buckets((double)spread / (double)total, span());  // -log p - H = -d - mean of -d: the normaliser cancels
        uint16_t* bucket = w_.bucket.room(x_.vocab());
        each_tile([&](int64_t from, int64_t n, Tile& tile) { buckets.add(tile.d, mass + from, n, bucket + from); });
        x_.each_edited([&](int32_t, double logit) { buckets.add_one(d_of(logit), mass_of(d_of(logit))); });
        take_prefix(buckets, mass_needed(p_.typical_p, total), mass_of);
    }

    void typical_of_list() {
        int64_t total = weigh(), spread = 0;
        for (int64_t i = 0; i < n_; i++) spread += spread_of(w_.d.get()[i] - peak_);
        keep_prefix((double)spread / (double)total, mass_needed(p_.typical_p, total));
    }

    // ------------------------------------------------------------------------------------------------ top-n-sigma
    // The one float sum: eight lanes, then ((0+4)+(2+6)) + ((1+5)+(3+7)).
    static double fold(const double* a) { return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])); }

    // Adds f(logit - best) of every id to its lane; 0 for removed ids.
    template <class F> double lane_sum(F f) {
        double lanes[8] = {0}, z[TILE];
        size_t next = 0;
        for (int64_t from = 0; from < x_.vocab(); from += TILE) {
            int64_t n = std::min<int64_t>(TILE, x_.vocab() - from);
            set_relative(x_.row() + from, n, top_, 1.0, z);
            if (!x_.whole())
                for (; next < w_.edited.size() && w_.edited[next] < from + n; next++)
                    z[w_.edited[next] - from] = x_.value(w_.edited[next]) - top_;
            for (int64_t j = n; j < TILE; j++) z[j] = NONE;
            for (int64_t j = 0; j < TILE; j++) z[j] = z[j] > NONE ? f(z[j]) : 0.0;
            for (int64_t j = 0; j < TILE; j += 8)
                for (int64_t lane = 0; lane < 8; lane++) lanes[lane] += z[j + lane];
        }
        return fold(lanes);
    }

    void n_sigma() {
        double live = lane_sum([](double) { return 1.0; });  // whole numbers: exact
        double mean = lane_sum([](double z) { return z; }) / live;
        double squares = lane_sum([mean](double z) { return (z - mean) * (z - mean); });
        double least = -(p_.top_n_sigma * std::sqrt(squares / live));
        if (!listed_) {
            auto near = [&](double logit) { return logit - top_ >= least; };
            list_where(least_float(near), near);
            return temper();
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

    // -------------------------------------------------------------------------------------------------------- XTC
    // Of the ids with at least the threshold's mass all but the last, by (d descending, id ascending), go. Calls remove(index) for each of those.
    template <class Remove> void exclude(double least, int64_t n, const double* d, const int64_t* mass, Remove remove) {
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
        double least = p_.xtc_threshold * (double)weigh();
        uint16_t* stays = w_.bucket.room(x_.vocab());
        std::fill(stays, stays + n_, 1);
        exclude(least, n_, w_.d.get(), w_.mass.get(), [&](int64_t i) { stays[i] = 0; });
        keep([&](int64_t i) { return stays[i]; });
    }

    // The row stays a row: only the top choices are listed, for a moment.
    void xtc_of_row() {
        int64_t total = 0;
        each_tile([&](int64_t, int64_t n, Tile& tile) {
            tile.weigh(n);
            total += sum_of(tile.mass, n);
        });
        x_.each_edited([&](int32_t, double logit) { total += mass_of(d_of(logit)); });
        double least = p_.xtc_threshold * (double)total;
        double near = least >= 1.0 ? log_of(least / MASS_ONE) - 0x1p-20 : NONE;  // a little below, so that no rounding leaves one out
        take([&](double d) { return d >= near; });
        listed_ = false;
        weigh();  // the best is among them, so these are the row's masses
        exclude(least, n_, w_.d.get(), w_.mass.get(), [&](int64_t i) { x_.drop(w_.ids.get()[i]); });
    }

    Logits& x_;
    const SampleRow& row_;
    const SampleParams& p_;
    Work& w_;
    double top_, t_, peak_ = 0;
    int64_t n_ = 0;
    bool listed_ = false;
};

}  // namespace
}  // namespace VB_NS
