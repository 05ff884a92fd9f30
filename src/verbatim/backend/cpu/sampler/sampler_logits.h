// One row of logits on its way: the model's float32 row, what bias, bans and penalties changed of it, and the largest value of every chunk of 64 ids,
// by which later stages pass over most of the row.
#pragma once
#include <cfloat>
#include <memory>
#include <vector>

#include "sampler.h"
#include "sampler_math.h"

namespace VB_NS {
namespace {

using vb::CHUNK;

// Memory that only grows and is never cleared: no row asks for any while writing.
template <class T> class Buffer {
  public:
    T* room(int64_t n) {
        if (n > have_) {
            data_.reset(new T[n]);
            have_ = n;
        }
        return data_.get();
    }
    T* get() const { return data_.get(); }

  private:
    std::unique_ptr<T[]> data_;
    int64_t have_ = 0;
};

// What is known of one id while a row is edited. A number that is not the present one means: nothing.
struct Mark {
    double value = 0;
    uint32_t edited = 0, seen = 0;
    int64_t count = 0;
};

struct Candidate {
    double key;
    int64_t mass;
    int32_t id;
};

// Scratch of one thread.
struct Work {
    Buffer<float> row, raw_tops, tops;
    Buffer<double> d, starts;
    Buffer<int64_t> mass;
    Buffer<int32_t> ids, order;
    Buffer<uint16_t> bucket;
    std::vector<Mark> marks;
    uint32_t edit = 0, look = 0;
    std::vector<int32_t> edited, loose;
    std::vector<Candidate> candidates;
};

typedef float Floats __attribute__((vector_size(VECTOR)));
typedef int32_t Truths __attribute__((vector_size(VECTOR)));
constexpr int FLOATS = VECTOR / 4;

inline Floats load_floats(const float* x) {
    Floats out;
    std::memcpy(&out, x, VECTOR);
    return out;
}

// The largest of each chunk; false if there is a NaN.
inline bool chunk_tops(const float* x, int64_t n, float* tops) {
    Truths bad{};
    for (int64_t from = 0; from + CHUNK <= n; from += CHUNK) {
        Floats best = load_floats(x + from);
        bad |= best != best;
        for (int64_t j = FLOATS; j < CHUNK; j += FLOATS) {
            Floats v = load_floats(x + from + j);
            best = v > best ? v : best;
            bad |= v != v;
        }
        float lanes[FLOATS];
        std::memcpy(lanes, &best, VECTOR);
        for (int half = FLOATS / 2; half; half /= 2)
            for (int j = 0; j < half; j++) lanes[j] = lanes[j] > lanes[j + half] ? lanes[j] : lanes[j + half];
        tops[from / CHUNK] = lanes[0];
    }
    int32_t any = 0;
    for (int j = 0; j < FLOATS; j++) any |= bad[j];
    if (int64_t from = n / CHUNK * CHUNK; from < n) {
        float best = NONE_F;
        for (int64_t i = from; i < n; i++) {
            best = x[i] > best ? x[i] : best;
            any |= x[i] != x[i];
        }
        tops[from / CHUNK] = best;
    }
    return !any;
}

inline double largest(const double* x, int64_t n) {
    typedef double Doubles __attribute__((vector_size(VECTOR)));
    Doubles lanes = Doubles{} + NONE;
    int64_t i = 0;
    for (; i + WIDE <= n; i += WIDE) {
        Doubles v;
        std::memcpy(&v, x + i, VECTOR);
        lanes = v > lanes ? v : lanes;
    }
    double best = NONE;
    for (int j = 0; j < WIDE; j++) best = lanes[j] > best ? lanes[j] : best;
    for (; i < n; i++) best = x[i] > best ? x[i] : best;
    return best;
}

// The smallest finite float for which a rule holds that, once true, stays true for all larger ones; +infinity if there is none. A filter that
// compares float64 values derived from a float32 logit becomes one comparison of floats, exactly.
template <class Rule> float least_float(Rule rule) {
    auto turned = [](int32_t k) { return k ^ ((k >> 31) & 0x7fffffff); };  // float bits to integers in the same order, and back
    int64_t low = turned(bits_of<int32_t>(-FLT_MAX)), high = turned(bits_of<int32_t>(-NONE_F));
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (rule((double)bits_of<float>(turned((int32_t)middle)))) high = middle;
        else low = middle + 1;
    }
    return bits_of<float>(turned((int32_t)low));
}

class Logits {
  public:
    Logits(const float* raw, const float* tops, int64_t vocab, Work& w)
        : raw_(raw), at_(raw), raw_tops_(tops), vocab_(vocab), chunks_((vocab + CHUNK - 1) / CHUNK), w_(w) {}

