// Gathers of a tensor-parallel group: each rank has computed some columns of all rows, and all ranks
// (or rank 0) get the whole rows. A value is copied, or added to the residual as one process adds
// it; no sum crosses ranks.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "engine.h"

namespace verbatim {

// Exchanges the pieces of `rows` rows; piece r is [rows][widths[r]]. After a failure the pieces of
// the others are zeros, and run() throws at the end of the step.
void Engine::exchange(const float* own, int64_t rows, const std::vector<int>& widths, bool root) {
    const int n = mesh_->ranks(), rank = mesh_->rank();
    std::vector<size_t> bytes(n);
    size_t all = 0;
    for (int r = 0; r < n; r++) all += bytes[r] = (size_t)rows * widths[r] * 4;
    if (received_.size() < all) received_ = Pages(all);
    pieces_.assign(n, own);
    std::vector<void*> to(n);
    uint8_t* at = received_.data();
    for (int r = 0; r < n; r++) {
        to[r] = at;
        if (r != rank) pieces_[r] = (const float*)at;
        at += bytes[r];
    }
    try {
        mesh_->gather(own, bytes, to.data(), root);
    } catch (const std::runtime_error& error) {
        mesh_error_ = error.what();
        std::memset(received_.data(), 0, all);
    }
}

int64_t Engine::gathered_rows(const Op& op) const {
    return op.logits ? step.logits.size() : step.tokens.size();
}

void Engine::exchange_buffer(const Op& op, WorkItems& items) {
    while (items.next() >= 0) {
        // O_MOE: a row is a slot. `picks`: a piece is as wide as the result.
        const bool moe = op.type == O_MOE;
        const float* own = (const float*)(moe ? *slots_local_ : *buffers_[op.src]).f.data();
        const int64_t rows = moe ? slot_expert_.size() : gathered_rows(op);
        exchange(own, rows,
                 op.picks ? std::vector<int>(op.widths.size(), buffers_[op.dst]->width) : op.widths,
                 op.logits);
    }
}

// The whole row of the pieces that exchange() received.
void Engine::join_pieces(const std::vector<int>& widths, int64_t row, float* to) const {
    for (size_t r = 0; r < widths.size(); to += widths[r++])
        std::memcpy(to, pieces_[r] + row * widths[r], (size_t)widths[r] * 4);
}

void Engine::gather(const Op& op, WorkItems& items) {
    const int n = buffers_[op.dst]->width;
    float* out = (float*)buffers_[op.dst]->f.data();
    for (int64_t r; (r = items.next()) >= 0;) {
        float* y = out + r * n;
        if (op.picks) {  // the rank that has the token's row of the embedding
            int owner = 0, token = step.tokens[r];
            while (token >= op.widths[owner]) token -= op.widths[owner++];
            std::memcpy(y, pieces_[owner] + r * n, (size_t)n * 4);
        } else if (op.add) {
            float* to = y;
            for (size_t k = 0; k < op.widths.size(); to += op.widths[k++])
                kernels.add_rows(to, 0, pieces_[k] + r * op.widths[k], 0, 1, op.widths[k]);
        } else if (!op.logits || mesh_->rank() == 0) {
            join_pieces(op.widths, r, y);
            if (!op.logits) continue;
            float* maxes = (float*)chunk_maxes_.data() + r * chunks();
            for (int64_t c = 0; c < chunks(); c++)
                maxes[c] = kernels.max_or_nan(y + c * vb::CHUNK,
                                              (int)std::min<int64_t>(vb::CHUNK, n - c * vb::CHUNK));
        }
    }
}

// Of O_MOE: the inner values of each slot, and their quantised form.
void Engine::join_slots(const Op& op, WorkItems& items) {
    const int inner = slots_inner_->width;
    float* to = (float*)slots_inner_->f.data();
    for (int64_t slot; (slot = items.next()) >= 0;) {
        join_pieces(op.widths, slot, to + slot * inner);
        if (inner % 32 == 0)
            kernels.quantise(to + slot * inner, inner, slots_inner_->qr.at_block(slot * inner / 32));
    }
}

}  // namespace verbatim
