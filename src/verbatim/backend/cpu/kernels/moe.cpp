// Mixture of experts: the router, then each expert for the rows routed to it, then the weighted sum
// per row in order of rank.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "engine.h"

namespace verbatim {

// A slot is (row, rank): the expert that the row chose at that rank. An expert processes its slots
// as gathered rows.
constexpr int UP_PANELS = 2, DOWN_PANELS = 4;  // panels per work item
int Engine::moe_up_items(const Op& op) const {
    return (matrices_[op.experts[1][0]]->p.panels + UP_PANELS - 1) / UP_PANELS;
}
int Engine::moe_down_items(const Op& op) const {
    return (matrices_[op.experts[2][0]]->p.panels + DOWN_PANELS - 1) / DOWN_PANELS;
}

// Sizes the buffers for this step.
void Engine::moe_plan(const Op& op) {
    const Packed& router = matrices_[op.mat[0]]->p;
    const int rows = (int)step.tokens.size(), slots = rows * op.used;
    auto fit = [&](std::unique_ptr<Buffer>& b, int width, bool q) {
        size_t bytes = (size_t)slots * width * 4 + 256;
        if (b && b->width == width && b->f.size() >= bytes) return;
        b = std::make_unique<Buffer>();
        b->width = width;
        b->f = Pages(bytes);
        if (q) b->q = quant_pages(slots, width, fine_, b->qr);
    };
    const int inner = matrices_[op.experts[1][0]]->p.n;
    if (!op.widths.empty()) fit(slots_local_, inner, false);
    fit(slots_inner_, op.widths.empty() ? inner : matrices_[op.experts[2][0]]->p.k, true);
    fit(slots_out_, matrices_[op.experts[2][0]]->p.n, false);
    if (scores_.size() < (size_t)rows * router.panels * 64)
        scores_ = Pages((size_t)rows * router.panels * 64 + 256);
    slot_expert_.resize(slots);
    slot_weight_.resize(slots);
    expert_rows_.resize(slots);
}

// Router scores, then the top-k experts of each row. The router reads float rows; most experts read
// the quantised form of the same normalised rows.
void Engine::moe_route(const Op& op, WorkItems& items) {
    const Packed& router = matrices_[op.mat[0]]->p;
    const int rows = (int)step.tokens.size(), n = shape.hidden, used = op.used;
    const bool quant = input(op).quant;
    ProductInput in = product_input(op, items.thread);
    const float* x = op.keys < 0 ? in.x : (const float*)buffers_[op.keys]->f.data();
    const int64_t ld = router.panels * 16;
    for (int u; (u = items.next()) >= 0;) {
        int r = u * MM_ROWS, m = std::min(MM_ROWS, rows - r);
        QRows q = quant ? in.q.at_block(in.q.first_block(r, n / 32)) : in.q;
        float* s = (float*)scores_.data() + r * ld;
        kernels.mm[router.kind](router, 0, router.panels, q, x + (int64_t)r * n, nullptr, m, s, ld,
                                nullptr);
        if (op.bias[0] >= 0)
            kernels.add_rows(s, ld, vectors_[op.bias[0]].data(), 0, m, router.n);
        for (int i = 0; i < m; i++)
            choose_experts(op, s + i * ld, router.n, &slot_expert_[(size_t)(r + i) * used],
                           &slot_weight_[(size_t)(r + i) * used]);
    }
}

// The experts of one row, best first (ties go to the lower index), and their weights. Overwrites
// the logits.
void Engine::choose_experts(const Op& op, float* logits, int experts, int32_t* ids,
                            float* weights) {
    float sum = 0.0f;
    if (!op.sigmoid && op.choice_bias < 0 && op.groups == 1)
        sum = kernels.softmax_topk(logits, experts, op.used, ids, weights);
    else {
        if (op.sigmoid) {
            for (int e = 0; e < experts; e++) logits[e] = -logits[e];
            kernels.exps(logits, experts, logits);
            for (int e = 0; e < experts; e++) logits[e] = 1.0f / (1.0f + logits[e]);
        } else {
            const float most = *std::max_element(logits, logits + experts);
            for (int e = 0; e < experts; e++) logits[e] -= most;
            kernels.exps(logits, experts, logits);
            float total = 0.0f;
            for (int e = 0; e < experts; e++) total += logits[e];
            for (int e = 0; e < experts; e++) logits[e] /= total;
        }
        const float* bias = op.choice_bias >= 0 ? vectors_[op.choice_bias].data() : nullptr;
        const auto choice = [&](int e) { return bias ? logits[e] + bias[e] : logits[e]; };
        const int size = experts / op.groups;  // experts per group
        std::vector<bool> kept(op.groups, op.groups == 1);
        if (op.groups > 1) {
            std::vector<float> sums(op.groups);
            for (int g = 0; g < op.groups; g++) {
                float first = -INFINITY, second = -INFINITY;
                for (int e = g * size; e < (g + 1) * size; e++) {
                    const float score = choice(e);
                    if (score > first) {
                        second = first;
                        first = score;
                    } else if (score > second)
                        second = score;
                }
                sums[g] = first + second;
            }
            for (int n = 0; n < op.groups_used; n++) {
                int best = -1;
                for (int g = 0; g < op.groups; g++)
                    if (!kept[g] && (best < 0 || sums[g] > sums[best])) best = g;
                kept[best] = true;
            }
        }
        for (int j = 0; j < op.used; j++) {
            int best = -1;
            float top = 0.0f;
            for (int e = 0; e < experts; e++) {
                if (!kept[e / size]) continue;
                const float score = choice(e);
                if ((best >= 0 && !(score > top)) || std::find(ids, ids + j, e) != ids + j)
                    continue;
                best = e;
                top = score;
            }
            ids[j] = best;
            weights[j] = logits[best];
            sum += weights[j];
        }
    }
    for (int j = 0; j < op.used; j++) {
        if (op.renormalise) weights[j] /= sum;
        if (op.experts_scale != 1.0f) weights[j] *= op.experts_scale;
        if (op.expert_scales >= 0) weights[j] *= vectors_[op.expert_scales][ids[j]];
    }
}

// Groups the slots by expert, in order of row; a single work item.
void Engine::moe_sort(const Op& op, WorkItems& items) {
    const int experts = matrices_[op.mat[0]]->p.n, slots = (int)step.tokens.size() * op.used;
    while (items.next() >= 0) {
        expert_start_.assign(experts + 1, 0);
        for (int s = 0; s < slots; s++) expert_start_[slot_expert_[s] + 1]++;
        for (int e = 0; e < experts; e++) expert_start_[e + 1] += expert_start_[e];
        std::vector<int32_t> at(expert_start_.begin(), expert_start_.end() - 1);
        for (int s = 0; s < slots; s++) expert_rows_[at[slot_expert_[s]]++] = s;
    }
}

// act(gate) * up for 32 outputs of one expert per work item.
void Engine::moe_up(const Op& op, WorkItems& items) {
    const int inner = matrices_[op.experts[1][0]]->p.n, chunks = moe_up_items(op);
    Buffer& to = op.widths.empty() ? *slots_inner_ : *slots_local_;
    const bool quantised = op.widths.empty() && inner % 32 == 0;
    ProductInput in = product_input(op, items.thread);
    Worker& w = *workers_[items.thread];
    float *tu = (float*)w.tile.data(), *tg = tu + MM_ROWS * 32, *y = (float*)w.act.data();
    for (int u; (u = items.next()) >= 0;) {
        int e = u / chunks, p = u % chunks * UP_PANELS;
        const Packed &up = matrices_[op.experts[1][e]]->p, &gate = matrices_[op.experts[0][e]]->p;
        int np = std::min(UP_PANELS, up.panels - p), cols = std::min(32, inner - 16 * p);
        for (int i = expert_start_[e]; i < expert_start_[e + 1]; i += MM_ROWS) {
            int m = std::min(MM_ROWS, expert_start_[e + 1] - i);
            int32_t idx[MM_ROWS];
            for (int j = 0; j < m; j++) idx[j] = expert_rows_[i + j] / op.used;
            kernels.mm[up.kind](up, p, np, in.q, in.x, idx, m, tu, 32, nullptr);
            kernels.mm[gate.kind](gate, p, np, in.q, in.x, idx, m, tg, 32, nullptr);
            if (op.expert_bias[0] >= 0) {
                const int64_t at = (int64_t)e * inner + 16 * p;
                kernels.add_rows(tg, 32, vectors_[op.expert_bias[0]].data() + at, 0, m, cols);
                kernels.add_rows(tu, 32, vectors_[op.expert_bias[1]].data() + at, 0, m, cols);
            }
            kernels.gate(shape.activation, tg, tu, 32 * m, y);
            for (int j = 0; j < m; j++) {
                int64_t at = (int64_t)expert_rows_[i + j] * inner + 16 * p;
                std::memcpy((float*)to.f.data() + at, y + 32 * j, (size_t)cols * 4);
                if (quantised)
                    kernels.quantise(y + 32 * j, 32, slots_inner_->qr.at_block(at / 32));
            }
        }
    }
}

void Engine::moe_down(const Op& op, WorkItems& items) {
    const int chunks = moe_down_items(op), n = slots_out_->width;
    float* tile = (float*)workers_[items.thread]->tile.data();
    for (int u; (u = items.next()) >= 0;) {
        int e = u / chunks, p = u % chunks * DOWN_PANELS;
        const Packed& down = matrices_[op.experts[2][e]]->p;
        int np = std::min(DOWN_PANELS, down.panels - p), cols = std::min(16 * np, n - 16 * p);
        for (int i = expert_start_[e]; i < expert_start_[e + 1]; i += MM_ROWS) {
            int m = std::min(MM_ROWS, expert_start_[e + 1] - i);
            kernels.mm[down.kind](down, p, np, slots_inner_->qr,
                                  (const float*)slots_inner_->f.data(), &expert_rows_[i], m, tile,
                                  16 * DOWN_PANELS, nullptr);
            if (op.expert_bias[2] >= 0)
                kernels.add_rows(tile, 16 * DOWN_PANELS,
                                 vectors_[op.expert_bias[2]].data() + (int64_t)e * n + 16 * p, 0, m,
                                 cols);
            for (int j = 0; j < m; j++)
                std::memcpy(
                    (float*)slots_out_->f.data() + (int64_t)expert_rows_[i + j] * n + 16 * p,
                    tile + (int64_t)j * 16 * DOWN_PANELS, (size_t)cols * 4);
        }
    }
}

void Engine::moe_sum(const Op& op, WorkItems& items) {
    const int n = slots_out_->width, used = op.used;
    float* out = (float*)buffers_[op.dst]->f.data();
    for (int r; (r = items.next()) >= 0;) {
        float* o = out + (int64_t)r * n;
        const float* y0 = (const float*)slots_out_->f.data() + (int64_t)r * used * n;
        for (int i = 0; i < n; i++) {
            float s = slot_weight_[(size_t)r * used] * y0[i];
            for (int j = 1; j < used; j++)
                s += slot_weight_[(size_t)r * used + j] * y0[(int64_t)j * n + i];
            if (op.scale != 1.0f) s *= op.scale;
            o[i] = op.add ? o[i] + s : s;
        }
    }
}

}  // namespace verbatim