    // Reads the model's row; false if it holds a NaN or an infinity.
    bool scan() {
        bool numbers = true;
        if (!raw_tops_) {
            raw_tops_ = w_.raw_tops.room(chunks_);
            numbers = chunk_tops(raw_, vocab_, w_.raw_tops.get());
        }
        for (int64_t c = 0; c < chunks_; c++) numbers &= raw_tops_[c] == raw_tops_[c];
        tops_ = raw_tops_;
        top_ = raw_top_ = (double)tops_[best_chunk()];
        return numbers && top_ - top_ == 0.0;
    }

    // ------------------------------------------------------------------------------------------------------- edits
    // From here until settle() the row is this thread's own. What an edit touches leaves the float row (-inf there) and is kept as float64.
    void own() {
        if (mine_) return;
        float* copy = w_.row.room(vocab_);
        std::memcpy(copy, raw_, (size_t)vocab_ * sizeof(float));
        at_ = mine_ = copy;
        if ((int64_t)w_.marks.size() < vocab_) w_.marks.resize(vocab_);
        w_.edited.clear();
        w_.edit = next(w_.edit);
    }

    double& edit(int32_t id) {
        Mark& mark = w_.marks[id];
        if (mark.edited != w_.edit) {
            mark.edited = w_.edit;
            mark.value = (double)at_[id];
            mine_[id] = NONE_F;
            w_.edited.push_back(id);
        }
        return mark.value;
    }

    // A pass over a text: `first(id)` is true when the pass meets an id for the first time, and sets its count to 0.
    void look() { w_.look = next(w_.look); }
    bool first(int32_t id) {
        Mark& mark = w_.marks[id];
        if (mark.seen == w_.look) return false;
        mark.seen = w_.look;
        mark.count = 0;
        return true;
    }
    int64_t& count(int32_t id) { return w_.marks[id].count; }

    void settle() {
        std::sort(w_.edited.begin(), w_.edited.end());
        tops_ = w_.tops.room(chunks_);
        chunk_tops(at_, vocab_, w_.tops.get());
        top_ = (double)tops_[best_chunk()];
        for (int32_t id : w_.edited) top_ = w_.marks[id].value > top_ ? w_.marks[id].value : top_;
    }

    // Removes an id after settle(): the tops stay what they were, bounds from above.
    void drop(int32_t id) {
        own();
        if (at_[id] > NONE_F) mine_[id] = NONE_F;
        else w_.marks[id].value = NONE;
    }

    // ----------------------------------------------------------------------------------------------------- reading
    const float* raw() const { return raw_; }
    const float* row() const { return at_; }
    float* mine() { return mine_; }
    int64_t vocab() const { return vocab_; }
    int64_t chunks() const { return chunks_; }
    float chunk_top(int64_t chunk) const { return tops_[chunk]; }
    bool whole() const { return !mine_; }
    double top() const { return top_; }
    double raw_top() const { return raw_top_; }

    // A live id whose float is -inf is one that an edit touched.
    double value(int32_t id) const { return at_[id] > NONE_F ? (double)at_[id] : mine_ ? w_.marks[id].value : NONE; }

