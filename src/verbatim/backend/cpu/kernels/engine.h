// The native engine: packed weights, KV cache memory, the recorded program of a model's forward
// pass, and the thread pool that runs it.
//
// ops.py records the program once (fused operations of model/decoder.py); run() executes it for the
// rows of one step.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "mesh.h"
#include "thread_pool.h"

namespace verbatim {

// Memory mapped from the operating system: zeroed, with huge pages where possible, unmapped on
// destruction.
class Pages {
  public:
    Pages() = default;
    explicit Pages(size_t bytes);
    ~Pages();
    Pages(Pages&& o) noexcept : data_(o.data_), bytes_(o.bytes_) {
        o.data_ = nullptr;
        o.bytes_ = 0;
    }
    Pages& operator=(Pages&& o) noexcept;
    uint8_t* data() const { return (uint8_t*)data_; }
    size_t size() const { return bytes_; }

  private:
    void* data_ = nullptr;
    size_t bytes_ = 0;
};

// Allocates the weights in a few large areas: with huge pages one core reads them twice as fast.
class Arena {
  public:
    uint8_t* allocate(size_t bytes);

  private:
    std::vector<Pages> areas_;
    uint8_t* at_ = nullptr;
    size_t left_ = 0;
};

struct Matrix {
    Packed p;
    int64_t file_bytes;
};

// The matrices of one adapter for one weight, by number: A [rank][in], B [out][rank].
struct LowRank {
    int a = -1, b = -1;  // -1: the adapter leaves this weight as it is
    float scale = 1.0f;
};

enum OpType : int {
    O_EMBED,
    O_POSITIONS,
    O_QKV,
    O_ATTEND,
    O_LINEAR,
    O_GATEUP,
    O_NORM,
    O_NORMADD,
    O_MOE,
    O_HEAD,
    O_HEADS,
    O_CONV,
    O_DELTA,
    O_GATED,
    O_LAYER_INPUTS,
    O_LAYER_GATE,
    O_SCALE,
    O_STATES,
    O_GATHER,
    O_CAPTURE,
    O_SCATTER,
    O_CLUSTERS
};

struct Op {
    OpType type;
    int src = -1, dst = -1;         // buffers
    // O_HEADS: buffers of k and v. O_MOE: `keys` holds the router's input, where it has its own.
    int keys = -1, values = -1;
    int norm = -1, norm_bias = -1;  // vectors; -1: no norm before the operation
    // q, k, v (q -1: keys and values only; k and v -1: queries only) | weight | gate, up
    int mat[3] = {-1, -1, -1};
    int bias[3] = {-1, -1, -1};
    int lora[3] = {-1, -1, -1};  // per matrix: what add_lora() returned; -1: no adapter has it
    bool add = false;  // dst += result (residual connection)
    // `layer`: of O_QKV, O_HEADS and O_ATTEND the layer whose keys and values are in the cache.
    int layer = -1, rope = -1, qnorm = -1, knorm = -1, vnorm = -1;
    bool norm_last = false;  // qnorm and knorm after the rotation
    // O_QKV, O_HEADS: a vector of factors; queries at position p times entry p / query_length.
    int query_scales = -1, query_length = 1;
    int sinks = -1;  // O_ATTEND: a vector with one more score per head
    // O_EMBED, O_LINEAR, O_MOE, O_HEAD: multiplies the result. O_ATTEND: multiplies q·k.
    float scale = 1.0f, softcap = 0.0f;
    std::vector<int> experts[3];  // gate, up and down matrix of each expert
    int expert_bias[3] = {-1, -1, -1};  // vectors: [experts][width]
    int used = 0;                       // experts per row
    bool renormalise = true, sigmoid = false;
    int choice_bias = -1;        // vector, added to the scores for the choice of experts only
    int groups = 1, groups_used = 1;  // experts are chosen in the best groups of adjacent ones
    float experts_scale = 1.0f;  // multiplies the weights of the experts
    int expert_scales = -1;      // vector: the same, expert by expert
    bool outputs = false;   // O_NORM: only the rows in Step::outputs
    int next_product = -1;  // the next operation with a matrix product
    // O_CONV, O_DELTA: vectors [taps][channels] and [channels]. O_DELTA: src holds q, k, v before
    // the convolution; buffers `keys` (after it), `values` (z), `betas` and `alphas`; vectors
    // `decay`, `dt` and `qnorm`. O_GATED: `keys` holds the gates.
    int kernel = -1, kernel_bias = -1, taps = 0;
    int betas = -1, alphas = -1, decay = -1, dt = -1;
    int key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
    bool tiled = false;  // value head j reads key head j % key_heads
    // O_LINEAR: one phase with the linear operation before, of which it reads the normalised input.
    bool joined = false;
    int parts = 1;  // O_LINEAR: this operation and the joined ones after it
    // O_LAYER_INPUTS: dst holds a projection of each row, in parts as wide as the vector `norm`; each
    // part is normalised, and the row of the embedding mat[0] times `scale` is added.
    // O_LAYER_GATE: dst = act(src) * columns of the buffer `keys` from `offset` on.
    // O_SCALE: dst is multiplied by the vector `norm` of one value. O_STATES: dst = Step::states.
    // O_EMBED: the token of the matrix's first row; rows of other tokens stay as they are.
    // O_NORM, O_CAPTURE: columns of dst from `offset` on; O_CAPTURE copies the rows in Step::outputs.
    int offset = 0;
    // O_GATHER: the columns of dst that each rank has in its src; `add`: dst += src. `picks`: the
    // rows of the embedding that each rank has; `logits`: the rows of Step::logits, for rank 0.
    // O_MOE: the inner columns of each rank; empty: there is one rank.
    std::vector<int> widths;
    bool picks = false, logits = false;
    // O_SCATTER: column i of src goes to column `ids`[i] of dst; other columns become NO_LOGIT.
    // O_CLUSTERS: the logits of the rows of `mat` in the `used` clusters whose scores in the buffer
    // `keys` are highest; row i is of token `ids`[i].
    // Not 0: the operation runs only with Step::states of this width; -1: only without states.
    int states_width = 0;
    int ids = -1;  // a vector of whole numbers
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

// What a block of a cache group holds: keys and values, inputs of convolutions, or states.
enum GroupKind : int { G_ATTENTION, G_CONV, G_STATE };

// A cache group: layers that share one block table.
struct Group {
    GroupKind kind;
    int64_t floats;  // per layer and block; 0 for attention, whose size the engine knows
    int window;  // sliding window in positions; 0: full attention
    std::vector<int> layers;
    // Of attention: key heads, size of a head, the same rounded up to whole vectors, and bytes of
    // one KV head in a block of a layer.
    int kv_heads, head_dim, vdim;
    size_t slice_bytes;
    int64_t blocks = 0;
    Pages pages;
};

// One sequence of a step, as planned by the scheduler.
struct Sequence {
    int row0, rows;                            // its rows of the batch
    int64_t start;                             // position of the first row
    // The row at position p sees the keys before visible_end(p).
    int64_t visible_end(int64_t p) const {
        if (block == 1 || p < causal) return p + 1;
        if (!block) return p;
        return std::min((p / block + 1) * block, start + rows);
    }
    std::vector<std::vector<int32_t>> blocks;  // block table per cache group
    int64_t block = 1;                         // attention block (SeqStep.block); 1: causal, 0: no own key
    int64_t causal = 0;                        // rows before this position see no later one
};

struct Step {
    std::vector<int32_t> tokens;
    std::vector<int32_t> positions;
    std::vector<int32_t> sequence;  // index into `sequences`, per row
    std::vector<int32_t> adapter;   // per row; -1: none
    std::vector<int32_t> adapted;   // rows that have an adapter
    std::vector<Sequence> sequences;
    std::vector<int32_t> outputs;  // rows whose final hidden state is needed
    std::vector<int32_t> logits;   // indices into `outputs` whose logits are needed
    // [rows][width]: states of the target, or its own, that a draft layer reads
    std::vector<float> states;
    bool captures = false;  // whether the operations of type O_CAPTURE run
};

// Memory for `rows` quantised rows of `width` inputs, in one plane or two (QRows).
Pages quant_pages(int64_t rows, int width, bool fine, QRows& q);

struct Buffer {
    int width;
    bool has_quantised = false;  // its producer also writes the quantised form
    bool keeps_floats = true;    // with has_quantised: the float form is read, too
    Pages f, q;
    QRows qr{};
};

class Engine : ThreadPool::Job {
  public:
    // `fine`: the activations of matrix products are int12 instead of int8 (QRows). `target`: the
    // engine that a draft layer drafts for, whose threads it uses; it outlives this one. `mesh`: of a
    // rank of a tensor-parallel group.
    Engine(const Kernels& k, int threads, const Shape& shape, KvType kv_type, bool fine = false,
           Engine* target = nullptr, Mesh* mesh = nullptr);

