// Loading, memory and the setup of a step. The operations are in ops.cpp, attention.cpp and
// moe.cpp.
#include "engine.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <stdexcept>

namespace verbatim {

Pages::Pages(size_t bytes) : bytes_(bytes) {
    if (!bytes) return;
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) {
        data_ = nullptr;
        throw std::bad_alloc();
    }
#ifdef MADV_HUGEPAGE
    if (bytes >= (size_t)4 << 20) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
}
Pages::~Pages() {
    if (data_) munmap(data_, bytes_);
}
Pages& Pages::operator=(Pages&& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
    return *this;
}

uint8_t* Arena::allocate(size_t bytes) {
    constexpr size_t HUGE = (size_t)2 << 20, AREA = (size_t)64 << 20;
    bytes = (bytes + 256 + 63) / 64 * 64;  // 256: vector loads may read past the last value
    if (bytes > left_) {
        size_t size = (std::max(bytes, AREA) + 2 * HUGE - 1) / HUGE * HUGE;
        areas_.emplace_back(size);
        size_t skip = (HUGE - (uintptr_t)areas_.back().data() % HUGE) % HUGE;
        at_ = areas_.back().data() + skip;
        left_ = size - skip;
    }
    uint8_t* p = at_;
    at_ += bytes;
    left_ -= bytes;
    return p;
}

static size_t align64(size_t n) { return (n + 63) / 64 * 64; }

// Only whole blocks of 32 have a quantised form.
Pages quant_pages(int64_t rows, int width, bool fine, QRows& q) {
    int64_t nb = width / 32;
    rows = (rows + ROW_GROUP - 1) / ROW_GROUP * ROW_GROUP;
    size_t plane = align64(rows * width), a = fine ? 2 * plane : plane, b = align64(rows * nb * 4),
           c = align64(rows * nb * 8);
    Pages p(a + 2 * b + c + 64);
    q.q = (int8_t*)p.data();
    q.low = fine ? (int64_t)plane : 0;
    q.dx = (float*)(p.data() + a);
    q.ds = (float*)(p.data() + a + b);
    q.s16 = (int32_t*)(p.data() + a + 2 * b);
    return p;
}

Engine::Engine(const Kernels& k, int threads, const Shape& s, KvType kv_type, bool fine,
               Engine* target, Mesh* mesh)
    : shape(s), kernels(k), kv_type_(kv_type), fine_(fine), mesh_(mesh),
      own_pool_(target ? target->own_pool_ : std::make_shared<ThreadPool>(threads)),
      pool_(*own_pool_) {
    vdim_ = (s.head_dim + 15) / 16 * 16;
    zeros_.assign(vdim_, 0.0f);
    for (int i = 0; i < pool_.size(); i++) workers_.push_back(std::make_unique<Worker>());
}

int Engine::add_matrix(const std::string& type, const uint8_t* data, int64_t bytes, int64_t rows,
                       int64_t k, int group) {
    const SourceType* source = source_type(type.c_str());
    if (!source) throw std::invalid_argument("no kernel for weights of type " + type);
    if (rows < 1 || k < 1 || k % source->values || k > (1 << 24) || rows > (1 << 28) ||
        bytes != rows * (k / source->values) * source->bytes)
        throw std::invalid_argument("a " + type + " matrix of " + std::to_string(rows) + " x " +
                                    std::to_string(k) + " cannot have " + std::to_string(bytes) +
                                    " bytes");
    auto m = std::make_unique<Matrix>();
    size_t row_bytes = (size_t)(k / source->values) * source->bytes;
    // Rows come in groups (heads); each group starts a new panel.
    int64_t per = group > 0 ? group : rows, groups = rows / per, group_panels = (per + 15) / 16;
    if (groups * per != rows)
        throw std::invalid_argument("rows of a matrix are no multiple of its heads");
    Packed& p = m->p;
    p.kind = source->kind;
    p.n = (int)rows;
    p.k = (int)k;
    p.panels = (int)(groups * group_panels);
    p.panel_bytes = verbatim::panel_bytes(p.kind, (int)k);
    m->file_bytes = bytes;
    uint8_t* to = arena_.allocate((size_t)p.panels * p.panel_bytes);
    p.data = to;
    std::atomic<int64_t> broken{-1};
    pool_.parallel_for((p.panels + 7) / 8, [&](int item, int) {
        for (int j = 8 * item; j < std::min(8 * item + 8, p.panels); j++) {
            int64_t first = j / group_panels * per + j % group_panels * 16,
                    n = std::min<int64_t>(16, j / group_panels * per + per - first);
            int bad = pack_panel(*source, data + first * row_bytes, row_bytes, (int)n, (int)k,
                                 kernels.byte_bias, to + (size_t)j * p.panel_bytes);
            if (bad >= 0) broken = first + bad;
        }
    });
    if (broken >= 0)
        throw std::domain_error("row " + std::to_string(broken.load()) +
                                " holds a weight or a scale that is not a finite number; the file "
                                "is damaged: get it again");
    matrices_.push_back(std::move(m));
    return (int)matrices_.size() - 1;
}

