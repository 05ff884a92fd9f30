// The operations of the recorded program. Every thread of the team runs execute(); a phase is a list of units that the threads take from a
// counter, and ends with a barrier. Who computes a unit never changes what it is.
#include <algorithm>
#include <cstring>

#include "engine.h"

namespace verbatim {

void Engine::norm_row(const Op& op, const float* x, int n, float* y) const {
    const float* w = vectors_[op.norm].data();
    if (shape.layer_norm) kernels.layer(x, w, op.norm_bias >= 0 ? vectors_[op.norm_bias].data() : nullptr, n, shape.eps, y);
    else kernels.rms(x, w, n, shape.eps, y);
}

void Engine::quantise_row(const QRows& q, int64_t row, const float* x, int n) const {
    kernels.quantise(x, n, q.from(q.first(row, n / 32)));
}

// False for attention's results where a block of 32 spans two key/value heads, which different threads write.
bool Engine::whole_blocks(int width) const {
    return width != shape.heads * shape.head_dim || (shape.heads / shape.kv_heads) * shape.head_dim % 32 == 0;
}

// The input of a product: normed and quantised as asked. One or two rows are done by every thread for itself, which is cheaper than a barrier.
Engine::Prepared Engine::prepare(const Op& op, int thread, int& phase, int rows, const int32_t* idx, int width, bool quant) {
    const Buffer& src = *buffers_[op.src];
    const float* x = (const float*)src.f.data();
    if (op.norm < 0 && src.inner && !idx) {
        if (!quant || whole_blocks(width)) return {src.qr, x, nullptr};
    }
    if (op.norm < 0 && !quant) return {{}, x, idx};
    if (rows <= 2) {
        Worker& w = *workers_[thread];
        for (int r = 0; r < rows; r++) {
            const float* row = x + (int64_t)(idx ? idx[r] : r) * width;
            float* y = (float*)w.norm.data() + (int64_t)r * width;
            if (op.norm >= 0) norm_row(op, row, width, y);
            if (quant) quantise_row(w.qr, r, op.norm >= 0 ? y : row, width);
        }
        return {w.qr, op.norm >= 0 ? (const float*)w.norm.data() : x, nullptr};
    }
    QRows q = shared_.qr;
    q.group = rows >= SIDE_BY_SIDE ? SIDE_BY_SIDE : 1;
    for (int r; (r = next(phase)) < rows;) {
        const float* row = x + (int64_t)(idx ? idx[r] : r) * width;
        float* y = (float*)shared_.f.data() + (int64_t)r * width;
        if (op.norm >= 0) norm_row(op, row, width, y);
        else std::memcpy(y, row, (size_t)width * 4);
        if (quant) quantise_row(q, r, y, width);
    }
    phase++;
    team_.barrier();
    return {q, (const float*)shared_.f.data(), nullptr};
}

void Engine::embed(const Op& op, int& phase) {
    const Packed& w = matrices_[op.mat[0]]->p;
    int rows = (int)step.tokens.size(), n = shape.hidden;
    float* x = (float*)buffers_[op.dst]->f.data();
    for (int r; (r = next(phase)) < rows;) {
        float* y = x + (int64_t)r * n;
        unpack_row(w, step.tokens[r], kernels.byte_bias, y);
        if (op.scale != 1.0f)
            for (int i = 0; i < n; i++) y[i] *= op.scale;
        for (size_t k = 0; k < ropes_.size(); k++) {
            float* a = (float*)angles_[k].data() + (int64_t)r * 2 * ropes_[k].half;
            rope_angles(step.positions[r], ropes_[k].inv_freq.data(), ropes_[k].half, ropes_[k].factor, a, a + ropes_[k].half);
        }
    }
    phase++;
    team_.barrier();
}

void Engine::positions(const Op& op, int& phase) {
    const Packed& w = matrices_[op.mat[0]]->p;
    int rows = (int)step.tokens.size(), n = shape.hidden;
    float* x = (float*)buffers_[op.dst]->f.data();
    for (int r; (r = next(phase)) < rows;) {
        float* y = (float*)shared_.f.data() + (int64_t)r * n;
        unpack_row(w, step.positions[r], kernels.byte_bias, y);
        for (int i = 0; i < n; i++) x[(int64_t)r * n + i] += y[i];
    }
    phase++;
    team_.barrier();
}

static void add_bias(float* tile, int64_t ld, int rows, const float* bias, int n) {
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < n; i++) tile[r * ld + i] += bias[i];
}