    int add_matrix(const std::string& type, const uint8_t* data, int64_t bytes, int64_t rows,
                   int64_t k, int group);
    int share_matrix(const Engine& target, int number);  // without a copy
    void read_cache_of(const Engine& target) { cache_ = &target; }  // in place of an own KV cache
    int add_vector(const float* data, int64_t n);
    int add_rope(const double* inv_freq, int half, double factor);
    int add_buffer(int width);
    int add_lora(const std::vector<LowRank>& adapters);  // one entry per adapter
    // kv_heads and head_dim: of attention; 0: those of `shape`.
    void add_group(int window, const std::vector<int>& layers, GroupKind kind, int64_t floats,
                   int kv_heads = 0, int head_dim = 0);
    void add_op(Op op);
    void finish();  // call after the last add_op()
    int64_t block_bytes(int group) const;
    void allocate(const std::vector<int64_t>& blocks);
    void copy_block(int group, int64_t from, int64_t to);
    uint8_t* block(int group, int64_t block) const;  // block_bytes(group) bytes

    Step step;  // input of run()
    void run();
    // The largest logit of each row and sampler chunk: [rows][chunks()].
    const float* chunk_maxes() const { return (const float*)chunk_maxes_.data(); }
    int64_t chunks() const { return (shape.vocab + vb::CHUNK - 1) / vb::CHUNK; }
    const float* logits() const { return (const float*)buffers_[logits_buffer_]->f.data(); }
    const float* hidden() const { return (const float*)buffers_[hidden_buffer_]->f.data(); }
    int captured_width() const { return captured_buffer_ < 0 ? 0 : buffers_[captured_buffer_]->width; }
    int buffer_width(int i) const { return buffers_.at(i)->width; }
    const float* captured() const { return (const float*)buffers_[captured_buffer_]->f.data(); }
    void argmax(int row, int32_t* id) const;

