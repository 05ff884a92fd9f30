// The vector layer: the primitives that all kernels are written on, implemented per instruction
// set.
//
// A native vector has VL lanes (scalar 4, NEON 4, AVX2 8, AVX-512 16). Kernels work on 16 lanes as
// NQ = 16 / VL native vectors. Every primitive gives the same bits on every instruction set: IEEE
// single precision operations, explicit fused multiply-adds, round-to-nearest-even conversions,
// exact integer dot products. The compiler must not reassociate or contract anything here
// (-ffp-contract=off).
//
//   vf  VL floats      vi  VL int32      vb  VL groups of 4 bytes, one group per lane
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels.h"

// Loops over a register tile must be unrolled, or the tile spills to memory. The scalar layer has
// no vector registers, so unrolling would only slow the compiler down.
#if defined(VB_ISA_SCALAR)
#define VB_UNROLL(n)
#else
#define VB_PRAGMA(x) _Pragma(#x)
#define VB_UNROLL(n) VB_PRAGMA(GCC unroll n)
#endif

#if defined(VB_ISA_AVX512) || defined(VB_ISA_AMX)
#include "vec_avx512.h"
#elif defined(VB_ISA_AVX2)
#include "vec_avx2.h"
#elif defined(VB_ISA_NEON) || defined(VB_ISA_I8MM)
#include "vec_neon.h"
#else
#include "vec_scalar.h"
#endif

namespace VB_NS {

constexpr int NQ = 16 / VL;

static inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

#if !defined(VB_HAS_DOTS)
// dot() of the same weights with R rows of activations.
template <int MAXW, int G, int N, int R>
static inline void dots(vi* c, const vb* w, const int8_t* const* a, int at) {
    VB_UNROLL(8)
    for (int r = 0; r < R; r++) c[r] = dot<MAXW, G, N>(c[r], w, aload(a[r] + at));
}
#endif

// Integer sums of one block of R rows, from `start` on: dots() of one plane of activations, or of
// two (QRows). With few rows each plane has a chain of its own, which hides the latency of the dot
// products; with many rows the registers are needed for the sums.
template <bool FINE, int MAXW, int G, int N, int R>
static inline void plane_dots(vi* sum, const vi* start, const vb* w, const int8_t* const* high,
                              const int8_t* const* low, int at) {
    VB_UNROLL(8)
    for (int r = 0; r < R; r++) sum[r] = FINE ? iset1(0) : start[r];
    dots<MAXW, G, N, R>(sum, w, high, at);
    if constexpr (FINE && R <= 2) {
        vi rest[R];
        VB_UNROLL(2)
        for (int r = 0; r < R; r++) rest[r] = start[r];
        dots<MAXW, G, N, R>(rest, w, low, at);
        VB_UNROLL(2)
        for (int r = 0; r < R; r++) sum[r] = iadd(shl<verbatim::LOW_BITS>(sum[r]), rest[r]);
    } else if constexpr (FINE) {
        VB_UNROLL(8)
        for (int r = 0; r < R; r++) sum[r] = iadd(shl<verbatim::LOW_BITS>(sum[r]), start[r]);
        dots<MAXW, G, N, R>(sum, w, low, at);
    }
}

// The high plane of int12 activations; the low one is v - 16 * high, in [-8, 7].
static inline vi high_plane(vi v) {
    return sar<verbatim::LOW_BITS>(iadd(v, iset1(1 << (verbatim::LOW_BITS - 1))));
}

// Sum of 16 lanes in the order used everywhere: lane i + lane i + 8, then + 4, + 2, + 1.
static inline float tree16(const float* p) {
    float a[8], b[4];
    for (int i = 0; i < 8; i++) a[i] = p[i] + p[i + 8];
    for (int i = 0; i < 4; i++) b[i] = a[i] + a[i + 4];
    return (b[0] + b[2]) + (b[1] + b[3]);
}

}  // namespace VB_NS
