// A draft head: a small net that guesses the tokens after the next one from the final state that the next one was drawn from.
//
//   x = [ h * state_scale ; rms(embedding of the token) * word_scale ]
//   z = h * keep + down( silu(gate x) * (up x) ),  h' = rms(z) * out,  scores = the head's rows of the words it knows, times h'
//
// The best word and its probability are the guess; h' and that word are the input of the next one. model/draft_head.py says the same in NumPy.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "engine.h"

namespace verbatim {

class DraftHead : ThreadPool::Work {
  public:
    struct Net {
        int up, down, head, embed;  // matrices of the engine; `up` holds the gate's rows, then the up rows
        std::vector<float> state_scale, word_scale, keep, out;
        std::vector<int32_t> words;  // the id of each row of `head`
    };
    struct Ask {
        int row;         // of the final states of the last step
        int32_t token;   // drawn from it
        int limit;
        float temperature;
        bool like(const Ask& o) const { return row == o.row && token == o.token && temperature == o.temperature && limit > 0 && o.limit > 0; }
    };
    struct Guess {
        std::vector<int32_t> tokens;
        std::vector<float> odds;  // that this token and all before it come true
    };
    DraftHead(Engine& engine, Net net);
    ~DraftHead() { engine_.pool().settle(); }
    // The other threads make the first guesses while the caller does something else; guess() with the same asks takes them.
    void start(const std::vector<Ask>& asks);
    // A text's guesses end where the next one's odds would hardly reach `floor`.
    std::vector<Guess> guess(const std::vector<Ask>& asks, float floor);

  private:
    using Units = ThreadPool::Units;
    struct Rows {  // one matrix product's input
        std::vector<float> f, dx, ds;
        std::vector<int8_t> q;
        std::vector<int32_t> s16;
        QRows quant;
        int width = 0;
        void fit(int rows, int width);
        float* row(int r) { return f.data() + (size_t)r * width; }
    };
    struct Best { float value, sum; int32_t word; };
    void phase(int number, Units& units) override;
    void drop() override;
    void take(const std::vector<Ask>& asks);
    void lay_out(const std::vector<Ask>& asks, const std::vector<Guess>& sofar);
    std::vector<int> units() const;
    void begin(int r);
    void up(int unit);
    void down(int unit);
    void close(int r);
    void score(int unit);
    Best best(int r) const;
    void quantise(Rows& to, int r) const;
    void product(const Packed& w, int p, int np, Rows& in, float* out, int64_t ld) const;

    Engine& engine_;
    const Kernels& kernels_;
    Net net_;
    int hidden_, inner_, rows_ = 0;
    std::vector<Ask> started_;        // whose first guesses are being made, until they are taken or dropped
    std::atomic<bool> dropped_{false};
    std::vector<int> live_;           // asks that still go on
    std::vector<int32_t> token_;      // of each live row
    std::vector<float> heat_, state_; // temperature; [rows][hidden]
    Rows x_, mid_, end_;
    std::vector<Best> found_;         // [units of score][rows]
};

}  // namespace verbatim
