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

constexpr int CHANNELS = 256;  // channels per work item of a convolution

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
            for (int c = 0; c < n; c++) y[c] = 0.0f;
            for (int tap = 0; tap < op.taps; tap++) {  // the oldest position first
                const int64_t p = position - op.taps + 1 + tap;
                if (p < 0) continue;
                const float *v = input(p), *w = kernel + (int64_t)tap * width + c0;
                for (int c = 0; c < n; c++) y[c] += v[c] * w[c];
            }
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

// One update of the state [key_dim][value_dim] in two halves. decay_state: state *= decay, and
// error = k·state.
static void decay_state(float* __restrict state, const float* k, float decay, int key_dim,
                        int value_dim, float* __restrict error) {
    for (int j = 0; j < value_dim; j++) error[j] = 0.0f;
    for (int i = 0; i < key_dim; i++, state += value_dim)
        for (int j = 0; j < value_dim; j++) {
            state[j] *= decay;
            error[j] += k[i] * state[j];
        }
}

// error becomes the correction (v - error) * beta, and state += k correction. In the same pass over
// the state, each value is multiplied by `decay` (1 leaves it as it is), and sum += x·state.
static void correct_state(float* __restrict state, const float* k, const float* v, float beta,
                          int key_dim, int value_dim, float* __restrict error, float decay,
                          const float* x, float* __restrict sum) {
    for (int j = 0; j < value_dim; j++) {
        error[j] = (v[j] - error[j]) * beta;
        sum[j] = 0.0f;
    }
    for (int i = 0; i < key_dim; i++, state += value_dim)
        for (int j = 0; j < value_dim; j++) {
            const float s = (state[j] + k[i] * error[j]) * decay;
            sum[j] += x[i] * s;
            state[j] = s;
        }
}

// y = x * factor / root of the sum of squares + 1e-6.
static void l2_normed(const float* x, int n, float factor, float* y) {
    float sum = 0.0f;
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    const float scale = factor / std::sqrt(sum + 1e-6f);
    for (int i = 0; i < n; i++) y[i] = x[i] * scale;
}

// One value head of one sequence per work item. A block has, per value head: the state before the
// block, then per position key, value, decay and beta.
void Engine::delta(const Op& op, WorkItems& items) {
    const int dk = op.key_dim, dv = op.value_dim, heads = op.value_heads;
    const int keys = op.key_heads * dk, values = heads * dv, width = 2 * keys + values;
    const int64_t state_floats = (int64_t)dk * dv, update = dk + dv + 2;
    const int64_t head_floats = state_floats + BLOCK * update;
    const float* mixed = (const float*)buffers_[op.keys]->f.data();
    const float* z = (const float*)buffers_[op.values]->f.data();
    const float* b = (const float*)buffers_[op.betas]->f.data();
    const float* a = (const float*)buffers_[op.alphas]->f.data();
    float* dst = (float*)buffers_[op.dst]->f.data();
    const float q_factor = 1.0f / std::sqrt((float)dk);
    std::vector<float> state(state_floats), query(dk), error(dv), out(dv);
    for (int u; (u = items.next()) >= 0;) {
        const Sequence& seq = step.sequences[u / heads];
        const int head = u % heads;
        const int key_head = op.tiled ? head % op.key_heads : head * op.key_heads / heads;
        auto head_block = [&](int64_t index) {
            return recurrent_block(state_group_, op.layer, seq.blocks[state_group_][index]) +
                   head * head_floats;
        };
        std::fill(state.begin(), state.end(), 0.0f);
        if (seq.start > 0) {
            const int64_t index = (seq.start - 1) / BLOCK;
            const float *stored = head_block(index), *p = stored + state_floats;
            std::memcpy(state.data(), stored, (size_t)state_floats * 4);
            decay_state(state.data(), p, p[dk + dv], dk, dv, error.data());
            for (int64_t s = index * BLOCK; s < seq.start; s++, p += update) {
                // the second half of this update, with the first half of the next one
                const bool last = s + 1 == seq.start;
                const float* next = last ? p : p + update;
                correct_state(state.data(), p, p + dk, p[dk + dv + 1], dk, dv, error.data(),
                              last ? 1.0f : next[dk + dv], next, out.data());
                std::swap(error, out);
            }
        }
        for (int r = 0; r < seq.rows; r++) {
            const int64_t row = seq.row0 + r, position = seq.start + r;
            float *stored = head_block(position / BLOCK),
                  *p = stored + state_floats + position % BLOCK * update;
            if (position % BLOCK == 0)
                std::memcpy(stored, state.data(), (size_t)state_floats * 4);
            const float* x = mixed + row * width;
            l2_normed(x + key_head * dk, dk, q_factor, query.data());
            l2_normed(x + keys + key_head * dk, dk, 1.0f, p);
            std::memcpy(p + dk, x + 2 * keys + head * dv, (size_t)dv * 4);
            p[dk + dv] = decay_of(vectors_[op.decay][head],
                                  a[row * heads + head] + vectors_[op.dt][head]);
            p[dk + dv + 1] = sigmoid(b[row * heads + head]);
            decay_state(state.data(), p, p[dk + dv], dk, dv, error.data());
            correct_state(state.data(), p, p + dk, p[dk + dv + 1], dk, dv, error.data(), 1.0f,
                          query.data(), out.data());
            kernels.rms_norm(out.data(), vectors_[op.qnorm].data(), dv, shape.eps, out.data());
            const int64_t at = row * values + head * dv;
            kernels.gate(A_SILU, z + at, out.data(), dv, dst + at);
        }
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
        float *y = dst + (int64_t)r * n, factor = sigmoid(g[0]);
        for (int i = 0; i < n; i++) {
            if (gates > 1) factor = sigmoid(g[i]);
            y[i] = op.add ? y[i] + x[i] * factor : x[i] * factor;
        }
    }
}

}  // namespace verbatim
