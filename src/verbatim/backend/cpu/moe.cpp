// Mixture of experts: router, then each chosen expert for the rows that chose it, then the weighted sum of each row in order of rank.
#include <algorithm>
#include <cstring>

#include "engine.h"

namespace verbatim {

// A slot is (row, rank): the expert that row chose at that rank. Experts see their slots as gathered rows.
void Engine::moe(const Op& op, int thread, int& phase) {
    const Packed& router = matrices_[op.mat[0]]->p;
    int rows = (int)step.tokens.size(), experts = router.n, used = op.used, n = shape.hidden;
    const Packed &up0 = matrices_[op.experts[1][0]]->p, &down0 = matrices_[op.experts[2][0]]->p;
    bool quant = KIND[router.kind].quantised || KIND[up0.kind].quantised || KIND[matrices_[op.experts[0][0]]->p.kind].quantised;
    int inner = up0.n, slots = rows * used;
    if (thread == 0) {  // memory for this step; the barrier below publishes it
        auto fit = [&](std::unique_ptr<Buffer>& b, int width, bool q) {
            size_t bytes = (size_t)slots * width * 4 + 256;
            if (b && b->width == width && b->f.size() >= bytes) return;
            b = std::make_unique<Buffer>();
            b->width = width;
            b->f = Pages(bytes);
            if (!q) return;
            int64_t nb = width / 32;
            size_t a = (size_t)slots * width + 64, s = (size_t)slots * nb * 4 + 64;
            a = (a + 63) / 64 * 64; s = (s + 63) / 64 * 64;
            b->q = Pages(a + 4 * s + 64);
            b->qr = {(int8_t*)b->q.data(), (float*)(b->q.data() + a), (float*)(b->q.data() + a + s), (int32_t*)(b->q.data() + a + 2 * s)};
        };
        fit(slots_inner_, inner, true);
        fit(slots_out_, n, false);
        if (scores_.size() < (size_t)rows * router.panels * 64) scores_ = Pages((size_t)rows * router.panels * 64 + 256);
        slot_expert_.resize(slots);
        slot_weight_.resize(slots);
        expert_start_.assign(experts + 1, 0);
        expert_rows_.resize(slots);
    }
    team_.barrier();
    // 1. normed rows, once for all: the router reads floats, the experts mostly the quantised form
    Op both = op;
    Prepared in = prepare(both, thread, phase, rows, nullptr, n, quant);
    // 2. router scores, then each row's choice
    int64_t ld = router.panels * 16;
    for (int u; (u = next(phase)) < (rows + ROWS - 1) / ROWS;) {
        int r = u * ROWS, m = std::min(ROWS, rows - r);
        QRows q = quant ? in.q.from(in.q.first(r, n / 32)) : in.q;
        float* s = (float*)scores_.data() + r * ld;
        kernels.mm[router.kind](router, 0, router.panels, q, in.x + (int64_t)r * n, nullptr, m, s, ld, nullptr);
        for (int i = 0; i < m; i++) {
            int32_t* ids = &slot_expert_[(size_t)(r + i) * used];
            float* p = &slot_weight_[(size_t)(r + i) * used];
            float sum = kernels.soft_top(s + i * ld, experts, used, ids, p);
            if (op.renormalise)
                for (int j = 0; j < used; j++) p[j] /= sum;
        }
    }
    phase++;
    team_.barrier();
    if (thread == 0) {  // slots by expert, in order of row
        for (int s = 0; s < slots; s++) expert_start_[slot_expert_[s] + 1]++;
        for (int e = 0; e < experts; e++) expert_start_[e + 1] += expert_start_[e];
        std::vector<int32_t> at(expert_start_.begin(), expert_start_.end() - 1);
        for (int s = 0; s < slots; s++) expert_rows_[at[slot_expert_[s]]++] = s;
    }
    team_.barrier();
    Worker& w = *workers_[thread];
    float *tu = (float*)w.tile.data(), *tg = tu + ROWS * 32, *y = (float*)w.act.data();
    // 3. act(gate) * up for 32 outputs of one expert
    int chunks = (up0.panels + 1) / 2;
    for (int u; (u = next(phase)) < experts * chunks;) {
        int e = u / chunks, p = u % chunks * 2, np = std::min(2, up0.panels - p), cols = std::min(32, inner - 16 * p);
        const Packed &up = matrices_[op.experts[1][e]]->p, &gate = matrices_[op.experts[0][e]]->p;
        for (int i = expert_start_[e]; i < expert_start_[e + 1]; i += ROWS) {
            int m = std::min(ROWS, expert_start_[e + 1] - i);
            int32_t idx[ROWS];
            for (int j = 0; j < m; j++) idx[j] = expert_rows_[i + j] / used;
            kernels.mm[up.kind](up, p, np, in.q, in.x, idx, m, tu, 32, nullptr);
            kernels.mm[gate.kind](gate, p, np, in.q, in.x, idx, m, tg, 32, nullptr);
            kernels.gate(shape.activation, tg, tu, 32 * m, y);
            for (int j = 0; j < m; j++) {
                int64_t at = (int64_t)expert_rows_[i + j] * inner + 16 * p;
                const QRows& q = slots_inner_->qr;
                std::memcpy((float*)slots_inner_->f.data() + at, y + 32 * j, (size_t)cols * 4);
                if (inner % 32 == 0) kernels.quantise(y + 32 * j, 32, q.from(at / 32));
            }
        }
    }
    phase++;
    team_.barrier();
    // 4. down
    constexpr int MOST = 4;
    chunks = (down0.panels + MOST - 1) / MOST;
    for (int u; (u = next(phase)) < experts * chunks;) {
        int e = u / chunks, p = u % chunks * MOST;
        const Packed& down = matrices_[op.experts[2][e]]->p;
        int np = std::min(MOST, down.panels - p), cols = std::min(16 * np, n - 16 * p);
        for (int i = expert_start_[e]; i < expert_start_[e + 1]; i += ROWS) {
            int m = std::min(ROWS, expert_start_[e + 1] - i);
            kernels.mm[down.kind](down, p, np, slots_inner_->qr, (const float*)slots_inner_->f.data(), &expert_rows_[i], m, tu, 16 * MOST, nullptr);
            for (int j = 0; j < m; j++)
                std::memcpy((float*)slots_out_->f.data() + (int64_t)expert_rows_[i + j] * n + 16 * p, tu + (int64_t)j * 16 * MOST, (size_t)cols * 4);
        }
    }
    phase++;
    team_.barrier();
    // 5. weighted sum in order of rank
    float* out = (float*)buffers_[op.dst]->f.data();
    for (int r; (r = next(phase)) < rows;) {
        float* o = out + (int64_t)r * n;
        const float* y0 = (const float*)slots_out_->f.data() + (int64_t)r * used * n;
        for (int i = 0; i < n; i++) {
            float s = slot_weight_[(size_t)r * used] * y0[i];
            for (int j = 1; j < used; j++) s += slot_weight_[(size_t)r * used + j] * y0[(int64_t)j * n + i];
            o[i] = op.add ? o[i] + s : s;
        }
    }
    phase++;
    team_.barrier();
}

}  // namespace verbatim