int Engine::share_matrix(const Engine& target, int number) {
    matrices_.push_back(std::make_unique<Matrix>(*target.matrices_.at(number)));
    return (int)matrices_.size() - 1;
}

int Engine::add_vector(const float* data, int64_t n) {
    vectors_.emplace_back(data, data + n);
    return (int)vectors_.size() - 1;
}
int Engine::add_rope(const double* inv_freq, int half, double factor) {
    ropes_.push_back({half, factor, std::vector<double>(inv_freq, inv_freq + half)});
    angles_.emplace_back();
    return (int)ropes_.size() - 1;
}
int Engine::add_buffer(int width) {
    auto b = std::make_unique<Buffer>();
    b->width = width;
    buffers_.push_back(std::move(b));
    max_width_ = std::max(max_width_, width);
    return (int)buffers_.size() - 1;
}
void Engine::add_group(int window, const std::vector<int>& layers, GroupKind kind, int64_t floats,
                       int kv_heads, int head_dim) {
    int g = (int)groups_.size();
    groups_.emplace_back();
    groups_.back().kind = kind;
    groups_.back().floats = floats;
    groups_.back().window = window;
    groups_.back().layers = layers;
    groups_.back().kv_heads = kv_heads ? kv_heads : shape.kv_heads;
    const int dim = groups_.back().head_dim = head_dim ? head_dim : shape.head_dim;
    const int vdim = groups_.back().vdim = (dim + 15) / 16 * 16;
    const size_t values = (size_t)BLOCK * (dim + vdim);
    groups_.back().slice_bytes = align64(kv_type_ == KV_F16  ? values * 2
                                         : kv_type_ == KV_Q8 ? values + 2 * BLOCK * 4
                                                             : values);
    vdim_ = std::max(vdim_, vdim);
    zeros_.assign(vdim_, 0.0f);
    if (kind != G_ATTENTION) {
        (kind == G_CONV ? conv_group_ : state_group_) = g;
        return;
    }
    for (size_t i = 0; i < layers.size(); i++) {
        if ((int)layer_group_.size() <= layers[i]) {
            layer_group_.resize(layers[i] + 1, 0);
            layer_slot_.resize(layers[i] + 1, 0);
        }
        layer_group_[layers[i]] = g;
        layer_slot_[layers[i]] = (int)i;
    }
}
void Engine::add_op(Op op) {
    if (op.type == O_HEAD || op.type == O_SCATTER || op.type == O_CLUSTERS || op.logits)
        logits_buffer_ = op.dst;
    if (op.type == O_CAPTURE) captured_buffer_ = op.dst;
    if (op.type == O_NORM && op.outputs) hidden_buffer_ = op.dst;
    if (op.type == O_POSITIONS)
        max_positions_ = std::min(max_positions_, (int64_t)matrices_[op.mat[0]]->p.n);
    if (op.type == O_GATEUP || op.type == O_ATTEND) buffers_[op.dst]->has_quantised = true;
    ops_.push_back(std::move(op));
}
// Models with more weight bytes than this are read from RAM at every step.
constexpr int64_t LARGEST_CPU_CACHE = 256 << 20;
void Engine::finish() {
    for (size_t i = 1; i < ops_.size(); i++)
        for (size_t first = i; ops_[i].joined && first-- > 0;)
            if (!ops_[first].joined) {
                ops_[first].parts++;
                break;
            }
    auto reads = [](const Op& op) {
        return !op.joined && (op.type == O_QKV || op.type == O_LINEAR || op.type == O_GATEUP ||
                              op.type == O_HEAD);
    };
    for (size_t i = 0; i < ops_.size(); i++)
        for (size_t j = 1; j <= ops_.size() && ops_[i].next_product < 0; j++)
            if (reads(ops_[(i + j) % ops_.size()]))
                ops_[i].next_product = (int)((i + j) % ops_.size());
    for (auto& m : matrices_) m->p.exceeds_cache = weight_bytes() > LARGEST_CPU_CACHE;
    for (const Op& op : ops_)  // the whole row is quantised, not a rank's piece of it
        if (op.type == O_GATHER) buffers_[op.src]->has_quantised = false;
    for (auto& b : buffers_) b->keeps_floats = !b->has_quantised;
    for (const Op& op : ops_) {
        if (has_lora(op)) buffers_[op.src]->keeps_floats = true;  // A reads float rows
        if (op.src < 0 || !buffers_[op.src]->has_quantised) continue;
        bool quant = op.norm < 0 && op.mat[0] >= 0 &&
                     KIND[matrices_[op.mat[0]]->p.kind].quantised &&
                     blocks_within_kv_head(buffers_[op.src]->width);
        buffers_[op.src]->keeps_floats |= op.type != O_LINEAR || !quant;
    }
    const bool samples = !mesh_ || mesh_->rank() == 0;  // another rank of a pipeline has no head
    if (samples && (logits_buffer_ < 0 || hidden_buffer_ < 0))
        throw std::invalid_argument("the program has no head");
}

