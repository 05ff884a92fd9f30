// One row of logits: the float32 row of the model, the values that bias, bans and penalties
// changed, and the largest logit of every chunk of 64 ids, by which later stages skip most of the
// row.
#pragma once
#include <cfloat>
#include <memory>
#include <vector>

#include "sampler.h"
#include "sampler_math.h"

namespace VB_NS {
namespace {

using vb::CHUNK;

// A buffer that only grows and is never cleared, so that sampling a row rarely allocates.
template <class T> class Buffer {
  public:
    T* reserve(int64_t n) {
        if (n > capacity_) {
            data_.reset(new T[n]);
            capacity_ = n;
        }
        return data_.get();
    }
    T* get() const { return data_.get(); }

  private:
    std::unique_ptr<T[]> data_;
    int64_t capacity_ = 0;
};

// State of one id while a row is edited. `edited` and `seen` hold generation numbers: a number
// other than the current one means unset.
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

// Scratch memory of one thread.
struct Scratch {
    Buffer<float> row, raw_chunk_maxes, chunk_maxes;
    Buffer<double> d, starts;
    Buffer<int64_t> mass;
    Buffer<int32_t> ids, order;
    Buffer<uint16_t> bucket;
    std::vector<Mark> marks;
    uint32_t edit = 0, pass_number = 0;
    std::vector<int32_t> edited, extra_ids;
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

// The largest value of each chunk; false if the row holds a NaN.
inline bool find_chunk_maxes(const float* x, int64_t n, float* chunk_maxes) {
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
            for (int j = 0; j < half; j++)
                lanes[j] = lanes[j] > lanes[j + half] ? lanes[j] : lanes[j + half];
        chunk_maxes[from / CHUNK] = lanes[0];
    }
    int32_t any = 0;
    for (int j = 0; j < FLOATS; j++) any |= bad[j];
    if (int64_t from = n / CHUNK * CHUNK; from < n) {
        float best = NEG_INF_F;
        for (int64_t i = from; i < n; i++) {
            best = x[i] > best ? x[i] : best;
            any |= x[i] != x[i];
        }
        chunk_maxes[from / CHUNK] = best;
    }
    return !any;
}

inline double largest(const double* x, int64_t n) {
    typedef double Doubles __attribute__((vector_size(VECTOR)));
    Doubles lanes = Doubles{} + NEG_INF;
    int64_t i = 0;
    for (; i + WIDE <= n; i += WIDE) {
        Doubles v;
        std::memcpy(&v, x + i, VECTOR);
        lanes = v > lanes ? v : lanes;
    }
    double best = NEG_INF;
    for (int j = 0; j < WIDE; j++) best = lanes[j] > best ? lanes[j] : best;
    for (; i < n; i++) best = x[i] > best ? x[i] : best;
    return best;
}

// The smallest finite float for which a monotone rule holds (true for one value means true for all
// larger ones); +infinity if there is none. Turns a filter on float64 values derived from a float32
// logit into one exact comparison of floats.
template <class Rule> float smallest_float_where(Rule rule) {
    // Maps float bits to integers of the same order, and back.
    auto ordered_bits = [](int32_t k) { return k ^ ((k >> 31) & 0x7fffffff); };
    int64_t low = ordered_bits(bits_of<int32_t>(-FLT_MAX)),
            high = ordered_bits(bits_of<int32_t>(-NEG_INF_F));
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (rule((double)bits_of<float>(ordered_bits((int32_t)middle)))) high = middle;
        else low = middle + 1;
    }
    return bits_of<float>(ordered_bits((int32_t)low));
}

class Logits {
  public:
    Logits(const float* raw, const float* chunk_maxes, int64_t vocab, Scratch& w)
        : raw_(raw),
          at_(raw),
          raw_chunk_maxes_(chunk_maxes),
          vocab_(vocab),
          chunks_((vocab + CHUNK - 1) / CHUNK),
          w_(w) {}

    // Finds the largest logits; false if the row holds a NaN or an infinity.
    bool scan() {
        bool numbers = true;
        if (!raw_chunk_maxes_) {
            raw_chunk_maxes_ = w_.raw_chunk_maxes.reserve(chunks_);
            numbers = find_chunk_maxes(raw_, vocab_, w_.raw_chunk_maxes.get());
        }
        for (int64_t c = 0; c < chunks_; c++) numbers &= raw_chunk_maxes_[c] == raw_chunk_maxes_[c];
        chunk_maxes_ = raw_chunk_maxes_;
        top_ = raw_top_ = (double)chunk_maxes_[best_chunk()];
        return numbers && top_ - top_ == 0.0;
    }

    // --------------------------------------------------------------------------------------- edits
    // Copies the row for writing, until finish_edits(). An edited id is -inf in the float row; its
    // value is kept as float64 in its mark.
    void make_writable() {
        if (writable_) return;
        float* copy = w_.row.reserve(vocab_);
        std::memcpy(copy, raw_, (size_t)vocab_ * sizeof(float));
        at_ = writable_ = copy;
        if ((int64_t)w_.marks.size() < vocab_) w_.marks.resize(vocab_);
        w_.edited.clear();
        w_.edit = next(w_.edit);
    }

    double& edit(int32_t id) {
        Mark& mark = w_.marks[id];
        if (mark.edited != w_.edit) {
            mark.edited = w_.edit;
            mark.value = (double)at_[id];
            writable_[id] = NEG_INF_F;
            w_.edited.push_back(id);
        }
        return mark.value;
    }

    // A pass over the history: first_visit(id) is true when the pass meets an id for the first
    // time, and resets its count.
    void begin_pass() { w_.pass_number = next(w_.pass_number); }
    bool first_visit(int32_t id) {
        Mark& mark = w_.marks[id];
        if (mark.seen == w_.pass_number) return false;
        mark.seen = w_.pass_number;
        mark.count = 0;
        return true;
    }
    int64_t& count(int32_t id) { return w_.marks[id].count; }