// One head of q, k or v for some rows: bias, norm, rotation, then to the query buffer or into the cache.
void Engine::qkv_head(const Op& op, int thread, int part, int head, int row0, int rows, float* tile) {
    (void)thread;
    int hd = shape.head_dim, ld = vdim_;
    if (op.bias[part] >= 0) add_bias(tile, ld, rows, vectors_[op.bias[part]].data() + (int64_t)head * hd, hd);
    for (int r = 0; r < rows; r++) {
        float* x = tile + (int64_t)r * ld;
        int row = row0 + r, norm = part == 0 ? op.qnorm : part == 1 ? op.knorm : -1;
        if (norm >= 0) kernels.rms(x, vectors_[norm].data(), hd, shape.eps, x);
        if (part < 2 && op.rope >= 0) {
            int half = ropes_[op.rope].half;
            const float* a = (const float*)angles_[op.rope].data() + (int64_t)row * 2 * half;
            kernels.rope(x, a, a + half, half);
        }
        if (part == 0) {
            std::memcpy((float*)buffers_[op.dst]->f.data() + ((int64_t)row * shape.heads + head) * hd, x, (size_t)hd * 4);
            continue;
        }
        const Sequence& seq = step.sequences[step.sequence[row]];
        int64_t pos = step.positions[row];
        int slot = (int)(pos % BLOCK);
        uint8_t* c = cell(op.layer, seq.blocks[layer_group_[op.layer]][pos / BLOCK], head);
        if (q8_) {
            float* scales = (float*)(c + (size_t)(hd + vdim_) * BLOCK);
            int8_t h[1024];
            if (part == 2) kernels.store_q8(x, hd, (int8_t*)c + (size_t)hd * BLOCK + (size_t)slot * vdim_, scales + BLOCK + slot);
            else {
                kernels.store_q8(x, hd, h, scales + slot);
                for (int d = 0; d < hd; d++) ((int8_t*)c)[d * BLOCK + slot] = h[d];
            }
        } else {
            uint16_t h[1024];
            if (part == 2) kernels.store_half(x, hd, (uint16_t*)c + (size_t)hd * BLOCK + (size_t)slot * vdim_);
            else {
                kernels.store_half(x, hd, h);
                for (int d = 0; d < hd; d++) ((uint16_t*)c)[d * BLOCK + slot] = h[d];
            }
        }
    }
}

void Engine::qkv(const Op& op, int thread, int& phase) {
    int rows = (int)step.tokens.size(), n = shape.hidden;
    bool quant = false;
    for (int p = 0; p < 3; p++) quant |= KIND[matrices_[op.mat[p]]->p.kind].quantised;
    Prepared in = prepare(op, thread, phase, rows, nullptr, n, quant);
    float* tile = (float*)workers_[thread]->tile.data();
    int heads[3] = {shape.heads, shape.kv_heads, shape.kv_heads}, per = vdim_ / 16;
    auto place = [&](int u, int& part, int& head) {
        part = u < heads[0] ? 0 : u < heads[0] + heads[1] ? 1 : 2;
        head = u - (part > 0 ? heads[0] : 0) - (part > 1 ? heads[1] : 0);
    };
    const int units = heads[0] + heads[1] + heads[2];
    for (int u = thread, v; u < units; u = v) {
        int part, head, part2, head2;
        place(u, part, head);
        v = later(phase);
        place(v, part2, head2);
        const Packed& w = matrices_[op.mat[part]]->p;
        const uint8_t* then = v < units ? panel(op.mat[part2], head2 * per) : following(op, thread);
        for (int r = 0; r < rows; r += ROWS) {
            int m = std::min(ROWS, rows - r);
            QRows q = in.q.from(in.q.first(r, n / 32));
            kernels.mm[w.kind](w, head * per, per, q, in.x + (int64_t)r * n, nullptr, m, tile, vdim_, r + ROWS < rows ? nullptr : then);
            qkv_head(op, thread, part, head, r, m, tile);
        }
    }
    phase++;
    team_.barrier();
}

