// Recurrent layers: causal convolutions and gated delta nets over paged caches of float32.
//
// A work item is some channels, or one value head, of one sequence, and advances position by
// position. So neither the thread that computes it nor the cut of the sequence into steps changes
// its bits. A state is never updated in place: a block holds the state before its first position
// and the updates of its positions, and the state at any position is a replay of at most one block
// (docs/adr/0023-recurrent-state.md).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#define VB_NS verbatim_recurrent
#include "engine.h"
#include "sampler_math.h"

namespace verbatim {

using verbatim_recurrent::exp_live;
using verbatim_recurrent::log_of;

constexpr int CHANNELS = 256;  // per work item of a convolution, and per pass of a gate

static double exp_negative(double x) { return exp_live(std::max(x, -708.0)); }

static float sigmoid(float x) {
    const double e = exp_negative(-std::abs((double)x));
    return (float)((x >= 0.0f ? 1.0 : e) / (1.0 + e));
}

// exp(rate * softplus(x)); rate <= 0.
static float decay_of(float rate, float x) {
    const double softplus =
        std::max((double)x, 0.0) + log_of(1.0 + exp_negative(-std::abs((double)x)));
    return (float)exp_negative((double)rate * softplus);
}

float* Engine::recurrent_block(int group, int layer, int64_t block) const {
    const Group& g = groups_[group];
    const int64_t slot = std::find(g.layers.begin(), g.layers.end(), layer) - g.layers.begin();
    return (float*)g.pages.data() + (block * (int64_t)g.layers.size() + slot) * g.floats;
}

int Engine::conv_items(const Op& op) const {
    const int chunks = (conv_width(op) + CHANNELS - 1) / CHANNELS;
    return (int)step.sequences.size() * chunks;
}

// O_CONV: dst = c * conv(b * u), where src has the parts b, c, u. O_DELTA: mixed = silu(conv(src)).
void Engine::convolve(const Op& op, WorkItems& items) {
    const int width = conv_width(op), chunks = (width + CHANNELS - 1) / CHANNELS;
    const bool gated = op.type == O_CONV;
    const float* src = (const float*)buffers_[op.src]->f.data();
    float* dst = (float*)buffers_[gated ? op.dst : op.keys]->f.data();
    const float* kernel = vectors_[op.kernel].data();  // [taps][width]
    std::vector<const float*> past(op.taps);
    for (int u; (u = items.next()) >= 0;) {
        const Sequence& seq = step.sequences[u / chunks];
        const int c0 = u % chunks * CHANNELS, n = std::min(CHANNELS, width - c0);
        auto input = [&](int64_t p) {
            return recurrent_block(conv_group_, op.layer, seq.blocks[conv_group_][p / BLOCK]) +
                   (p % BLOCK) * width + c0;
        };
        for (int r = 0; r < seq.rows; r++) {
            const int64_t row = seq.row0 + r, position = seq.start + r;
            const float* x = src + row * (gated ? 3 * width : width) + c0;
            float *in = input(position), *y = dst + row * width + c0;
            for (int c = 0; c < n; c++) in[c] = gated ? x[c] * x[2 * width + c] : x[c];
            const int taps = (int)std::min<int64_t>(op.taps, position + 1);
            for (int tap = 0; tap < taps; tap++)  // the oldest position first
                past[tap] = input(position - taps + 1 + tap);
            kernels.convolve(past.data(), kernel + (int64_t)(op.taps - taps) * width + c0, width,
                             taps, n, y);
            if (op.kernel_bias >= 0) {
                const float* bias = vectors_[op.kernel_bias].data() + c0;
                for (int c = 0; c < n; c++) y[c] += bias[c];
            }
            if (gated)
                for (int c = 0; c < n; c++) y[c] *= x[width + c];
            else kernels.gate(A_SILU, nullptr, y, n, y);
        }
    }
}

// y = x * factor / root of the sum of squares + 1e-6.
static void l2_normed(const float* x, int n, float factor, float* y) {
    float sum = 0.0f;
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    const float scale = factor / std::sqrt(sum + 1e-6f);
    for (int i = 0; i < n; i++) y[i] = x[i] * scale;
}

// A block has, per value head: the state [key_dim][value_dim] before the block, then per position
// key, value, decay and beta.
static int64_t update_floats(const Op& op) { return op.key_dim + op.value_dim + 2; }
static int64_t head_floats(const Op& op) {
    return (int64_t)op.key_dim * op.value_dim + BLOCK * update_floats(op);
}

// Block `index` of the sequence and value head of a work item.
float* Engine::delta_block(const Op& op, int item, int64_t index) const {
    const Sequence& seq = step.sequences[item / op.value_heads];
    return recurrent_block(state_group_, op.layer, seq.blocks[state_group_][index]) +
           item % op.value_heads * head_floats(op);
}

// Writes the update of one row to the cache at `p`, and its query.
void Engine::delta_update(const Op& op, int64_t row, int head, float* p, float* query) const {
    const int dk = op.key_dim, dv = op.value_dim, heads = op.value_heads;
    const int key_head = op.tiled ? head % op.key_heads : head * op.key_heads / heads;
    const int keys = op.key_heads * dk;
    const float* x = (const float*)buffers_[op.keys]->f.data() + row * (2 * keys + heads * dv);
    const float* b = (const float*)buffers_[op.betas]->f.data();
    const float* a = (const float*)buffers_[op.alphas]->f.data();
    l2_normed(x + key_head * dk, dk, 1.0f / std::sqrt((float)dk), query);
    l2_normed(x + keys + key_head * dk, dk, 1.0f, p);
    std::memcpy(p + dk, x + 2 * keys + head * dv, (size_t)dv * 4);
    p[dk + dv] = decay_of(vectors_[op.decay][head], a[row * heads + head] + vectors_[op.dt][head]);
    p[dk + dv + 1] = sigmoid(b[row * heads + head]);
}

// One value head of one sequence, block by block: the stored updates of the first block and the new
// ones of all. `next`: memory that this thread reads next.
void Engine::delta_head(const Op& op, Worker& w, int item, const uint8_t* next) {
    const Sequence& seq = step.sequences[item / op.value_heads];
    const int head = item % op.value_heads, dk = op.key_dim, dv = op.value_dim;
    const int width = (dv + DELTA_LANES - 1) / DELTA_LANES * DELTA_LANES;
    const int64_t state_floats = (int64_t)dk * dv, end = seq.start + seq.rows;
    const float* z = (const float*)buffers_[op.values]->f.data();
    float* dst = (float*)buffers_[op.dst]->f.data();
    float *state = (float*)w.state.data(), *zeros = state + dk * width, *out = zeros + width,
          *query = out + BLOCK * width;
    DeltaUpdate updates[BLOCK];
    const int64_t first = seq.start > 0 ? (seq.start - 1) / BLOCK : 0;
    const uint8_t* next_end = next ? next + head_floats(op) * 4 : nullptr;
    for (int64_t index = first; index * BLOCK < end; index++) {
        float* stored = delta_block(op, item, index);
        const bool resumed = index == first && seq.start > 0;
        const int n = (int)std::min<int64_t>(BLOCK, end - index * BLOCK);
        const int known = (int)std::clamp<int64_t>(seq.start - index * BLOCK, 0, n);
        const int64_t row = seq.row0 + index * BLOCK - seq.start;  // of the block's first position
        float* p = stored + state_floats;
        for (int t = 0; t < n; t++, p += update_floats(op)) {
            if (t >= known) delta_update(op, row + t, head, p, query + t * dk);
            updates[t] = {p, p + dk, t >= known ? query + t * dk : nullptr, p[dk + dv],
                          p[dk + dv + 1], out + t * width};
        }
        for (int c = 0; c < width; c += DELTA_LANES) {
            DeltaStrip strip{state + dk * c, dk, state + dk * c, DELTA_LANES, next, next_end};
            if (resumed) strip.from = stored + c, strip.from_stride = dv;
            else if (index == 0) strip.from = zeros, strip.from_stride = 0;
            if (!resumed)
                for (int i = 0; i < dk; i++)
                    std::memcpy(stored + (int64_t)i * dv + c, strip.from + i * strip.from_stride,
                                (size_t)std::min(DELTA_LANES, dv - c) * 4);
            kernels.delta(strip, updates, n, c);
            next = strip.ahead;
        }
        for (int t = known; t < n; t++) {
            float* y = out + t * width;
            const int64_t at = ((row + t) * op.value_heads + head) * dv;
            kernels.rms_norm(y, vectors_[op.qnorm].data(), dv, shape.eps, y);
            kernels.gate(A_SILU, z + at, y, dv, dst + at);
        }
    }
}

void Engine::delta(const Op& op, WorkItems& items) {
    Worker& w = *workers_[items.thread];
    const int64_t width = (op.value_dim + DELTA_LANES - 1) / DELTA_LANES * DELTA_LANES;
    const size_t bytes = (size_t)((op.key_dim + 1 + BLOCK) * width + BLOCK * op.key_dim) * 4;
    if (w.state.size() < bytes) w.state = Pages(bytes);
    for (int u = items.next(), v; u >= 0; u = v) {
        v = items.next();
        const Sequence* after = v < 0 ? nullptr : &step.sequences[v / op.value_heads];
        delta_head(op, w, u,
                   !after ? next_product_weights(op, items.thread)
                   : after->start > 0
                       ? (const uint8_t*)delta_block(op, v, (after->start - 1) / BLOCK)
                       : nullptr);
    }
}

// dst = src * sigmoid(gate), or dst += that. The gate has a column per value, or one for the row.
void Engine::gated(const Op& op, WorkItems& items) {
    const int n = buffers_[op.src]->width, gates = buffers_[op.keys]->width;
    const float* src = (const float*)buffers_[op.src]->f.data();
    const float* gate = (const float*)buffers_[op.keys]->f.data();
    float* dst = (float*)buffers_[op.dst]->f.data();
    for (int r; (r = items.next()) >= 0;) {
        const float *x = src + (int64_t)r * n, *g = gate + (int64_t)r * gates;
        float *y = dst + (int64_t)r * n, factors[CHANNELS];
        if (gates == 1) {
            kernels.sigmoids(g, 1, factors);
            std::fill(factors + 1, factors + CHANNELS, factors[0]);
        }
        for (int c = 0; c < n; c += CHANNELS) {
            const int m = std::min(CHANNELS, n - c);
            if (gates > 1) kernels.sigmoids(g + c, m, factors);
            if (op.add)
                for (int i = 0; i < m; i++) y[c + i] += x[c + i] * factors[i];
            else
                for (int i = 0; i < m; i++) y[c + i] = x[c + i] * factors[i];
        }
    }
}

}  // namespace verbatim
