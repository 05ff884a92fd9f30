// What the instruction sets have in common: how weights and activations lie in memory, and the table of kernels.
//
// Weights are packed in panels of 16 output rows. Within a panel every vector of 64 bytes holds 4 consecutive inputs of each of the 16
// rows, so that a dot product is lane-wise and no sum runs across lanes. A panel is three streams one after another:
//   quants  [k/32] x qb bytes      scales  [k/32] x sb bytes      supers  [k/256] x ub bytes
// docs/numerics.md states the order of every addition.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sampler.h"

namespace verbatim {

enum Kind : int {
    K_F32, K_F16, K_BF16,  // one value of each of 16 rows after another
    K_4, K_4M,             // 4 bits, f16 scale (q4_0; q4_1 with a minimum)
    K_5, K_5M,             // 5 bits (q5_0, q5_1)
    K_8,                   // 8 bits, f16 scale (q8_0)
    K_8W,                  // 8 bits, f32 scale (q8_k)
    K_4K, K_5K,            // blocks of 32 in super-blocks of 256: u8 scale and minimum, f16 d and dmin
    K_6K, K_3K,            // blocks of 16: i8 scale, f16 d
    K_2K,                  // blocks of 16: u8 scale and minimum, f16 d and dmin
    KINDS
};

struct KindInfo {
    const char* name;
    int qb, sb, ub;  // bytes of one block of 32 inputs by 16 rows; for floats qb counts all
    bool quantised;
};
extern const KindInfo KIND[KINDS];

struct Packed {
    Kind kind;
    int n, k;               // outputs, inputs
    int panels;
    size_t panel_bytes;
    const uint8_t* data;    // panels * panel_bytes, 64-byte aligned
    bool far = false;       // the model is larger than any cache: weights come from memory, and are asked for earlier
};

// Activations: each block of 32 as int8 with one scale. ds = dx * sum, s16 = sum of each 16 (exact).
// `group` rows lie side by side, block after block: 1 for a few rows, 16 (a tile of AMX, and kind to every cache) for many.
struct QRows {
    int8_t* q;      // [rows / group][k/32][group][32]
    float* dx;      // [rows / group][k/32][group]
    float* ds;
    int32_t* s16;   // [rows / group][k/32][group][2]
    int group = 1;

    // Where a row's first block is, counted in blocks of all arrays; the next is `group` further.
    int64_t first(int64_t row, int blocks) const { return row / group * group * blocks + row % group; }
    QRows from(int64_t block) const { return {q + 32 * block, dx + block, ds + block, s16 + 2 * block, group}; }
};
constexpr int SIDE_BY_SIDE = 16;
constexpr int TILE_FROM = 9;  // fewer rows are computed one by one
inline int side_by_side(int rows) { return rows >= TILE_FROM ? SIDE_BY_SIDE : 1; }

enum Activation : int { A_SILU, A_GELU, A_GELU_TANH };

constexpr int TILE = 128;    // positions of one attention tile: fixed, because it fixes the order of additions
constexpr int BLOCK = 16;    // positions of one cache block
constexpr int SPAN = 4;      // blocks whose keys or values are widened at a time
constexpr int MAXQ = 64;     // query vectors of one attention call, at most
constexpr int WANTQ = 48;    // as many as fill it well
constexpr int ROWS = 64;     // rows of one call of mm

// One tile of attention for nq query vectors that share a key/value head.
struct AttendTile {
    int head_dim, vdim;          // vdim: head_dim rounded up to 16, the stride of a row of V
    int first, last;             // blocks of the tile that hold visible positions: [first, last), relative to the tile
    const void* k[TILE / BLOCK]; // [head_dim][16] f16, or q8: int8 [head_dim][16] with 16 f32 scales in kscale
    const void* v[TILE / BLOCK]; // [16][vdim] f16
    const float* kscale[TILE / BLOCK];  // q8 only: scale of each position
    const float* vscale[TILE / BLOCK];
    bool q8;
    int nq;
    const float* q[MAXQ];        // head_dim floats each
    int lo[MAXQ], hi[MAXQ];      // visible positions [lo, hi), relative to the tile
    float scale, softcap;
    float* scores;               // scratch [nq][TILE]
    float* wide;                 // scratch [SPAN * BLOCK][vdim]
    float* o;                    // out [nq][vdim], not divided
    float m[MAXQ], l[MAXQ];      // out: maximum and sum
};

struct Kernels {
    const char* name;
    int byte_bias;  // 128 where 8-bit weights are stored unsigned
    void (*quantise)(const float* x, int n, const QRows& to);  // `to` starts at the row's first block
    // out[r * ldo + 16 * (p - p0) + lane] for rows r (through idx if given); at most ROWS rows. `then`: weights that this thread will want
    // afterwards, to be asked for from memory in time; may be null.
    void (*mm[KINDS])(const Packed& w, int p0, int np, const QRows& a, const float* x, const int32_t* idx, int rows, float* out,
                      int64_t ldo, const uint8_t* then);
    void (*rms)(const float* x, const float* w, int n, float eps, float* y);
    void (*layer)(const float* x, const float* w, const float* b, int n, float eps, float* y);
    void (*rope)(float* x, const float* cosv, const float* sinv, int half);
    void (*gate)(int kind, const float* gate, const float* up, int n, float* y);  // gate null: y = act(up)
    void (*attend)(AttendTile& t);
    void (*combine)(float* m, float* l, float* o, float mt, float lt, const float* ot, int n);  // n = vdim
    void (*scale_out)(const float* o, float l, int n, float* y);
    void (*add_rows)(float* y, int64_t ldy, const float* x, int64_t ldx, int rows, int n);  // y += x; ldx 0: the same x for all rows
    float (*top)(const float* x, int n);  // the largest; NaN if there is one
    void (*softcap)(float* x, int n, float cap);
    void (*store_half)(const float* x, int n, uint16_t* y);
    void (*store_q8)(const float* x, int n, int8_t* y, float* scale);
    void (*exps)(const float* x, int n, float* y);                        // tests: our exp
    vb::SampleFn sample;
    float (*soft_top)(const float* s, int n, int k, int32_t* ids, float* p);  // softmax, then the k best
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

// pack.cpp: portable
size_t panel_bytes(Kind kind, int k);
bool kind_of(const char* type, Kind* kind);
// rows r0 .. r0+15 (fewer at the end: padded with zeros) of a GGUF tensor into one panel; gives a row that holds no finite number, -1: none does
int pack_panel(const char* type, const uint8_t* src, size_t row_bytes, int rows, int k, int byte_bias, uint8_t* dst);
void unpack_row(const Packed& w, int row, int byte_bias, float* out);
// rope.cpp: portable
void rope_angles(int64_t position, const double* inv_freq, int half, double factor, float* cosv, float* sinv);

}  // namespace verbatim