// Panels a thread takes at once: enough units for balance, few enough that taking them costs nothing.
constexpr int MOST = 4;
int Engine::linear_panels(const Op& op) const { return std::clamp(matrices_[op.mat[0]]->p.panels / (team_.size() * 6), 1, MOST); }
int Engine::gateup_panels(const Op& op) const { return matrices_[op.mat[1]]->p.panels >= 16 * team_.size() ? MOST : 2; }

// The weights with which this thread will begin the next product.
const uint8_t* Engine::following(const Op& op, int thread) const {
    const Op& n = ops_[op.then];
    if (n.type == O_QKV) return thread < shape.heads ? panel(n.mat[0], thread * (vdim_ / 16)) : nullptr;
    int matrix = n.type == O_GATEUP ? n.mat[1] : n.mat[0], p = thread * (n.type == O_GATEUP ? gateup_panels(n) : linear_panels(n));
    return p < matrices_[matrix]->p.panels ? panel(matrix, p) : nullptr;
}

void Engine::linear(const Op& op, int thread, int& phase, int rows, const int32_t* idx) {
    const Packed& w = matrices_[op.mat[0]]->p;
    Prepared in = prepare(op, thread, phase, rows, idx, w.k, KIND[w.kind].quantised);
    float* tile = (float*)workers_[thread]->tile.data();
    float* y = (float*)buffers_[op.dst]->f.data();
    const float* bias = op.bias[0] >= 0 ? vectors_[op.bias[0]].data() : nullptr;
    int step_p = linear_panels(op), units = (w.panels + step_p - 1) / step_p;
    for (int u = thread, v; u < units; u = v) {
        v = later(phase);
        const uint8_t* then = v < units ? panel(op.mat[0], v * step_p) : following(op, thread);
        int p = u * step_p, np = std::min(step_p, w.panels - p), cols = std::min(16 * np, w.n - 16 * p);
        for (int r = 0; r < rows; r += ROWS) {
            int m = std::min(ROWS, rows - r);
            QRows q = in.q.from(in.q.first(r, w.k / 32));
            int32_t rebased[ROWS];
            if (in.idx)
                for (int i = 0; i < m; i++) rebased[i] = in.idx[r + i];
            kernels.mm[w.kind](w, p, np, q, in.idx ? in.x : in.x + (int64_t)r * w.k, in.idx ? rebased : nullptr, m, tile, 16 * MOST,
                               r + ROWS < rows ? nullptr : then);
            if (bias) add_bias(tile, 16 * MOST, m, bias + 16 * p, cols);
            for (int i = 0; i < m; i++) {
                float* o = y + (int64_t)(r + i) * w.n + 16 * p;
                const float* t = tile + (int64_t)i * 16 * MOST;
                if (op.add)
                    for (int j = 0; j < cols; j++) o[j] += t[j];
                else std::memcpy(o, t, (size_t)cols * 4);
                if (op.softcap != 0.0f) kernels.softcap(o, cols, op.softcap);
            }
        }
    }
    phase++;
    team_.barrier();
}

