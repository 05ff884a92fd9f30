// What all instruction sets share: the memory layout of weights and activations, and the kernel
// table.
//
// Weights are packed in panels of 16 output rows. In a panel, each vector of 64 bytes holds 4
// consecutive inputs of each of the 16 rows, so a dot product is lane-wise and no sum crosses
// lanes. A panel is three streams, one after another:
//   quants  [k/32] x qb bytes      scales  [k/32] x sb bytes      supers  [k/256] x ub bytes
// docs/numerics.md states the order of every addition.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sampler.h"

namespace verbatim {

// Packed weight formats. The super-block formats have 256 inputs per super-block.
enum Kind : int {
    K_F32,  // float formats: input by input, 16 rows side by side
    K_F16,
    K_BF16,
    K_4,   // q4_0: 4 bits, f16 scale
    K_4M,  // q4_1: and f16 minimum
    K_5,   // q5_0: 5 bits, f16 scale
    K_5M,  // q5_1: and f16 minimum
    K_8,   // q8_0: 8 bits, f16 scale
    K_8W,  // q8_k, q8_f: 8 bits, f32 scale
    K_4K,  // q4_k: blocks of 32 with u8 scale and minimum, f16 d and dmin per super-block
    K_5K,  // the same with 5 bits
    K_6K,  // q6_k: blocks of 16 with i8 scale, f16 d per super-block
    K_3K,  // q3_k: the same with 3 bits
    K_2K,  // q2_k: blocks of 16 with u8 scale and minimum, f16 d and dmin per super-block
    K_8H,  // q8_h: 8 bits, an f32 scale for each half of the block
    K_4I,  // iq4_nl, iq4_xs: 4-bit indices into IQ4_VALUES, f32 scale
    K_4E,  // mxfp4: 4-bit indices into E2M1_VALUES, f32 scale
    KINDS
};

struct KindInfo {
    const char* name;
    // Bytes per block of 32 inputs by 16 rows: quants, scales, super-block scales (per 256 inputs).
    // Float formats have quants only.
    int qb, sb, ub;
    bool quantised;
};
extern const KindInfo KIND[KINDS];

// The types that pack_panel reads: all types of GGUF files that need no codebook, and two of our
// own for those that do (backend/cpu/repack.py writes them): q8_f is an f32 scale and 32 signed
// bytes, q8_h the same with a scale for each half.
struct SourceType {
    const char* name;
    Kind kind;
    int values, bytes;  // per block
};
const SourceType* source_type(const char* name);  // null: unknown

// Values of the 4-bit indices. iq4: unevenly spaced, denser around zero. e2m1: doubled, so that
// they are integers; a multiple of a power of two either way.
constexpr int IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                1,    13,   25,  38,  53,  69,  89,  113};
constexpr int E2M1_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct Packed {
    Kind kind;
    int n, k;  // outputs (rows of the matrix), inputs
    int panels;
    size_t panel_bytes;
    const uint8_t* data;  // panels * panel_bytes, 64-byte aligned
    // The weights exceed any CPU cache and come from RAM: prefetch further ahead.
    bool exceeds_cache = false;
};

// Quantised activations: blocks of 32 integers with one scale. ds = dx * sum of the block, s16 =
// exact sum of each half. `group` rows are interleaved block by block: 1 for a few rows, 16 (an AMX
// tile, and good cache locality everywhere) for many.
//
// int8: STEPS = 127 steps on each side of zero. int12: FINE_STEPS = 16 * 127, in two planes of
// bytes, value = high * 16 + low with low in [-8, 7]. A sum of 32 products with 8-bit weights stays
// below 2^24 in both, so it is exact as a float.
struct QRows {
    int8_t* q;  // [rows / group][k/32][group][32]; of int12 the high plane
    float* dx;  // [rows / group][k/32][group]
    float* ds;
    int32_t* s16;  // [rows / group][k/32][group][2]
    int group = 1;
    int64_t low = 0;  // int12: bytes from a value's high part to its low part; int8: 0

    // Index of the first block of a row, in blocks; the following ones are `group` apart.
    int64_t first_block(int64_t row, int blocks) const {
        return row / group * group * blocks + row % group;
    }
    QRows at_block(int64_t block) const {
        return {q + 32 * block, dx + block, ds + block, s16 + 2 * block, group, low};
    }
};
constexpr float STEPS = 127.0f;
constexpr int LOW_BITS = 4;
constexpr float FINE_STEPS = STEPS * (1 << LOW_BITS);
constexpr int ROW_GROUP = 16;     // rows interleaved for tiled products
constexpr int MIN_TILE_ROWS = 9;  // fewer rows are computed row by row
inline int row_group(int rows) { return rows >= MIN_TILE_ROWS ? ROW_GROUP : 1; }

// A_SWIGLU_OAI: min(gate, 7) * sigmoid(1.702 * min(gate, 7)) * (clamp(up, -7, 7) + 1), gated only.
enum Activation : int { A_SILU, A_GELU, A_GELU_TANH, A_RELU2, A_SWIGLU_OAI };

// Positions per attention tile. Fixed, because the tile defines the order of the additions.
constexpr int TILE = 128;
constexpr int BLOCK = 16;           // positions per KV cache block
constexpr int WIDEN_BLOCKS = 4;     // KV blocks that are widened to float32 at a time
constexpr int MAX_QUERIES = 64;     // query vectors per attention call, at most
constexpr int TARGET_QUERIES = 48;  // query vectors per call that plan_attention aims for
constexpr int MM_ROWS = 64;         // rows per call of mm, at most

