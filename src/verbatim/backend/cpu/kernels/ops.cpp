// The operations of the recorded program. Each has one or more phases, whose work items the pool
// threads claim. Which thread computes an item does not change its bits.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "e4m3.h"
#include "engine.h"

namespace verbatim {

void Engine::norm_row(const Op& op, const float* x, int n, float* y) const {
    const float* w = vectors_[op.norm].data();
    if (shape.layer_norm)
        kernels.layer_norm(x, w, op.norm_bias >= 0 ? vectors_[op.norm_bias].data() : nullptr, n,
                           shape.eps, y);
    else kernels.rms_norm(x, w, n, shape.eps, y);
}

void Engine::quantise_row(const QRows& q, int64_t row, const float* x, int n) const {
    kernels.quantise(x, n, q.at_block(q.first_block(row, n / 32)));
}

// Whether each quantised block of a row has a single writer. Not so for the attention output when a
// block of 32 spans two KV heads, which different threads write.
bool Engine::blocks_within_kv_head(int width) const {
    for (const Group& g : groups_)
        if (g.kind == G_ATTENTION && width == shape.heads * g.head_dim &&
            shape.heads / g.kv_heads * g.head_dim % 32)
            return false;
    return true;
}

Engine::Input Engine::input(const Op& op) const {
    bool quant = false;
    for (int part = 0; part < op.parts; part++)
        for (int m : (&op)[part].mat)
            if (m >= 0) quant |= KIND[matrices_[m]->p.kind].quantised;
    for (int part = 0; part < 2 && !op.experts[part].empty(); part++)
        quant |= KIND[matrices_[op.experts[part][0]]->p.kind].quantised;
    if (op.type == O_HEAD)
        return {(int)step.logits.size(), shape.hidden, step.logits.data(), quant};
    const bool own = op.type == O_LINEAR || op.type == O_QKV;
    int width = own ? matrices_[op.mat[op.mat[0] < 0]]->p.k : shape.hidden;
    return {(int)step.tokens.size(), width, nullptr, quant};
}

// For a few rows, repeating the norm on every thread is cheaper than a phase of its own.
Engine::InputMode Engine::input_mode(const Op& op, const Input& in) const {
    if (op.norm < 0 && buffers_[op.src]->has_quantised && !in.idx &&
        (!in.quant || blocks_within_kv_head(in.width)))
        return READ_DIRECTLY;
    if (op.norm < 0 && !in.quant) return READ_DIRECTLY;
    return in.rows <= 2 || (in.rows <= MAX_PER_THREAD_ROWS && in.rows * in.width <= 4096)
               ? PER_THREAD
               : SHARED;
}

// Two work items per thread, of at most one row group.
int Engine::norm_rows_per_item(int rows) const {
    return std::clamp(rows / (2 * pool_.size()), 1, ROW_GROUP);
}

void Engine::norm_quantise(const Op& op, WorkItems& items) {
    const Input in = input(op);
    const float* x = (const float*)buffers_[op.src]->f.data();
    QRows q = shared_.qr;
    q.group = row_group(in.rows);
    const int per = norm_rows_per_item(in.rows);
    for (int u; (u = items.next()) >= 0;)
        for (int r = u * per; r < std::min(u * per + per, in.rows); r++) {
            const float* row = x + (int64_t)(in.idx ? in.idx[r] : r) * in.width;
            float* y = (float*)shared_.f.data() + (int64_t)r * in.width;
            if (op.norm >= 0) norm_row(op, row, in.width, y);
            else std::memcpy(y, row, (size_t)in.width * 4);
            if (in.quant) quantise_row(q, r, y, in.width);
        }
}

Engine::ProductInput Engine::product_input(const Op& op, int thread) {
    const Input in = input(op);
    const Buffer& src = *buffers_[op.src];
    const float* x = (const float*)src.f.data();
    QRows q = shared_.qr;
    q.group = row_group(in.rows);
    switch (input_mode(op, in)) {
        case READ_DIRECTLY: return {src.qr, x, in.idx};
        case SHARED: return {q, (const float*)shared_.f.data(), nullptr};
        case PER_THREAD: break;
    }
    Worker& w = *workers_[thread];
    for (int r = 0; r < in.rows; r++) {
        const float* row = x + (int64_t)(in.idx ? in.idx[r] : r) * in.width;
        float* y = (float*)w.norm.data() + (int64_t)r * in.width;
        if (op.norm >= 0) norm_row(op, row, in.width, y);
        if (in.quant) quantise_row(w.qr, r, op.norm >= 0 ? y : row, in.width);
    }
    return {w.qr, op.norm >= 0 ? (const float*)w.norm.data() : x, nullptr};
}

// A rank of a pipeline without the embedding has no matrix, and needs the angles.
void Engine::embed(const Op& op, WorkItems& items) {
    const Packed* w = op.mat[0] < 0 ? nullptr : &matrices_[op.mat[0]]->p;
    const int n = w ? w->k : shape.hidden;
    float* x = (float*)buffers_[op.dst]->f.data();
    for (int r; (r = items.next()) >= 0;) {
        float* y = x + (int64_t)r * n;
        const int row = step.tokens[r] - op.offset;
        if (w && row >= 0 && row < w->n) {
            unpack_row(*w, row, kernels.byte_bias, y);
            if (op.scale != 1.0f)
                for (int i = 0; i < n; i++) y[i] *= op.scale;
        }
        for (size_t k = 0; k < ropes_.size(); k++) {
            float* a = (float*)angles_[k].data() + (int64_t)r * 2 * ropes_[k].half;
            rope_angles(step.positions[r], ropes_[k].inv_freq.data(), ropes_[k].half,
                        ropes_[k].factor, a, a + ropes_[k].half);
        }
    }
}

void Engine::states(const Op& op, WorkItems& items) {
    const size_t n = buffers_[op.dst]->width;
    float* to = (float*)buffers_[op.dst]->f.data();
    for (int r; (r = items.next()) >= 0;)
        std::memcpy(to + r * n, step.states.data() + r * n, n * 4);
}

void Engine::capture(const Op& op, WorkItems& items) {
    const size_t n = buffers_[op.src]->width, all = buffers_[op.dst]->width;
    for (int r; (r = items.next()) >= 0;)
        std::memcpy((float*)buffers_[op.dst]->f.data() + r * all + op.offset,
                    (const float*)buffers_[op.src]->f.data() + step.outputs[r] * n, n * 4);
}

// The logit of a token that is not in the vocabulary of a draft layer.
constexpr float NO_LOGIT = -1e30f;
void Engine::scatter(const Op& op, WorkItems& items) {
    const std::vector<float>& ids = vectors_[op.ids];
    for (int r; (r = items.next()) >= 0;) {
        const float* from = (const float*)buffers_[op.src]->f.data() + r * ids.size();
        float* to = (float*)buffers_[op.dst]->f.data() + (int64_t)r * shape.vocab;
        std::fill(to, to + shape.vocab, NO_LOGIT);
        for (size_t i = 0; i < ids.size(); i++) to[(int64_t)ids[i]] = from[i];
        chunk_maxes_of(r, to);
    }
}

void Engine::chunk_maxes_of(int row, const float* logits) {
    for (int64_t c = 0; c < chunks(); c++)
        ((float*)chunk_maxes_.data())[row * chunks() + c] = kernels.max_or_nan(
            logits + c * vb::CHUNK, (int)std::min<int64_t>(vb::CHUNK, shape.vocab - c * vb::CHUNK));
}

// A work item is one row of logits. Each cluster starts a new panel; ties of scores go to the lower
// index.
void Engine::clusters(const Op& op, WorkItems& items) {
    const Packed& w = matrices_[op.mat[0]]->p;
    const std::vector<float>& ids = vectors_[op.ids];
    const int count = buffers_[op.keys]->width, size = w.n / count, per = w.panels / count;
    Worker& own = *workers_[items.thread];
    float* tile = (float*)own.tile.data();
    std::vector<int> best(count);
    for (int r; (r = items.next()) >= 0;) {
        const float* x = (const float*)buffers_[op.src]->f.data() + (int64_t)step.logits[r] * w.k;
        const float* scores = (const float*)buffers_[op.keys]->f.data() + step.logits[r] * count;
        float* to = (float*)buffers_[op.dst]->f.data() + (int64_t)r * shape.vocab;
        std::fill(to, to + shape.vocab, NO_LOGIT);
        std::iota(best.begin(), best.end(), 0);
        std::partial_sort(best.begin(), best.begin() + op.used, best.end(), [&](int a, int b) {
            return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
        });
        if (KIND[w.kind].quantised) quantise_row(own.qr, 0, x, w.k);
        for (int i = 0; i < op.used; i++)
            for (int p = 0; p < per; p++) {
                kernels.mm[w.kind](w, best[i] * per + p, 1, own.qr, x, nullptr, 1, tile, 16,
                                   nullptr);
                for (int c = 16 * p; c < std::min(16 * p + 16, size); c++)
                    to[(int64_t)ids[(size_t)best[i] * size + c]] = tile[c - 16 * p];
            }
        chunk_maxes_of(r, to);
    }
}

void Engine::positions(const Op& op, WorkItems& items) {
    const Packed& w = matrices_[op.mat[0]]->p;
    int n = shape.hidden;
    float* x = (float*)buffers_[op.dst]->f.data();
    for (int r; (r = items.next()) >= 0;) {
        float* y = (float*)shared_.f.data() + (int64_t)r * n;
        unpack_row(w, step.positions[r], kernels.byte_bias, y);
        kernels.add_rows(x + (int64_t)r * n, 0, y, 0, 1, n);
    }
}

// Bias, norm and rotary embedding of one head of q, k or v, then the write to the query buffer or
// to the KV cache.
void Engine::qkv_head(const Op& op, int part, int head, int row0, int rows, float* tile,
                      int64_t ld) {
    const int hd = group_of(op).head_dim, vdim = group_of(op).vdim;
    if (op.bias[part] >= 0)
        kernels.add_rows(tile, ld, vectors_[op.bias[part]].data() + (int64_t)head * hd, 0, rows,
                         hd);
    for (int r = 0; r < rows; r++) {
        float* x = tile + r * ld;
        int row = row0 + r, norm = part == 0 ? op.qnorm : part == 1 ? op.knorm : op.vnorm;
        if (norm >= 0 && !op.norm_last)
            kernels.rms_norm(x, vectors_[norm].data(), hd, shape.eps, x);
        if (part < 2 && op.rope >= 0) {
            int half = ropes_[op.rope].half;
            const float* a = (const float*)angles_[op.rope].data() + (int64_t)row * 2 * half;
            kernels.rope(x, a, a + half, half);
        }
        if (norm >= 0 && op.norm_last)
            kernels.rms_norm(x, vectors_[norm].data(), hd, shape.eps, x);
        if (part == 0) {
            if (op.query_scales >= 0) {
                const std::vector<float>& scales = vectors_[op.query_scales];
                const size_t at = (size_t)(step.positions[row] / op.query_length);
                const float s = scales[std::min(at, scales.size() - 1)];
                for (int d = 0; d < hd; d++) x[d] *= s;
            }
            float* q =
                (float*)buffers_[op.dst]->f.data() + ((int64_t)row * shape.heads + head) * hd;
            if (q != x) std::memcpy(q, x, (size_t)hd * 4);
            continue;
        }
        const Sequence& seq = step.sequences[step.sequence[row]];
        int64_t pos = step.positions[row];
        int slot = (int)(pos % BLOCK);
        uint8_t* c = kv_slice(op.layer, seq.blocks[layer_group_[op.layer]][pos / BLOCK], head);
        if (kv_type_ != KV_F16) {
            uint8_t h[1024];
            uint8_t* to = part == 2 ? c + (size_t)hd * BLOCK + (size_t)slot * vdim : h;
            if (kv_type_ == KV_Q8) {
                float* scales = (float*)(c + (size_t)(hd + vdim) * BLOCK);
                kernels.store_q8(x, hd, (int8_t*)to, scales + (part == 2 ? BLOCK : 0) + slot);
            } else store_e4m3(x, hd, to);
            if (part == 1)
                for (int d = 0; d < hd; d++) c[d * BLOCK + slot] = h[d];
        } else {
            uint16_t h[1024];
            if (part == 2)
                kernels.store_half(x, hd, (uint16_t*)c + (size_t)hd * BLOCK + (size_t)slot * vdim);
            else {
                kernels.store_half(x, hd, h);
                for (int d = 0; d < hd; d++) ((uint16_t*)c)[d * BLOCK + slot] = h[d];
            }
        }
    }
}

void Engine::qkv(const Op& op, WorkItems& items) {
    int rows = (int)step.tokens.size(), n = input(op).width;
    ProductInput in = product_input(op, items.thread);
    float* tile = (float*)workers_[items.thread]->tile.data();
    const int kv_heads = group_of(op).kv_heads, vdim = group_of(op).vdim;
    int heads[3] = {op.mat[0] < 0 ? 0 : shape.heads, kv_heads, kv_heads}, per = vdim / 16;
    auto locate = [&](int u, int& part, int& head) {
        part = u < heads[0] ? 0 : u < heads[0] + heads[1] ? 1 : 2;
        head = u - (part > 0 ? heads[0] : 0) - (part > 1 ? heads[1] : 0);
    };
    for (int u = items.next(), v; u >= 0; u = v) {
        int part, head, part2, head2;
        locate(u, part, head);
        v = items.next();
        locate(v, part2, head2);
        const Packed& w = matrices_[op.mat[part]]->p;
        const uint8_t* next_weights =
            v >= 0 ? panel(op.mat[part2], head2 * per) : next_product_weights(op, items.thread);
        for (int r = 0; r < rows; r += MM_ROWS) {
            int m = std::min(MM_ROWS, rows - r);
            QRows q = in.q.at_block(in.q.first_block(r, n / 32));
            kernels.mm[w.kind](w, head * per, per, q, in.x + (int64_t)r * n, nullptr, m, tile,
                               vdim, r + MM_ROWS < rows ? nullptr : next_weights);
            lora_up(op, part, head * per, per, r, m, tile, vdim, items.thread);
            qkv_head(op, part, head, r, m, tile, vdim);
        }
    }
}

// Queries, keys and values whose norm spans all heads: the projections are in three buffers, and a
// work item is one row. Queries are changed in place.
void Engine::heads(const Op& op, WorkItems& items) {
    const Group& group = group_of(op);
    const int counts[3] = {shape.heads, group.kv_heads, group.kv_heads};
    const int buffers[3] = {op.dst, op.keys, op.values}, norms[3] = {op.qnorm, op.knorm, -1};
    Op head_op = op;
    head_op.qnorm = head_op.knorm = -1;
    for (int r; (r = items.next()) >= 0;)
        for (int part = 0; part < 3; part++) {
            const int width = counts[part] * group.head_dim;
            float* x = (float*)buffers_[buffers[part]]->f.data() + (int64_t)r * width;
            if (norms[part] >= 0)
                kernels.rms_norm(x, vectors_[norms[part]].data(), width, shape.eps, x);
            for (int h = 0; h < counts[part]; h++)
                qkv_head(head_op, part, h, r, 1, x + (int64_t)h * group.head_dim, 0);
        }
}

// MAX_PANELS: panels per product call. With many rows, one item per call is enough work, and AMX
// tiles want four panels. With few rows, small items let the threads finish together; a thread
// computes consecutive items in one call.
constexpr int MAX_PANELS = 4, FEW_ROWS = 8;
static_assert(16 * MAX_PANELS == vb::CHUNK);
int Engine::linear_panels(const Op& op) const {
    if (op.type == O_HEAD) return MAX_PANELS;  // one sampler chunk
    return input(op).rows <= FEW_ROWS
               ? 1
               : std::clamp(matrices_[op.mat[0]]->p.panels / (pool_.size() * 6), 1, MAX_PANELS);
}
int Engine::gateup_panels(const Op& op) const {
    return step.tokens.size() > FEW_ROWS && matrices_[op.mat[1]]->p.panels >= 16 * pool_.size()
               ? MAX_PANELS
               : 2;
}

int Engine::part_items(const Op& op) const {
    int per = op.type == O_GATEUP ? gateup_panels(op) : linear_panels(op);
    return (matrices_[op.mat[op.type == O_GATEUP]]->p.panels + per - 1) / per;
}
int Engine::product_items(const Op& op) const {
    if (op.type == O_QKV)  // without keys and values: the layer reads those of another
        return (op.mat[0] < 0 ? 0 : shape.heads) + (op.mat[1] < 0 ? 0 : 2 * group_of(op).kv_heads);
    int items = 0;
    for (int part = 0; part < op.parts; part++) items += part_items((&op)[part]);
    return items;
}
// The joined operation with this item, which becomes its number within that operation.
const Op& Engine::part_of(const Op& op, int& item) const {
    const Op* part = &op;
    for (int n; item >= (n = part_items(*part)); part++) item -= n;
    return *part;
}

// The weights that this thread reads first in the next product, to be prefetched.
const uint8_t* Engine::next_product_weights(const Op& op, int thread) const {
    const Op& n = ops_[op.next_product];
    int item = pool_.first_item(thread, product_items(n));
    if (item < 0) return nullptr;
    if (n.type == O_QKV)
        return n.mat[0] >= 0 && item < shape.heads
                   ? panel(n.mat[0], item * (group_of(n).vdim / 16))
                   : nullptr;
    if (n.type == O_GATEUP) return panel(n.mat[1], item * gateup_panels(n));
    const Op& part = part_of(n, item);
    return panel(part.mat[0], item * linear_panels(part));
}

void Engine::linear(const Op& op, WorkItems& items) {
    const int thread = items.thread, run = MAX_PANELS / linear_panels(op);
    const ProductInput in = product_input(op, thread);
    auto weights_of = [&](int item) {
        const Op& part = part_of(op, item);
        return panel(part.mat[0], item * linear_panels(part));
    };
    for (int count, more, u = items.next(run, count), v; u >= 0; u = v, count = more) {
        v = items.next(run, more);
        while (count > 0) {  // a run of items may span joined operations
            int item = u;
            const Op& part = part_of(op, item);
            const int per = linear_panels(part),
                      n = std::min({count, MAX_PANELS / per, part_items(part) - item});
            u += n;
            count -= n;
            const uint8_t* next_weights = count > 0 ? weights_of(u)
                                          : v >= 0  ? weights_of(v)
                                                    : next_product_weights(op, thread);
            const int p = item * per, panels = matrices_[part.mat[0]]->p.panels;
            linear_panel_run(part, in, p, std::min(n * per, panels - p), next_weights, thread);
        }
    }
}

// Panels p to p + np - 1 of a product, at most MAX_PANELS, for all rows.
void Engine::linear_panel_run(const Op& op, const ProductInput& in, int p, int np,
                              const uint8_t* next_weights, int thread) {
    const Packed& w = matrices_[op.mat[0]]->p;
    const int rows = input(op).rows, cols = std::min(16 * np, w.n - 16 * p);
    float* tile = (float*)workers_[thread]->tile.data();
    float* y = (float*)buffers_[op.dst]->f.data();
    const float* bias = op.bias[0] >= 0 ? vectors_[op.bias[0]].data() : nullptr;
    for (int r = 0; r < rows; r += MM_ROWS) {
        int m = std::min(MM_ROWS, rows - r);
        QRows q = in.q.at_block(in.q.first_block(r, w.k / 32));
        int32_t rebased[MM_ROWS];
        if (in.idx)
            for (int i = 0; i < m; i++) rebased[i] = in.idx[r + i];
        kernels.mm[w.kind](w, p, np, q, in.idx ? in.x : in.x + (int64_t)r * w.k,
                           in.idx ? rebased : nullptr, m, tile, 16 * MAX_PANELS,
                           r + MM_ROWS < rows ? nullptr : next_weights);
        lora_up(op, 0, p, np, r, m, tile, 16 * MAX_PANELS, thread);
        if (bias) kernels.add_rows(tile, 16 * MAX_PANELS, bias + 16 * p, 0, m, cols);
        if (op.scale != 1.0f)
            for (int i = 0; i < m; i++)
                for (int c = 0; c < cols; c++) tile[i * 16 * MAX_PANELS + c] *= op.scale;
        float* o = y + (int64_t)r * w.n + 16 * p;
        if (op.add) kernels.add_rows(o, w.n, tile, 16 * MAX_PANELS, m, cols);
        else
            for (int i = 0; i < m; i++)
                std::memcpy(o + (int64_t)i * w.n, tile + (int64_t)i * 16 * MAX_PANELS,
                            (size_t)cols * 4);
        if (op.softcap != 0.0f)
            for (int i = 0; i < m; i++) kernels.softcap(o + (int64_t)i * w.n, cols, op.softcap);
        if (op.type == O_HEAD)
            for (int i = 0; i < m; i++) {
                float* logits = o + (int64_t)i * w.n;
                // Quantisation turns NaN into zeros; the sampler must see a broken row.
                if (!finite_outputs_[step.logits[r + i]])
                    std::fill(logits, logits + cols, __builtin_nanf(""));
                ((float*)chunk_maxes_.data())[(r + i) * chunks() + p / MAX_PANELS] =
                    kernels.max_or_nan(logits, cols);
            }
    }
}

// act(gate) * up in multiples of 32 outputs, so that the block can be quantised where it is
// produced.
void Engine::gateup(const Op& op, WorkItems& items) {
    const int rows = (int)step.tokens.size(), thread = items.thread, per = gateup_panels(op);
    bool gated = op.mat[0] >= 0;
    const Packed& up = matrices_[op.mat[1]]->p;
    const Packed* gate = gated ? &matrices_[op.mat[0]]->p : nullptr;
    const int n = up.n;
    ProductInput in = product_input(op, thread);
    float *tu = (float*)workers_[thread]->tile.data(), *tg = tu + MM_ROWS * 64,
          *y = (float*)workers_[thread]->act.data();
    Buffer& dst = *buffers_[op.dst];
    const bool out_quant = dst.has_quantised && n % 32 == 0;
    for (int count, more, u = items.next(MAX_PANELS / per, count), v; u >= 0; u = v, count = more) {
        v = items.next(MAX_PANELS / per, more);
        const uint8_t* next_weights =
            v >= 0 ? panel(op.mat[1], v * per) : next_product_weights(op, thread);
        int p = u * per, np = std::min(count * per, up.panels - p), width = 16 * np,
            cols = std::min(width, n - 16 * p);
        for (int r = 0; r < rows; r += MM_ROWS) {
            int m = std::min(MM_ROWS, rows - r);
            QRows q = in.q.at_block(in.q.first_block(r, up.k / 32));
            const float* x = in.x + (int64_t)r * up.k;
            const bool last = r + MM_ROWS >= rows;
            kernels.mm[up.kind](up, p, np, q, x, nullptr, m, tu, width,
                                !last   ? nullptr
                                : gated ? panel(op.mat[0], p)
                                        : next_weights);
            lora_up(op, 1, p, np, r, m, tu, width, thread);
            if (op.bias[1] >= 0)
                kernels.add_rows(tu, width, vectors_[op.bias[1]].data() + 16 * p, 0, m, cols);
            if (gated) {
                kernels.mm[gate->kind](*gate, p, np, q, x, nullptr, m, tg, width,
                                       last ? next_weights : nullptr);
                lora_up(op, 0, p, np, r, m, tg, width, thread);
                if (op.bias[0] >= 0)
                    kernels.add_rows(tg, width, vectors_[op.bias[0]].data() + 16 * p, 0, m, cols);
            }
            kernels.gate(shape.activation, gated ? tg : nullptr, tu, width * m, y);
            for (int i = 0; i < m; i++) {
                if (out_quant)
                    kernels.quantise(y + width * i, cols,
                                     dst.qr.at_block(dst.qr.first_block(r + i, n / 32) +
                                                     (int64_t)p / 2 * dst.qr.group));
                if (dst.keeps_floats)
                    std::memcpy((float*)dst.f.data() + (int64_t)(r + i) * n + 16 * p, y + width * i,
                                (size_t)cols * 4);
            }
        }
    }
}

// Whether all values are finite: not all exponent bits are set.
static bool all_finite(const float* x, int n) {
    bool broken = false;
    for (int i = 0; i < n; i++) broken |= (float_bits(x[i]) & 0x7f800000u) == 0x7f800000u;
    return !broken;
}

// dst = norm(src), for all rows or the output rows; or dst += norm(src).
void Engine::norm(const Op& op, WorkItems& items) {
    bool add = op.type == O_NORMADD;
    int n = buffers_[op.src]->width;
    const int64_t stride = buffers_[op.dst]->width;
    const float* x = (const float*)buffers_[op.src]->f.data();
    float* y = (float*)buffers_[op.dst]->f.data();
    for (int r; (r = items.next()) >= 0;) {
        const float* row = x + (int64_t)(op.outputs ? step.outputs[r] : r) * n;
        if (!add) {
            float* to = y + r * stride + op.offset;
            if (op.norm >= 0) norm_row(op, row, n, to);
            else std::memcpy(to, row, (size_t)n * 4);
            if (op.outputs) finite_outputs_[r] = all_finite(y + (int64_t)r * n, n);
            continue;
        }
        float* t = (float*)shared_.f.data() + (int64_t)r * n;
        norm_row(op, row, n, t);
        kernels.add_rows(y + (int64_t)r * n, 0, t, 0, 1, n);
    }
}

void Engine::layer_inputs(const Op& op, WorkItems& items) {
    const Packed& w = matrices_[op.mat[0]]->p;
    const std::vector<float>& norm = vectors_[op.norm];
    const int n = w.k, part = (int)norm.size();
    for (int r; (r = items.next()) >= 0;) {
        float* y = (float*)buffers_[op.dst]->f.data() + (int64_t)r * n;
        float* e = (float*)shared_.f.data() + (int64_t)r * n;
        unpack_row(w, step.tokens[r], kernels.byte_bias, e);
        for (int i = 0; i < n; i += part)
            kernels.rms_norm(y + i, norm.data(), part, shape.eps, y + i);
        for (int i = 0; i < n; i++) {
            e[i] *= op.scale;
            y[i] = (y[i] + e[i]) * 0.70710678118654752f;
        }
    }
}

void Engine::layer_gate(const Op& op, WorkItems& items) {
    const int n = buffers_[op.dst]->width, all = buffers_[op.keys]->width;
    for (int r; (r = items.next()) >= 0;)
        kernels.gate(shape.activation, (const float*)buffers_[op.src]->f.data() + (int64_t)r * n,
                     (const float*)buffers_[op.keys]->f.data() + (int64_t)r * all + op.offset, n,
                     (float*)buffers_[op.dst]->f.data() + (int64_t)r * n);
}

void Engine::scale(const Op& op, WorkItems& items) {
    const int n = buffers_[op.dst]->width;
    const float factor = vectors_[op.norm][0];
    for (int r; (r = items.next()) >= 0;) {
        float* x = (float*)buffers_[op.dst]->f.data() + (int64_t)r * n;
        for (int i = 0; i < n; i++) x[i] *= factor;
    }
}

// Lists the phases of this step and the number of work items of each.
void Engine::plan_phases() {
    phases_.clear();
    item_counts_.clear();
    finite_outputs_.assign(step.outputs.size(), 1);
    auto add = [&](int op, Stage stage, int items) {
        phases_.push_back({op, stage});
        item_counts_.push_back(items);
    };
    const int rows = (int)step.tokens.size();
    for (int i = 0; i < (int)ops_.size(); i++) {
        const Op& op = ops_[i];
        if (op.states_width < 0 ? !step.states.empty()
                                : op.states_width && op.states_width * (size_t)rows != step.states.size())
            continue;
        switch (op.type) {
            case O_EMBED:
            case O_POSITIONS:
            case O_HEADS:
            case O_LAYER_INPUTS:
            case O_LAYER_GATE:
            case O_SCALE:
            case O_STATES:
            case O_NORMADD: add(i, S_WORK, rows); break;
            case O_GATED: add(i, S_WORK, rows); break;
            case O_GATHER:
                add(i, S_EXCHANGE, gathered_rows(op) ? 1 : 0);
                add(i, S_WORK, (int)gathered_rows(op));
                break;
            case O_CONV: add(i, S_CONV, conv_items(op)); break;
            case O_DELTA:
                add(i, S_CONV, conv_items(op));
                add(i, S_WORK, (int)step.sequences.size() * op.value_heads);
                break;
            case O_NORM: add(i, S_WORK, op.outputs ? (int)step.outputs.size() : rows); break;
            case O_CAPTURE:
                if (step.captures) add(i, S_WORK, (int)step.outputs.size());
                break;
            case O_SCATTER:
            case O_CLUSTERS: add(i, S_WORK, (int)step.logits.size()); break;
            case O_ATTEND: add(i, S_WORK, (int)attend_items_[layer_group_[op.layer]].size()); break;
            case O_QKV:
            case O_LINEAR:
            case O_GATEUP:
            case O_HEAD:
            case O_MOE: {
                const Input in = input(op);
                if (input_mode(op, in) == SHARED)
                    add(i, S_NORM_QUANTISE,
                        (in.rows + norm_rows_per_item(in.rows) - 1) / norm_rows_per_item(in.rows));
                if (!step.adapted.empty() && has_lora(op))
                    add(i, S_LORA, (int)step.adapted.size());
                if (op.type != O_MOE) {
                    add(i, S_WORK, in.rows ? product_items(op) : 0);
                    i += op.parts - 1;
                    break;
                }
                moe_plan(op);
                const int experts = matrices_[op.mat[0]]->p.n;
                add(i, S_ROUTE, (rows + MM_ROWS - 1) / MM_ROWS);
                add(i, S_SORT, 1);
                add(i, S_UP, experts * moe_up_items(op));
                if (!op.widths.empty()) {
                    add(i, S_EXCHANGE, 1);
                    add(i, S_SLOTS, rows * op.used);
                }
                add(i, S_DOWN, experts * moe_down_items(op));
                add(i, S_SUM, rows);
            }
        }
    }
}

void Engine::phase(int number, WorkItems& items) {
    const Op& op = ops_[phases_[number].op];
    switch (phases_[number].stage) {
        case S_NORM_QUANTISE: return norm_quantise(op, items);
        case S_LORA: return lora_down(op, items);
        case S_ROUTE: return moe_route(op, items);
        case S_SORT: return moe_sort(op, items);
        case S_UP: return moe_up(op, items);
        case S_DOWN: return moe_down(op, items);
        case S_SUM: return moe_sum(op, items);
        case S_CONV: return convolve(op, items);
        case S_EXCHANGE: return exchange_buffer(op, items);
        case S_SLOTS: return join_slots(op, items);
        case S_WORK: break;
    }
    switch (op.type) {
        case O_EMBED: return embed(op, items);
        case O_POSITIONS: return positions(op, items);
        case O_QKV: return qkv(op, items);
        case O_HEADS: return heads(op, items);
        case O_ATTEND: return attend(op, items);
        case O_LINEAR:
        case O_HEAD: return linear(op, items);
        case O_GATEUP: return gateup(op, items);
        case O_NORM:
        case O_NORMADD: return norm(op, items);
        case O_DELTA: return delta(op, items);
        case O_GATED: return gated(op, items);
        case O_LAYER_INPUTS: return layer_inputs(op, items);
        case O_LAYER_GATE: return layer_gate(op, items);
        case O_SCALE: return scale(op, items);
        case O_STATES: return states(op, items);
        case O_GATHER: return gather(op, items);
        case O_CAPTURE: return capture(op, items);
        case O_SCATTER: return scatter(op, items);
        case O_CLUSTERS: return clusters(op, items);
        case O_CONV:
        case O_MOE: return;
    }
}

}  // namespace verbatim
