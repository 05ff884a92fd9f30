// AVX-512 (F, BW, VL, DQ) with VNNI.
#pragma once
#include <immintrin.h>

namespace VB_NS {

constexpr int VL = 16;
constexpr int BYTE_BIAS = 128;  // vpdpbusd wants one unsigned side: 8-bit weights are stored as w + 128

using vf = __m512;
using vi = __m512i;
using vm = __mmask16;
using vb = __m512i;

static inline vf load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, vf a) { _mm512_storeu_ps(p, a); }
static inline vf set1(float x) { return _mm512_set1_ps(x); }
static inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vf vabs(vf a) { return _mm512_abs_ps(a); }
static inline vm lt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
static inline vf select(vm m, vf a, vf b) { return _mm512_mask_blend_ps(m, b, a); }
static inline vf sqrt1(vf a) { return _mm512_sqrt_ps(a); }

static inline vi iload(const int32_t* p) { return _mm512_loadu_si512(p); }
static inline void istore(int32_t* p, vi a) { _mm512_storeu_si512(p, a); }
static inline vi iset1(int32_t x) { return _mm512_set1_epi32(x); }
static inline vi iadd(vi a, vi b) { return _mm512_add_epi32(a, b); }
template <int N> static inline vi shl(vi a) { return _mm512_slli_epi32(a, N); }
static inline vf tofloat(vi a) { return _mm512_cvtepi32_ps(a); }
static inline vf bits(vi a) { return _mm512_castsi512_ps(a); }
static inline vi ibits(vf a) { return _mm512_castps_si512(a); }
static inline vi toint(vf a) { return _mm512_cvtps_epi32(a); }

// across lanes: exact, so in any order
static inline float hmax(vf a) { return _mm512_reduce_max_ps(a); }
static inline int32_t hsum(vi a) { return _mm512_reduce_add_epi32(a); }

static inline vf load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline void store_f16(uint16_t* p, vf a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
static inline vf load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline vf load_u8(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }
static inline vf load_i8(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
static inline void store_i8(int8_t* p, vi a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(a)); }

static inline vb bload(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline vb band(vb a, uint8_t m) { return _mm512_and_si512(a, _mm512_set1_epi8((char)m)); }
template <int N> static inline vb bshr(vb a) { return _mm512_and_si512(_mm512_srli_epi16(a, N), _mm512_set1_epi8((char)(0xff >> N))); }
template <int N> static inline vb bpick(vb a, uint8_t m) {
    if constexpr (N >= 0) return band(_mm512_srli_epi16(a, N), m);
    else return band(_mm512_slli_epi16(a, -N), m);
}
static inline vb bor(vb a, vb b) { return _mm512_or_si512(a, b); }

#define VB_HAS_DOTS
// Rows inside, groups outside: a row's eight products wait for one another (5 cycles each), those of different rows do not, and the processor
// sees too few instructions ahead to find them by itself.
template <int MAXW, int G, int N, int R> static inline void dots(vi* c, const vb* w, const int8_t* const* a, int at) {
VB_UNROLL(8)
    for (int g = G; g < G + N; g++)
VB_UNROLL(8)
        for (int r = 0; r < R; r++) {
            int32_t word; std::memcpy(&word, a[r] + at + 4 * g, 4);
            c[r] = _mm512_dpbusd_epi32(c[r], w[g], _mm512_set1_epi32(word));
        }
}

}  // namespace VB_NS