    void finish_edits() {
        std::sort(w_.edited.begin(), w_.edited.end());
        chunk_maxes_ = w_.chunk_maxes.reserve(chunks_);
        find_chunk_maxes(at_, vocab_, w_.chunk_maxes.get());
        top_ = (double)chunk_maxes_[best_chunk()];
        for (int32_t id : w_.edited) top_ = w_.marks[id].value > top_ ? w_.marks[id].value : top_;
    }

    // Removes an id after finish_edits(). The chunk maxima are not updated: they stay upper bounds.
    void remove(int32_t id) {
        make_writable();
        if (at_[id] > NEG_INF_F) writable_[id] = NEG_INF_F;
        else w_.marks[id].value = NEG_INF;
    }

    // ------------------------------------------------------------------------------------- reading
    const float* raw() const { return raw_; }
    const float* row() const { return at_; }
    float* writable() { return writable_; }
    int64_t vocab() const { return vocab_; }
    int64_t chunks() const { return chunks_; }
    float chunk_max(int64_t chunk) const { return chunk_maxes_[chunk]; }
    bool unedited() const { return !writable_; }
    double top() const { return top_; }
    double raw_top() const { return raw_top_; }

    // A remaining id with -inf in the float row is an edited one.
    double value(int32_t id) const {
        return at_[id] > NEG_INF_F ? (double)at_[id] : writable_ ? w_.marks[id].value : NEG_INF;
    }

    template <class Visit> void each_edited(Visit visit) const {
        if (!writable_) return;
        for (int32_t id : w_.edited)
            if (w_.marks[id].value > NEG_INF) visit(id, w_.marks[id].value);
    }

    // The lowest id with the largest value (greedy sampling).
    int32_t first_best() const {
        int32_t best = -1;
        for (int64_t c = 0; c < chunks_ && best < 0; c++)
            if ((double)chunk_maxes_[c] == top_)
                for (int64_t i = c * CHUNK; best < 0; i++)
                    if ((double)at_[i] == top_) best = (int32_t)i;
        each_edited([&](int32_t id, double value) {
            if (value == top_ && (best < 0 || id < best)) best = id;
        });
        return best;
    }

    // The smallest remaining value of the float row; the largest one if all are removed.
    double lowest_live() const {
        Floats highest = Floats{} - NEG_INF_F, lows = highest;
        int64_t i = 0;
        for (; i + FLOATS <= vocab_; i += FLOATS) {
            Floats v = load_floats(at_ + i);
            v = v > NEG_INF_F ? v : highest;
            lows = v < lows ? v : lows;
        }
        float low = -NEG_INF_F;
        for (int j = 0; j < FLOATS; j++) low = lows[j] < low ? lows[j] : low;
        for (; i < vocab_; i++) low = at_[i] > NEG_INF_F && at_[i] < low ? at_[i] : low;
        return low < -NEG_INF_F ? (double)low : top_;
    }

    int64_t best_chunk() const {
        int64_t best = 0;
        for (int64_t c = 1; c < chunks_; c++)
            best = chunk_maxes_[c] > chunk_maxes_[best] ? c : best;
        return best;
    }

    // Ids of the float row that are at least `least`, ascending; returns their number.
    int64_t at_least(float least, int32_t* ids) const {
        return gather(at_, chunk_maxes_, least, ids);
    }
    int64_t raw_at_least(float least, int32_t* ids) const {
        return gather(raw_, raw_chunk_maxes_, least, ids);
    }

    // A value that at least `count` remaining ids reach, found among the chunk maxima alone (each
    // is the value of some id). -inf if there are too few chunks.
    double value_reached_by(int64_t count) const {
        double* starts = w_.starts.reserve(chunks_ + (int64_t)w_.edited.size());
        int64_t n = 0;
        for (; n < chunks_; n++) starts[n] = (double)chunk_maxes_[n];
        each_edited([&](int32_t, double value) { starts[n++] = value; });
        return nth_largest(starts, n, count);
    }
    float raw_value_reached_by(int64_t count) const {
        double* starts = w_.starts.reserve(chunks_);
        for (int64_t c = 0; c < chunks_; c++) starts[c] = (double)raw_chunk_maxes_[c];
        return (float)nth_largest(starts, chunks_, count);
    }

  private:
    static double nth_largest(double* x, int64_t n, int64_t count) {
        if (count > n) return NEG_INF;
        std::nth_element(x, x + (count - 1), x + n, [](double a, double b) { return a > b; });
        return x[count - 1];
    }

    int64_t gather(const float* x, const float* chunk_maxes, float least, int32_t* ids) const {
        int64_t n = 0;
        for (int64_t c = 0; c < chunks_; c++) {
            if (!(chunk_maxes[c] >= least)) continue;
            for (int64_t i = c * CHUNK, stop = std::min(i + CHUNK, vocab_); i < stop; i++) {
                ids[n] = (int32_t)i;  // branchless: which ids stay is unpredictable
                n += x[i] >= least;
            }
        }
        return n;
    }

    uint32_t next(uint32_t number) {
        if (++number) return number;
        std::fill(w_.marks.begin(), w_.marks.end(), Mark{});
        w_.edit = w_.pass_number = 0;
        return 1;
    }

    const float* raw_;
    const float* at_;
    const float* raw_chunk_maxes_;
    const float* chunk_maxes_ = nullptr;
    float* writable_ = nullptr;
    int64_t vocab_, chunks_;
    Scratch& w_;
    double top_ = 0, raw_top_ = 0;
};

}  // namespace
}  // namespace VB_NS
