// AVX-512 (F, BW, VL, DQ) with VNNI.
#pragma once
#include <immintrin.h>

namespace VB_NS {

constexpr int VL = 16;
// vpdpbusd multiplies unsigned by signed bytes: 8-bit weights are stored as w + 128.
constexpr int BYTE_BIAS = 128;

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
static inline vi isub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
template <int N> static inline vi shl(vi a) { return _mm512_slli_epi32(a, N); }
template <int N> static inline vi sar(vi a) { return _mm512_srai_epi32(a, N); }
static inline vf tofloat(vi a) { return _mm512_cvtepi32_ps(a); }
static inline vf bits(vi a) { return _mm512_castsi512_ps(a); }
static inline vi ibits(vf a) { return _mm512_castps_si512(a); }
static inline vi toint(vf a) { return _mm512_cvtps_epi32(a); }

// Horizontal operations. They are exact, so their order does not matter.
static inline float hmax(vf a) { return _mm512_reduce_max_ps(a); }
static inline int32_t hsum(vi a) { return _mm512_reduce_add_epi32(a); }

static inline vf load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
static inline void store_f16(uint16_t* p, vf a) {
    _mm256_storeu_si256((__m256i*)p,
                        _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline vf load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline vf load_u8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
static inline vf load_i8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
static inline void store_i8(int8_t* p, vi a) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(a));
}

static inline vb bload(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline vb band(vb a, uint8_t m) { return _mm512_and_si512(a, _mm512_set1_epi8((char)m)); }
template <int N> static inline vb bshr(vb a) {
    return _mm512_and_si512(_mm512_srli_epi16(a, N), _mm512_set1_epi8((char)(0xff >> N)));
}
template <int N> static inline vb bpick(vb a, uint8_t m) {
    if constexpr (N >= 0) return band(_mm512_srli_epi16(a, N), m);
    else return band(_mm512_slli_epi16(a, -N), m);
}
static inline vb bor(vb a, vb b) { return _mm512_or_si512(a, b); }
static inline vb blookup(const uint8_t* table, vb i) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), i);
}

#define VB_HAS_DOTS
// Groups in the outer loop, rows in the inner one: the eight dot products of one row depend on each
// other (5 cycles latency each), those of different rows do not. The out-of-order window is too
// small to find that parallelism by itself.
template <int MAXW, int G, int N, int R>
static inline void dots(vi* c, const vb* w, const int8_t* const* a, int at) {
    VB_UNROLL(8)
    for (int g = G; g < G + N; g++)
        VB_UNROLL(8)
        for (int r = 0; r < R; r++) {
            int32_t word;
            std::memcpy(&word, a[r] + at + 4 * g, 4);
            c[r] = _mm512_dpbusd_epi32(c[r], w[g], _mm512_set1_epi32(word));
        }
}

#define VB_HAS_PAIRS
// Stores 64 integers as the bytes of two blocks of 32; the sums of each half of each block.
static inline __m128i store_pair(const vi* r, int8_t* q0, int8_t* q1) {
    const vi bytes = _mm512_permutexvar_epi32(
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
        _mm512_packs_epi16(_mm512_packs_epi32(r[0], r[1]), _mm512_packs_epi32(r[2], r[3])));
    _mm256_storeu_si256((__m256i*)q0, _mm512_castsi512_si256(bytes));
    _mm256_storeu_si256((__m256i*)q1, _mm512_extracti64x4_epi64(bytes, 1));
    vi eights = _mm512_sad_epu8(_mm512_xor_si512(bytes, _mm512_set1_epi8((char)0x80)),
                                _mm512_setzero_si512());
    eights = _mm512_add_epi64(eights, _mm512_shuffle_epi32(eights, _MM_PERM_BADC));
    const vi sixteens = _mm512_sub_epi64(eights, _mm512_set1_epi64(16 * 128));
    return _mm512_castsi512_si128(_mm512_permutexvar_epi32(
        _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), sixteens));
}

// Quantises two blocks of 32 at once: horizontal maxima are shared and `sad` sums the bytes. The
// bits equal those of quantise_block: maxima and integer sums are exact in any order, and each
// quotient is one division.
template <bool FINE>
__attribute__((always_inline)) static inline void quantise_pair(const float* x, float steps,
                                                                int8_t* q0, int8_t* q1, int64_t low,
                                                                float* dx, int32_t* sums) {
    vf v[4], m[2];
    VB_UNROLL(4)
    for (int i = 0; i < 4; i++) v[i] = load(x + 16 * i);
    VB_UNROLL(2)
    for (int i = 0; i < 2; i++) m[i] = vmax(vabs(v[2 * i]), vmax(vabs(v[2 * i + 1]), set1(0.0f)));
    // Lower half: the first block; upper half: the second.
    vf top = vmax(_mm512_shuffle_f32x4(m[0], m[1], 0x44), _mm512_shuffle_f32x4(m[0], m[1], 0xee));
    top = vmax(top, _mm512_shuffle_f32x4(top, top, 0xb1));
    top = vmax(top, _mm512_permute_ps(top, 0x4e));
    top = vmax(top, _mm512_permute_ps(top, 0xb1));
    const __m128 most =
                     _mm_unpacklo_ps(_mm512_castps512_ps128(top), _mm512_extractf32x4_ps(top, 2)),
                 all = _mm_set1_ps(steps);
    const __m128 both = _mm_movelh_ps(most, most);
    __m128 ratio = _mm_div_ps(_mm_movelh_ps(all, most),
                              _mm_movelh_ps(most, all));  // steps / most, most / steps
    ratio = _mm_and_ps(ratio, _mm_cmp_ps(both, _mm_set1_ps(1e-30f), _CMP_GT_OQ));
    const vf inv[2] = {_mm512_broadcastss_ps(ratio), _mm512_broadcastss_ps(_mm_movehdup_ps(ratio))};
    vi r[4];
    VB_UNROLL(4)
    for (int i = 0; i < 4; i++) r[i] = toint(mul(v[i], inv[i / 2]));
    if constexpr (FINE) {
        vi high[4], rest[4];
        __m128i high_sums, rest_sums;
        VB_UNROLL(4)
        for (int i = 0; i < 4; i++) {
            high[i] = _mm512_srai_epi32(_mm512_add_epi32(r[i], iset1(8)), 4);
            rest[i] = _mm512_sub_epi32(r[i], _mm512_slli_epi32(high[i], 4));
        }
        high_sums = store_pair(high, q0, q1);
        rest_sums = store_pair(rest, q0 + low, q1 + low);
        _mm_storeu_si128((__m128i*)sums, _mm_add_epi32(_mm_slli_epi32(high_sums, 4), rest_sums));
    } else _mm_storeu_si128((__m128i*)sums, store_pair(r, q0, q1));
    _mm_storeh_pi((__m64*)dx, ratio);
}

}  // namespace VB_NS