    const Shape shape;
    const Kernels& kernels;
    int threads() const { return pool_.size(); }
    int64_t weight_bytes() const;
    ThreadPool& pool() { return pool_; }
    int group_window(int g) const { return groups_[g].window; }
    int adapters() const { return adapters_; }
    int64_t max_positions() const { return max_positions_; }
    const Packed& matrix(int i) const { return matrices_[i]->p; }

  private:
    using WorkItems = ThreadPool::WorkItems;
    // Attention work item: rows of one sequence, one KV head, tiles [tile0, tile1).
    struct AttendItem {
        int seq, row0, rows, kv, tile0, tile1, query_group;
    };
    // Rows that share a KV head; `splits` > 1: each tile is a work item of its own (split-K).
    struct QueryGroup {
        int seq, row0, rows, kv, tile0, tile1;
        int64_t partial;
        int splits;
    };
    struct Worker {  // scratch memory of one thread
        Pages tile, act, norm, q, scores, wide, o, run, low, state;
        QRows qr{};
    };
    struct ProductInput {
        QRows q;
        const float* x;
        const int32_t* idx;
    };

    void reserve(int rows);
    void plan_attention();
    void plan_phases();
    void phase(int number, WorkItems& items) override;

    // Input of a matrix product: rows of `width` (rows idx[r] if idx is given), to be normalised,
    // quantised or both.
    struct Input {
        int rows, width;
        const int32_t* idx;
        bool quant;
    };
    Input input(const Op& op) const;
    static constexpr int MAX_PER_THREAD_ROWS = 6;
    // The input is ready, or each thread normalises and quantises all rows for itself, or a phase
    // of its own does it once for all threads.
    enum InputMode { READ_DIRECTLY, PER_THREAD, SHARED };
    InputMode input_mode(const Op& op, const Input& in) const;
    int product_items(const Op& op) const;
    int part_items(const Op& op) const;
    bool blocks_within_kv_head(int width) const;
    int norm_rows_per_item(int rows) const;  // rows per work item of the S_NORM_QUANTISE phase
    void norm_quantise(const Op& op, WorkItems& items);
    ProductInput product_input(const Op& op, int thread);
    void norm_row(const Op& op, const float* x, int n, float* y) const;
    void quantise_row(const QRows& q, int64_t row, const float* x, int n) const;
    void embed(const Op& op, WorkItems& items);
    void positions(const Op& op, WorkItems& items);
    void qkv(const Op& op, WorkItems& items);
    void qkv_head(const Op& op, int part, int head, int row0, int rows, float* tile, int64_t ld);
    void heads(const Op& op, WorkItems& items);
    void attend(const Op& op, WorkItems& items);
    void attend_item(const Op& op, Worker& w, const AttendItem& item);
    void fill_tile(AttendTile& t, const Op& op, const AttendItem& item, int tile, int lo_all,
                   int hi_all) const;
    void finish_rows(const Op& op, const AttendItem& item, float* o, float* m, float* l);
    void linear(const Op& op, WorkItems& items);
    void linear_panel_run(const Op& op, const ProductInput& in, int p, int np,
                          const uint8_t* next_weights, int thread);
    const Op& part_of(const Op& op, int& item) const;
    void gateup(const Op& op, WorkItems& items);
    void norm(const Op& op, WorkItems& items);
    bool has_lora(const Op& op) const;
    const LowRank* low_rank(const Op& op, int slot, int row) const;
    float* low_row(int row, int slot);
    void lora_down(const Op& op, WorkItems& items);
    void lora_up(const Op& op, int slot, int p, int np, int r, int m, float* tile, int64_t ld,
                 int thread);
    // Channels of the convolution of O_CONV (a third of its input) or O_DELTA.
    int conv_width(const Op& op) const {
        return op.type == O_CONV ? buffers_[op.dst]->width : buffers_[op.src]->width;
    }
    int conv_items(const Op& op) const;
    float* recurrent_block(int group, int layer, int64_t block) const;
    void convolve(const Op& op, WorkItems& items);
    void delta(const Op& op, WorkItems& items);
    void delta_head(const Op& op, Worker& w, int item, const uint8_t* next);
    void delta_update(const Op& op, int64_t row, int head, float* p, float* query) const;
    float* delta_block(const Op& op, int item, int64_t index) const;
    void gated(const Op& op, WorkItems& items);
    void layer_inputs(const Op& op, WorkItems& items);
    void layer_gate(const Op& op, WorkItems& items);
    void scale(const Op& op, WorkItems& items);
    void states(const Op& op, WorkItems& items);
    void capture(const Op& op, WorkItems& items);
    void scatter(const Op& op, WorkItems& items);
    void clusters(const Op& op, WorkItems& items);
    void chunk_maxes_of(int row, const float* logits);
    int moe_up_items(const Op& op) const;
    int moe_down_items(const Op& op) const;
    void moe_plan(const Op& op);
    void moe_route(const Op& op, WorkItems& items);
    void choose_experts(const Op& op, float* logits, int experts, int32_t* ids, float* weights);
    void moe_sort(const Op& op, WorkItems& items);
    void moe_up(const Op& op, WorkItems& items);
    void moe_down(const Op& op, WorkItems& items);
    void moe_sum(const Op& op, WorkItems& items);
    void exchange(const float* own, int64_t rows, const std::vector<int>& widths, bool root);
    void exchange_buffer(const Op& op, WorkItems& items);
    int64_t gathered_rows(const Op& op) const;
    void join_pieces(const std::vector<int>& widths, int64_t row, float* to) const;
    void join_slots(const Op& op, WorkItems& items);
    void gather(const Op& op, WorkItems& items);

