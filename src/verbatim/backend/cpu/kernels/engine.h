// The native engine: packed weights, cache memory, a recorded program of a model's forward pass, and the pool that replays it.
//
// ops.py records the program once (one Op a line of model/decoder.py, fused); step() replays it for the rows of one step.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"

namespace verbatim {

// Pages straight from the system: zeroed, huge where possible, given back when dropped.
class Pages {
  public:
    Pages() = default;
    explicit Pages(size_t bytes);
    ~Pages();
    Pages(Pages&& o) noexcept : data_(o.data_), bytes_(o.bytes_) { o.data_ = nullptr; o.bytes_ = 0; }
    Pages& operator=(Pages&& o) noexcept;
    uint8_t* data() const { return (uint8_t*)data_; }
    size_t size() const { return bytes_; }

  private:
    void* data_ = nullptr;
    size_t bytes_ = 0;
};

// Weights lie together in a few large areas: huge pages double the speed at which one core can read them.
class Arena {
  public:
    uint8_t* take(size_t bytes);

  private:
    std::vector<Pages> areas_;
    uint8_t* at_ = nullptr;
    size_t left_ = 0;
};

struct Matrix {
    Packed p;
    int64_t file_bytes;
};

enum OpType : int { O_EMBED, O_POSITIONS, O_QKV, O_ATTEND, O_LINEAR, O_GATEUP, O_NORM, O_NORMADD, O_MOE, O_HEAD };

struct Op {
    OpType type;
    int src = -1, dst = -1;             // buffers
    int norm = -1, norm_bias = -1;      // vectors; -1: no norm before
    int mat[3] = {-1, -1, -1};          // q k v | weight | gate up down
    int bias[3] = {-1, -1, -1};
    bool add = false;                   // dst += result
    int layer = -1, rope = -1, qnorm = -1, knorm = -1;
    float scale = 1.0f, softcap = 0.0f;
    std::vector<int> experts[3];        // matrices of each expert: gate, up, down
    int used = 0;
    bool renormalise = true;
    bool outputs = false;               // O_NORM: rows of the outputs only
    int then = -1;                      // the next operation that reads weights
};

struct Shape {
    int vocab, hidden, heads, kv_heads, head_dim, activation;
    bool layer_norm;
    float eps;
};

struct Rope {
    int half;
    double factor;
    std::vector<double> inv_freq;
};

struct Group {
    int window;               // 0: all positions
    std::vector<int> layers;
    int64_t blocks = 0;
    Pages pages;
};

// One sequence of a step, as the plan gives it.
struct Sequence {
    int row0, rows;
    int64_t start;
    std::vector<std::vector<int32_t>> blocks;  // per group
};

struct Step {
    std::vector<int32_t> tokens;
    std::vector<int32_t> positions;
    std::vector<int32_t> sequence;  // of each row
    std::vector<Sequence> sequences;
    std::vector<int32_t> outputs;   // rows whose final state is needed
    std::vector<int32_t> logits;    // outputs whose logits are needed
};

struct Buffer {
    int width;
    bool inner = false;   // written by blocks: also holds the quantised form
    bool floats = true;   // of an inner one: somebody reads the plain numbers too
    Pages f, q;
    QRows qr{};
};

class Engine : ThreadPool::Work {
  public:
    Engine(const Kernels& k, int threads, const Shape& shape, bool q8);

    int add_matrix(const std::string& type, const uint8_t* data, int64_t bytes, int64_t rows, int64_t k, int group);
    int add_vector(const float* data, int64_t n);
    int add_rope(const double* inv_freq, int half, double factor);
    int add_buffer(int width);
    void add_group(int window, const std::vector<int>& layers);
    void add_op(Op op);
    void finish();  // after the last op
    int64_t block_bytes(int group) const;
    void allocate(const std::vector<int64_t>& blocks);
    void copy_block(int group, int64_t from, int64_t to);

    Step step;  // filled by the caller, then run()
    void run();
    const float* tops() const { return (const float*)tops_.data(); }  // of each row and each chunk of the sampler, the largest logit
    int64_t chunks() const { return (shape.vocab + vb::CHUNK - 1) / vb::CHUNK; }
    const float* logits() const { return (const float*)buffers_[logits_buffer_]->f.data(); }
    const float* hidden() const { return (const float*)buffers_[hidden_buffer_]->f.data(); }
    void argmax(int row, int32_t* id) const;

    const Shape shape;
    const Kernels& kernels;
    int threads() const { return pool_.size(); }
    int64_t weight_bytes() const;
    ThreadPool& pool() { return pool_; }
    int group_window(int g) const { return groups_[g].window; }
    int64_t most_positions() const { return positions_; }
    const Packed& matrix(int i) const { return matrices_[i]->p; }