// Element types of the KV cache. fp8 is e4m3 without a scale.
enum KvType : int { KV_F16, KV_Q8, KV_FP8 };

// One attention tile: nq query vectors that share a KV head.
struct AttendTile {
    int head_dim, vdim;                 // vdim: head_dim rounded up to 16, the row stride of V
    int first, last;                    // blocks with visible positions, [first, last) in the tile
    const void* k[TILE / BLOCK];        // [head_dim][16], f16 or (q8, fp8) bytes
    const void* v[TILE / BLOCK];        // [16][vdim], f16 or (q8, fp8) bytes
    const float* kscale[TILE / BLOCK];  // q8: one scale per position; fp8: constants
    const float* vscale[TILE / BLOCK];
    KvType kv_type;
    int nq;
    const float* q[MAX_QUERIES];           // head_dim floats each
    int lo[MAX_QUERIES], hi[MAX_QUERIES];  // visible positions [lo, hi) in the tile
    float scale, softcap;
    float* scores;                         // scratch [nq][TILE]
    float* wide;                           // scratch [WIDEN_BLOCKS * BLOCK][vdim]
    float* o;                              // out [nq][vdim]: weighted values, not yet divided by l
    float m[MAX_QUERIES], l[MAX_QUERIES];  // out: maximum score and sum of exponentials
};

// One update of the state of a delta net (docs/adr/0023): from k, v, decay and beta of a position.
struct DeltaUpdate {
    const float *k, *v, *q;  // q: null if the output is not needed, as in a replay
    float decay, beta;
    float* out;  // q·state, after the update
};
constexpr int DELTA_LANES = 32;  // columns per strip: 128 rows of it take half of an L1 cache

// DELTA_LANES columns of a state.
struct DeltaStrip {
    float* state;  // scratch [rows][DELTA_LANES], holds the result
    int rows;
    const float* from;  // the state before the updates, which may be `state`
    int64_t from_stride;
    const uint8_t *ahead, *ahead_end;  // memory that is read next, to be prefetched
};

struct Kernels {
    const char* name;
    int byte_bias;  // 128 where 8-bit weights are stored unsigned
    // `to` starts at the first block of the row.
    void (*quantise)(const float* x, int n, const QRows& to);
    // Matrix product of panels p0 .. p0+np-1 with at most MM_ROWS rows: out[r * ldo + 16 * (p - p0)
    // + lane] for row r (row idx[r] if idx is given). `next_weights`: the weights that this thread
    // reads next, to be prefetched; may be null.
    void (*mm[KINDS])(const Packed& w, int p0, int np, const QRows& a, const float* x,
                      const int32_t* idx, int rows, float* out, int64_t ldo,
                      const uint8_t* next_weights);
    void (*rms_norm)(const float* x, const float* w, int n, float eps, float* y);
    void (*layer_norm)(const float* x, const float* w, const float* b, int n, float eps, float* y);
    void (*rope)(float* x, const float* cosv, const float* sinv, int half);
    // y = act(gate) * up; without gate, y = act(up).
    void (*gate)(int kind, const float* gate, const float* up, int n, float* y);
    void (*attend)(AttendTile& t);
    // Merges the partial softmax (mt, lt, ot) into (m, l, o); n = vdim.
    void (*combine)(float* m, float* l, float* o, float mt, float lt, const float* ot, int n);
    void (*scale_out)(const float* o, float l, int n, float* y);
    // y += x; ldx 0 adds the same x to all rows.
    void (*add_rows)(float* y, int64_t ldy, const float* x, int64_t ldx, int rows, int n);
    float (*max_or_nan)(const float* x, int n);  // the largest value; NaN if any is NaN
    void (*softcap)(float* x, int n, float cap);
    void (*store_half)(const float* x, int n, uint16_t* y);
    void (*store_q8)(const float* x, int n, int8_t* y, float* scale);
    void (*exps)(const float* x, int n, float* y);  // exp, element by element
    void (*sigmoids)(const float* x, int n, float* y);  // in float64, rounded once
    // y = the sum over the taps of in[tap] * w[tap], the first one first; w is [taps][ldw].
    void (*convolve)(const float* const* in, const float* w, int64_t ldw, int taps, int n,
                     float* y);
    // Updates in order. `column`: the strip's first column of v and out.
    void (*delta)(DeltaStrip& strip, const DeltaUpdate* updates, int count, int column);
    vb::SampleFn sample;
    // Softmax, then the k most probable; returns the sum of their probabilities.
    float (*softmax_topk)(const float* s, int n, int k, int32_t* ids, float* p);
};

const Kernels& kernels_scalar();
#if defined(__x86_64__)
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
const Kernels& kernels_amx();
#elif defined(__aarch64__)
const Kernels& kernels_neon();
const Kernels& kernels_i8mm();
#endif

// pack.cpp (portable)
size_t panel_bytes(Kind kind, int k);
// Packs up to 16 rows of a GGUF tensor into one panel, padded with zeros. Returns the index of a
// row with a weight or scale that is not finite, or -1.
int pack_panel(const SourceType& type, const uint8_t* src, size_t row_bytes, int rows, int k,
               int byte_bias, uint8_t* dst);
void unpack_row(const Packed& w, int row, int byte_bias, float* out);
// rope.cpp (portable)
void rope_angles(int64_t position, const double* inv_freq, int half, double factor, float* cosv,
                 float* sinv);

}  // namespace verbatim