// act(gate) * up, 32 outputs at a time, so that the block can be quantised where it is made.
void Engine::gateup(const Op& op, int thread, int& phase) {
    int rows = (int)step.tokens.size();
    bool gated = op.mat[0] >= 0;
    const Packed& up = matrices_[op.mat[1]]->p;
    const Packed* gate = gated ? &matrices_[op.mat[0]]->p : nullptr;
    bool quant = KIND[up.kind].quantised || (gated && KIND[gate->kind].quantised);
    bool out_quant = up.n % 32 == 0;
    Prepared in = prepare(op, thread, phase, rows, nullptr, up.k, quant);
    float *tu = (float*)workers_[thread]->tile.data(), *tg = tu + ROWS * 64, *y = (float*)workers_[thread]->act.data();
    Buffer& dst = *buffers_[op.dst];
    int n = up.n, most = gateup_panels(op), width = 16 * most, units = (up.panels + most - 1) / most;
    for (int u = thread, v; u < units; u = v) {
        v = later(phase);
        const uint8_t* then = v < units ? panel(op.mat[1], v * most) : following(op, thread);
        int p = most * u, np = std::min(most, up.panels - p), cols = std::min(width, n - 16 * p);
        for (int r = 0; r < rows; r += ROWS) {
            int m = std::min(ROWS, rows - r);
            QRows q = in.q.from(in.q.first(r, up.k / 32));
            const float* x = in.x + (int64_t)r * up.k;
            const bool last = r + ROWS >= rows;
            kernels.mm[up.kind](up, p, np, q, x, nullptr, m, tu, width, !last ? nullptr : gated ? panel(op.mat[0], p) : then);
            if (op.bias[1] >= 0) add_bias(tu, width, m, vectors_[op.bias[1]].data() + 16 * p, cols);
            if (gated) {
                kernels.mm[gate->kind](*gate, p, np, q, x, nullptr, m, tg, width, last ? then : nullptr);
                if (op.bias[0] >= 0) add_bias(tg, width, m, vectors_[op.bias[0]].data() + 16 * p, cols);
            }
            kernels.gate(shape.activation, gated ? tg : nullptr, tu, width * m, y);
            for (int i = 0; i < m; i++) {
                if (out_quant) kernels.quantise(y + width * i, cols, dst.qr.from(dst.qr.first(r + i, n / 32) + (int64_t)p / 2 * dst.qr.group));
                if (dst.floats) std::memcpy((float*)dst.f.data() + (int64_t)(r + i) * n + 16 * p, y + width * i, (size_t)cols * 4);
            }
        }
    }
    phase++;
    team_.barrier();
}

// dst = norm(src) of the rows asked for, or dst += norm(src)
void Engine::norm(const Op& op, int& phase) {
    bool add = op.type == O_NORMADD;
    int rows = op.outputs ? (int)step.outputs.size() : (int)step.tokens.size(), n = shape.hidden;
    const float* x = (const float*)buffers_[op.src]->f.data();
    float* y = (float*)buffers_[op.dst]->f.data();
    for (int r; (r = next(phase)) < rows;) {
        const float* row = x + (int64_t)(op.outputs ? step.outputs[r] : r) * n;
        if (!add) {
            norm_row(op, row, n, y + (int64_t)r * n);
            continue;
        }
        float* t = (float*)shared_.f.data() + (int64_t)r * n;
        norm_row(op, row, n, t);
        for (int i = 0; i < n; i++) y[(int64_t)r * n + i] += t[i];
    }
    phase++;
    team_.barrier();
}

void Engine::execute(int thread) {
    int phase = 0;
    for (const Op& op : ops_) switch (op.type) {
            case O_EMBED: embed(op, phase); break;
            case O_POSITIONS: positions(op, phase); break;
            case O_QKV: qkv(op, thread, phase); break;
            case O_ATTEND: attend(op, thread, phase); break;
            case O_LINEAR: linear(op, thread, phase, (int)step.tokens.size(), nullptr); break;
            case O_GATEUP: gateup(op, thread, phase); break;
            case O_NORM: case O_NORMADD: norm(op, phase); break;
            case O_MOE: moe(op, thread, phase); break;
            case O_HEAD: linear(op, thread, phase, (int)step.logits.size(), step.logits.data()); break;
        }
}

}  // namespace verbatim