    template <class Each> void each_edited(Each each) const {
        if (!mine_) return;
        for (int32_t id : w_.edited)
            if (w_.marks[id].value > NONE) each(id, w_.marks[id].value);
    }

    // The lowest id with the largest value.
    int32_t first_best() const {
        int32_t best = -1;
        for (int64_t c = 0; c < chunks_ && best < 0; c++)
            if ((double)tops_[c] == top_)
                for (int64_t i = c * CHUNK; best < 0; i++)
                    if ((double)at_[i] == top_) best = (int32_t)i;
        each_edited([&](int32_t id, double value) {
            if (value == top_ && (best < 0 || id < best)) best = id;
        });
        return best;
    }

    // The least value of the float row that no ban removed; the best one where there is none.
    double bottom() const {
        Floats most = Floats{} - NONE_F, lows = most;
        int64_t i = 0;
        for (; i + FLOATS <= vocab_; i += FLOATS) {
            Floats v = load_floats(at_ + i);
            v = v > NONE_F ? v : most;
            lows = v < lows ? v : lows;
        }
        float low = -NONE_F;
        for (int j = 0; j < FLOATS; j++) low = lows[j] < low ? lows[j] : low;
        for (; i < vocab_; i++) low = at_[i] > NONE_F && at_[i] < low ? at_[i] : low;
        return low < -NONE_F ? (double)low : top_;
    }

    int64_t best_chunk() const {
        int64_t best = 0;
        for (int64_t c = 1; c < chunks_; c++) best = tops_[c] > tops_[best] ? c : best;
        return best;
    }

    // Ids of the float row, ascending, that are at least `least`.
    int64_t at_least(float least, int32_t* ids) const { return gather(at_, tops_, least, ids); }
    int64_t raw_at_least(float least, int32_t* ids) const { return gather(raw_, raw_tops_, least, ids); }

    // A value that at least `count` live ids reach, found among the tops alone: each is the value of some id. -inf if they are too few.
    double reached_by(int64_t count) const {
        double* starts = w_.starts.room(chunks_ + (int64_t)w_.edited.size());
        int64_t n = 0;
        for (; n < chunks_; n++) starts[n] = (double)tops_[n];
        each_edited([&](int32_t, double value) { starts[n++] = value; });
        return nth_largest(starts, n, count);
    }
    float raw_reached_by(int64_t count) const {
        double* starts = w_.starts.room(chunks_);
        for (int64_t c = 0; c < chunks_; c++) starts[c] = (double)raw_tops_[c];
        return (float)nth_largest(starts, chunks_, count);
    }

  private:
    static double nth_largest(double* x, int64_t n, int64_t count) {
        if (count > n) return NONE;
        std::nth_element(x, x + (count - 1), x + n, [](double a, double b) { return a > b; });
        return x[count - 1];
    }

    int64_t gather(const float* x, const float* tops, float least, int32_t* ids) const {
        int64_t n = 0;
        for (int64_t c = 0; c < chunks_; c++) {
            if (!(tops[c] >= least)) continue;
            for (int64_t i = c * CHUNK, stop = std::min(i + CHUNK, vocab_); i < stop; i++) {
                ids[n] = (int32_t)i;  // without a branch: which ids stay is as good as random
                n += x[i] >= least;
            }
        }
        return n;
    }

    uint32_t next(uint32_t number) {
        if (++number) return number;
        std::fill(w_.marks.begin(), w_.marks.end(), Mark{});
        w_.edit = w_.look = 0;
        return 1;
    }

    const float* raw_;
    const float* at_;
    const float* raw_tops_;
    const float* tops_ = nullptr;
    float* mine_ = nullptr;
    int64_t vocab_, chunks_;
    Work& w_;
    double top_ = 0, raw_top_ = 0;
};

}  // namespace
}  // namespace VB_NS