int64_t Engine::weight_bytes() const {
    int64_t n = 0;
    for (auto& m : matrices_) n += m->file_bytes;
    return n;
}

int64_t Engine::block_bytes(int group) const {
    const Group& g = groups_[group];
    const int64_t layer = g.floats ? g.floats * 4 : (int64_t)g.slice_bytes * g.kv_heads;
    return layer * (int64_t)g.layers.size();
}

void Engine::allocate(const std::vector<int64_t>& blocks) {
    for (size_t g = 0; g < groups_.size(); g++) {
        groups_[g].blocks = blocks[g];
        groups_[g].pages = Pages((size_t)blocks[g] * block_bytes((int)g) + 256);
    }
}

// The K and V of one KV head in one cache block and layer: K [head_dim][16], V [16][vdim], then
// (q8) the scales of K and V. A block holds all layers of its group, so that a short sequence
// touches little memory.
uint8_t* Engine::kv_slice(int layer, int64_t block, int kv) const {
    const Group& g = groups_[layer_group_[layer]];
    return cache_->groups_[layer_group_[layer]].pages.data() +
           ((block * (int64_t)g.layers.size() + layer_slot_[layer]) * g.kv_heads + kv) *
               g.slice_bytes;
}

void Engine::copy_block(int group, int64_t from, int64_t to) {
    std::memcpy(block(group, to), block(group, from), (size_t)block_bytes(group));
}

uint8_t* Engine::block(int group, int64_t block) const {
    return groups_[group].pages.data() + block * block_bytes(group);
}

void Engine::reserve(int rows) {
    if (rows <= rows_) return;
    int want = std::max(rows, std::min(2 * rows_, 256));
    for (auto& b : buffers_) {
        b->f = Pages((size_t)want * b->width * 4 + 256);
        if (b->has_quantised) b->q = quant_pages(want, b->width, fine_, b->qr);
    }
    shared_.f = Pages((size_t)want * max_width_ * 4 + 256);
    shared_.q = quant_pages(want, max_width_, fine_, shared_.qr);
    if (max_rank_) low_ = Pages((size_t)want * 3 * max_rank_ * 4 + 256);
    chunk_maxes_ = Pages((size_t)want * chunks() * 4 + 256);
    for (size_t i = 0; i < ropes_.size(); i++)
        angles_[i] = Pages((size_t)want * 2 * ropes_[i].half * 4 + 256);
    int group = std::max(shape.heads / shape.kv_heads, MAX_QUERIES);
    for (auto& w : workers_) {
        if (w->tile.size()) continue;
        w->tile = Pages((size_t)2 * MM_ROWS * (std::max(vdim_, 64) + 64) * 4 + 256);
        w->act = Pages((size_t)MM_ROWS * 64 * 4 + 256);
        w->norm = Pages((size_t)MAX_PER_THREAD_ROWS * max_width_ * 4 + 256);
        w->q = quant_pages(MAX_PER_THREAD_ROWS, max_width_, fine_, w->qr);
        w->low = Pages((size_t)(std::max(vdim_, 64) + 16) * 4 + 256);
        w->scores = Pages((size_t)group * TILE * 4 + 256);
        w->wide = Pages((size_t)WIDEN_BLOCKS * BLOCK * vdim_ * 4 + 256);
        w->o = Pages((size_t)group * vdim_ * 4 + 256);
        w->run = Pages((size_t)group * (vdim_ + 2) * 4 + 256);
    }
    rows_ = want;
}

void Engine::run() {
    int rows = (int)step.tokens.size();
    reserve(rows);
    for (auto& b : buffers_) b->qr.group = row_group(rows);
    plan_attention();
    plan_phases();
    pool_.run(*this, item_counts_);
    if (!mesh_error_.empty()) throw std::runtime_error(mesh_error_);
}

void Engine::argmax(int row, int32_t* id) const {
    const float* x = logits() + (int64_t)row * shape.vocab;
    int best = 0;
    for (int i = 1; i < shape.vocab; i++)
        if (x[i] > x[best]) best = i;
    *id = best;
}

}  // namespace verbatim
