// A draft head for speculative decoding: a small network that drafts the tokens after the next one
// from the final hidden state that the next token was sampled from.
//
//   x = [ h * state_scale ; rms_norm(embedding of the token) * embed_scale ]
//   z = h * keep + down( silu(gate x) * (up x) ),  h' = rms_norm(z) * out
//   scores = h' times the rows of the LM head that belong to the head's own vocabulary
//
// The best token and its probability are the draft; h' and that token are the input of the next
// draft position. model/loading/draft_head.py is the same in NumPy.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "engine.h"

namespace verbatim {

class DraftHead : ThreadPool::Job {
  public:
    struct Net {
        // Matrix indices in the engine; `up` holds the gate rows, then the up rows.
        int up, down, head, embed;
        std::vector<float> state_scale, embed_scale, keep, out;
        std::vector<int32_t> token_ids;  // token id of each row of `head`
    };
    struct Query {
        int row;        // row of the final hidden states of the last step
        int32_t token;  // sampled from that row
        int limit;      // draft tokens, at most
        float temperature;
        bool same_start(const Query& o) const {
            return row == o.row && token == o.token && temperature == o.temperature && limit > 0 &&
                   o.limit > 0;
        }
    };
    struct Draft {
        std::vector<int32_t> tokens;
        std::vector<float>
            accept_prob;  // estimated probability that this and all earlier ones are accepted
    };
    DraftHead(Engine& engine, Net net);
    ~DraftHead() { engine_.pool().cancel_started(); }
    // Starts the first draft position on the worker threads while the caller does something else.
    // draft() with the same queries picks up the result.
    void start(const std::vector<Query>& queries);
    // Drafts for each query until its limit, or until the next token is unlikely to reach an
    // acceptance probability of `floor`.
    std::vector<Draft> draft(const std::vector<Query>& queries, float floor);

  private:
    using WorkItems = ThreadPool::WorkItems;
    struct Rows {  // input of one matrix product: float and quantised rows
        std::vector<float> f, dx, ds;
        std::vector<int8_t> q;
        std::vector<int32_t> s16;
        QRows quant;
        int width = 0;
        void resize_for(int rows, int width);
        float* row(int r) { return f.data() + (size_t)r * width; }
    };
    struct Best {
        float value, sum;
        int32_t token;
    };
    void phase(int number, WorkItems& items) override;
    void cancel() override;
    void select_active(const std::vector<Query>& queries);
    void setup_position(const std::vector<Query>& queries, const std::vector<Draft>& drafts);
    std::vector<int> item_counts() const;
    void build_input(int r);
    void up(int item);
    void down(int item);
    void norm_output(int r);
    void score(int item);
    Best best(int r) const;
    void quantise(Rows& to, int r) const;
    void product(const Packed& w, int p, int np, Rows& in, float* out, int64_t ld) const;

    Engine& engine_;
    const Kernels& kernels_;
    Net net_;
    int hidden_, inner_, rows_ = 0;
    // Queries of start(), until draft() uses them or they are cancelled.
    std::vector<Query> started_;
    std::atomic<bool> cancelled_{false};
    std::vector<int> active_;                 // queries that are still drafting
    std::vector<int32_t> token_;              // input token of each active row
    std::vector<float> temperature_, state_;  // per active row; [rows][hidden]
    Rows x_, mid_, end_;
    std::vector<Best> chunk_best_;  // [score items][rows]
};

}  // namespace verbatim