  private:
    using Units = ThreadPool::Units;
    struct Item { int seq, row0, rows, kv, tile0, tile1, chain; };
    struct Chain { int seq, row0, rows, kv, tile0, tile1; int64_t partial; int parts; };
    struct Worker {  // scratch of one thread
        Pages tile, act, norm, q, scores, wide, o, run;
        QRows qr{};
    };
    struct Prepared { QRows q; const float* x; const int32_t* idx; };

    void reserve(int rows);
    void plan_attention();
    void plan_phases();
    void phase(int number, Units& units) override;

    // What a product reads: rows of `width`, through idx if given, normed, quantised or both.
    struct Input { int rows, width; const int32_t* idx; bool quant; };
    Input input(const Op& op) const;
    static constexpr int FEW = 6;
    enum Source { AS_IT_IS, BY_EACH, TOGETHER };
    Source source(const Op& op, const Input& in) const;
    int product_units(const Op& op) const;
    bool whole_blocks(int width) const;
    int prepare_rows(int rows) const;  // of one unit
    void prepare(const Op& op, Units& units);
    Prepared prepared(const Op& op, int thread);
    void norm_row(const Op& op, const float* x, int n, float* y) const;
    void quantise_row(const QRows& q, int64_t row, const float* x, int n) const;
    void embed(const Op& op, Units& units);
    void positions(const Op& op, Units& units);
    void qkv(const Op& op, Units& units);
    void qkv_head(const Op& op, int part, int head, int row0, int rows, float* tile);
    void attend(const Op& op, Units& units);
    void attend_item(const Op& op, Worker& w, const Item& item);
    void fill_tile(AttendTile& t, const Op& op, const Item& item, int tile, int lo_all, int hi_all) const;
    void finish_rows(const Op& op, const Item& item, const float* o, const float* l);
    void linear(const Op& op, Units& units);
    void gateup(const Op& op, Units& units);
    void norm(const Op& op, Units& units);
    int moe_up_units(const Op& op) const;
    int moe_down_units(const Op& op) const;
    void moe_plan(const Op& op);
    void moe_route(const Op& op, Units& units);
    void moe_sort(const Op& op, Units& units);
    void moe_up(const Op& op, Units& units);
    void moe_down(const Op& op, Units& units);
    void moe_sum(const Op& op, Units& units);

    int linear_panels(const Op& op) const;
    int gateup_panels(const Op& op) const;
    const uint8_t* following(const Op& op, int thread) const;
    const uint8_t* panel(int matrix, int p) const { return matrices_[matrix]->p.data + (size_t)p * matrices_[matrix]->p.panel_bytes; }
    uint8_t* cell(int layer, int64_t block, int kv) const;
    void expect(const Op& op, const Item& item) const;

    Arena arena_;
    std::vector<std::unique_ptr<Matrix>> matrices_;
    std::vector<std::vector<float>> vectors_;
    std::vector<Rope> ropes_;
    std::vector<std::unique_ptr<Buffer>> buffers_;
    std::vector<Group> groups_;
    std::vector<int> layer_group_, layer_slot_;
    std::vector<Op> ops_;
    std::vector<std::unique_ptr<Worker>> workers_;
    Buffer shared_;                          // normed rows of a step with many rows
    std::vector<Pages> angles_;              // per rope: [rows][2][half]
    enum Stage : int { S_PREPARE, S_WORK, S_ROUTE, S_SORT, S_UP, S_DOWN, S_SUM };
    struct Phase { int op; Stage stage; };
    std::vector<Phase> phases_;              // of this step
    std::vector<int> units_;                 // of each phase
    int max_width_ = 0, rows_ = 0;
    int64_t positions_ = ((int64_t)1 << 24) - 1;  // of one text: what indices are made for, or as many as were learnt
    int logits_buffer_ = -1, hidden_buffer_ = -1;
    bool q8_;
    int vdim_;
    size_t cell_bytes_ = 0;
    std::vector<std::vector<Item>> items_;   // per group
    std::vector<std::vector<Chain>> chains_;
    std::unique_ptr<std::atomic<int>[]> chain_done_;
    size_t chain_slots_ = 0;
    Pages partials_;
    // mixture of experts
    Pages scores_, tops_;
    std::vector<int32_t> slot_expert_, expert_rows_, expert_start_;
    std::vector<float> slot_weight_;
    std::unique_ptr<Buffer> slots_inner_, slots_out_;
    ThreadPool pool_;
};

}  // namespace verbatim