    int linear_panels(const Op& op) const;
    int gateup_panels(const Op& op) const;
    const uint8_t* next_product_weights(const Op& op, int thread) const;
    const uint8_t* panel(int matrix, int p) const {
        return matrices_[matrix]->p.data + (size_t)p * matrices_[matrix]->p.panel_bytes;
    }
    const Group& group_of(const Op& op) const { return groups_[layer_group_[op.layer]]; }
    uint8_t* kv_slice(int layer, int64_t block, int kv) const;
    void prefetch_kv(const Op& op, const AttendItem& item) const;

    Arena arena_;
    std::vector<std::unique_ptr<Matrix>> matrices_;
    std::vector<std::vector<float>> vectors_;
    std::vector<float> zeros_;  // vdim_ zeros, the value of an attention sink
    std::vector<Rope> ropes_;
    std::vector<std::unique_ptr<Buffer>> buffers_;
    std::vector<Group> groups_;
    const Engine* cache_ = this;  // the engine whose pages hold the keys and values
    std::vector<int> layer_group_, layer_slot_;  // of attention layers
    int conv_group_ = -1, state_group_ = -1;
    std::vector<Op> ops_;
    std::vector<std::unique_ptr<Worker>> workers_;
    Buffer shared_;              // normalised and quantised input rows (mode SHARED)
    std::vector<Pages> angles_;  // cos and sin per rope: [rows][2][half]
    std::vector<std::vector<LowRank>> lora_;  // [what Op::lora names][adapter]
    int adapters_ = 0, max_rank_ = 0;         // max_rank_: rounded up to whole panels
    Pages low_;                               // scale · A · x: [rows][3][max_rank_]
    enum Stage : int {
        S_NORM_QUANTISE, S_LORA, S_WORK, S_ROUTE, S_SORT, S_UP, S_DOWN, S_SUM, S_CONV,
        S_EXCHANGE, S_SLOTS
    };
    struct Phase {
        int op;
        Stage stage;
    };
    std::vector<Phase> phases_;     // phases of this step
    std::vector<int> item_counts_;  // work items per phase
    int max_width_ = 0, rows_ = 0;
    // Positions per sequence: the index limit, or the size of a learned position embedding.
    int64_t max_positions_ = ((int64_t)1 << 24) - 1;
    int logits_buffer_ = -1, hidden_buffer_ = -1, captured_buffer_ = -1;
    std::vector<uint8_t> finite_outputs_;  // per row of Step::outputs; uint8_t: written in parallel
    KvType kv_type_;
    bool fine_;
    int vdim_;  // the largest Group::vdim
    std::vector<std::vector<AttendItem>> attend_items_;  // per cache group
    std::vector<std::vector<QueryGroup>> query_groups_;
    std::unique_ptr<std::atomic<int>[]> splits_done_;
    size_t splits_capacity_ = 0;
    Pages partials_;
    // Mixture of experts (a slot is a row and a rank).
    Pages scores_, chunk_maxes_;
    std::vector<int32_t> slot_expert_, expert_rows_, expert_start_;
    std::vector<float> slot_weight_;
    std::unique_ptr<Buffer> slots_inner_, slots_out_, slots_local_;  // slots_local_: a rank's columns
    Mesh* const mesh_;
    std::string mesh_error_;
    Pages received_;  // pieces of the other ranks
    std::vector<const float*> pieces_;
    std::shared_ptr<ThreadPool> own_pool_;
    ThreadPool& pool_;
};

}  // namespace verbatim
