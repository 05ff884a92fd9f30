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
    kernels.quantise(x, n, q.q + row * n, q.dx + row * (n / 32), q.ds + row * (n / 32), q.s16 + row * (n / 16));
}

// The input of a product: normed and quantised as asked. One or two rows are done by every thread for itself, which is cheaper than a barrier.
Engine::Prepared Engine::prepare(const Op& op, int thread, int& phase, int rows, const int32_t* idx, int width, bool quant) {
    const Buffer& src = *buffers_[op.src];
    const float* x = (const float*)src.f.data();
    if (op.norm < 0 && src.inner && !idx) {
        bool whole = width != shape.heads * shape.head_dim || (shape.heads / shape.kv_heads) * shape.head_dim % 32 == 0;
        if (!quant || whole) return {src.qr, x, nullptr};
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
    for (int r; (r = next(phase)) < rows;) {
        const float* row = x + (int64_t)(idx ? idx[r] : r) * width;
        float* y = (float*)shared_.f.data() + (int64_t)r * width;
        if (op.norm >= 0) norm_row(op, row, width, y);
        else std::memcpy(y, row, (size_t)width * 4);
        if (quant) quantise_row(shared_.qr, r, y, width);
    }
    phase++;
    team_.barrier();
    return {shared_.qr, (const float*)shared_.f.data(), nullptr};
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
    for (int u; (u = next(phase)) < heads[0] + heads[1] + heads[2];) {
        int part = u < heads[0] ? 0 : u < heads[0] + heads[1] ? 1 : 2;
        int head = u - (part > 0 ? heads[0] : 0) - (part > 1 ? heads[1] : 0);
        const Packed& w = matrices_[op.mat[part]]->p;
        for (int r = 0; r < rows; r += ROWS) {
            int m = std::min(ROWS, rows - r);
            QRows q = in.q;
            q.q += (int64_t)r * n; q.dx += (int64_t)r * (n / 32); q.ds += (int64_t)r * (n / 32); q.s16 += (int64_t)r * (n / 16);
            kernels.mm[w.kind](w, head * per, per, q, in.x + (int64_t)r * n, nullptr, m, tile, vdim_);
            qkv_head(op, thread, part, head, r, m, tile);
        }
    }
    phase++;
    team_.barrier();
}

// Panels a thread takes at once: enough units for balance, few enough that taking them costs nothing.
static int panels_at_once(int panels, int threads, int most) { return std::clamp(panels / (threads * 6), 1, most); }

void Engine::linear(const Op& op, int thread, int& phase, int rows, const int32_t* idx) {
    const Packed& w = matrices_[op.mat[0]]->p;
    Prepared in = prepare(op, thread, phase, rows, idx, w.k, KIND[w.kind].quantised);
    float* tile = (float*)workers_[thread]->tile.data();
    float* y = (float*)buffers_[op.dst]->f.data();
    const float* bias = op.bias[0] >= 0 ? vectors_[op.bias[0]].data() : nullptr;
    constexpr int MOST = 4;
    int step_p = panels_at_once(w.panels, team_.size(), MOST), units = (w.panels + step_p - 1) / step_p;
    for (int u; (u = next(phase)) < units;) {
        int p = u * step_p, np = std::min(step_p, w.panels - p), cols = std::min(16 * np, w.n - 16 * p);
        for (int r = 0; r < rows; r += ROWS) {
            int m = std::min(ROWS, rows - r);
            QRows q = in.q;
            q.q += (int64_t)r * w.k; q.dx += (int64_t)r * (w.k / 32); q.ds += (int64_t)r * (w.k / 32); q.s16 += (int64_t)r * (w.k / 16);
            int32_t rebased[ROWS];
            if (in.idx)
                for (int i = 0; i < m; i++) rebased[i] = in.idx[r + i];
            kernels.mm[w.kind](w, p, np, q, in.idx ? in.x : in.x + (int64_t)r * w.k, in.idx ? rebased : nullptr, m, tile, 16 * MOST);
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
    float *tu = (float*)workers_[thread]->tile.data(), *tg = tu + ROWS * 32, *y = (float*)workers_[thread]->act.data();
    Buffer& dst = *buffers_[op.dst];
    int units = (up.panels + 1) / 2, n = up.n;
    for (int u; (u = next(phase)) < units;) {
        int p = 2 * u, np = std::min(2, up.panels - p), cols = std::min(32, n - 16 * p);
        for (int r = 0; r < rows; r += ROWS) {
            int m = std::min(ROWS, rows - r);
            QRows q = in.q;
            q.q += (int64_t)r * up.k; q.dx += (int64_t)r * (up.k / 32); q.ds += (int64_t)r * (up.k / 32); q.s16 += (int64_t)r * (up.k / 16);
            const float* x = in.x + (int64_t)r * up.k;
            kernels.mm[up.kind](up, p, np, q, x, nullptr, m, tu, 32);
            if (op.bias[1] >= 0) add_bias(tu, 32, m, vectors_[op.bias[1]].data() + 16 * p, cols);
            if (gated) {
                kernels.mm[gate->kind](*gate, p, np, q, x, nullptr, m, tg, 32);
                if (op.bias[0] >= 0) add_bias(tg, 32, m, vectors_[op.bias[0]].data() + 16 * p, cols);
            }
            kernels.gate(shape.activation, gated ? tg : nullptr, tu, 32 * m, y);
            for (int i = 0; i < m; i++) {
                int64_t row = r + i, at = row * n + 16 * p;
                std::memcpy((float*)dst.f.data() + at, y + 32 * i, (size_t)cols * 4);
                if (out_quant) kernels.quantise(y + 32 * i, 32, dst.qr.q + at, dst.qr.dx + at / 32, dst.qr.ds + at / 32, dst.qr.s16 + at / 16);
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
