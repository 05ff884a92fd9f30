// LoRA adapters: x · Wᵀ + B · (scale · A · x) for the rows of a step that use one.
//
// A phase before the product computes scale · A · x of each adapted row; the product adds B times
// it to the row's tile, before the bias. Both are float products of one row, so a row's bits
// depend neither on the other rows nor on their adapters. Rows without an adapter are not touched.
#include <algorithm>
#include <stdexcept>

#include "engine.h"

namespace verbatim {

int Engine::add_lora(const std::vector<LowRank>& adapters) {
    for (const LowRank& l : adapters) {
        if (l.a < 0) continue;
        const Packed &a = matrices_.at(l.a)->p, &b = matrices_.at(l.b)->p;
        if (a.n != b.k || KIND[a.kind].quantised || KIND[b.kind].quantised)
            throw std::invalid_argument("the matrices of an adapter do not fit together");
        max_rank_ = std::max(max_rank_, a.panels * 16);
    }
    adapters_ = std::max(adapters_, (int)adapters.size());
    lora_.push_back(adapters);
    return (int)lora_.size() - 1;
}

bool Engine::has_lora(const Op& op) const {
    return op.lora[0] >= 0 || op.lora[1] >= 0 || op.lora[2] >= 0;
}

// The adapter's matrices for matrix `slot` of an operation; null if the row has none.
const LowRank* Engine::low_rank(const Op& op, int slot, int row) const {
    const int adapter = step.adapter[row];
    if (adapter < 0 || op.lora[slot] < 0) return nullptr;
    const LowRank& l = lora_[op.lora[slot]][adapter];
    return l.a < 0 ? nullptr : &l;
}

float* Engine::low_row(int row, int slot) {
    return (float*)low_.data() + ((int64_t)row * 3 + slot) * max_rank_;
}

// scale · A · x; a work item is one adapted row.
void Engine::lora_down(const Op& op, WorkItems& items) {
    const int width = input(op).width;
    ProductInput in = product_input(op, items.thread);
    for (int u; (u = items.next()) >= 0;) {
        const int row = step.adapted[u];
        for (int slot = 0; slot < 3; slot++) {
            const LowRank* l = low_rank(op, slot, row);
            if (!l) continue;
            const Packed& a = matrices_[l->a]->p;
            float* t = low_row(row, slot);
            kernels.mm[a.kind](a, 0, a.panels, in.q, in.x + (int64_t)row * width, nullptr, 1, t,
                               max_rank_, nullptr);
            for (int i = 0; i < a.n; i++) t[i] *= l->scale;
        }
    }
}

// Adds B · t to rows r .. r+m-1 of a tile that holds panels p .. p+np-1 of the product.
void Engine::lora_up(const Op& op, int slot, int p, int np, int r, int m, float* tile, int64_t ld,
                     int thread) {
    if (op.lora[slot] < 0 || step.adapted.empty()) return;
    float* sum = (float*)workers_[thread]->low.data();
    for (int i = 0; i < m; i++) {
        const LowRank* l = low_rank(op, slot, r + i);
        if (!l) continue;
        const Packed& b = matrices_[l->b]->p;
        kernels.mm[b.kind](b, p, np, QRows{}, low_row(r + i, slot), nullptr, 1, sum, 16 * np,
                           nullptr);
        kernels.add_rows(tile + (int64_t)i * ld, 0, sum, 0, 1, 16 * np);
    }
}

}  // namespace verbatim
