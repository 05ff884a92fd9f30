// AVX2 with FMA and F16C (Haswell and later).
#pragma once
#include <immintrin.h>

namespace VB_NS {

constexpr int VL = 8;
constexpr int BYTE_BIAS = 0;

using vf = __m256;
using vi = __m256i;
using vm = __m256;
using vb = __m256i;
struct act32 {
    const int8_t* p;
};

static inline vf load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, vf a) { _mm256_storeu_ps(p, a); }
static inline vf set1(float x) { return _mm256_set1_ps(x); }
static inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
static inline vf vabs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline vm lt(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
static inline vf select(vm m, vf a, vf b) { return _mm256_blendv_ps(b, a, m); }
static inline vf sqrt1(vf a) { return _mm256_sqrt_ps(a); }

static inline vi iload(const int32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline void istore(int32_t* p, vi a) { _mm256_storeu_si256((__m256i*)p, a); }
static inline vi iset1(int32_t x) { return _mm256_set1_epi32(x); }
static inline vi iadd(vi a, vi b) { return _mm256_add_epi32(a, b); }
static inline vi isub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
template <int N> static inline vi shl(vi a) { return _mm256_slli_epi32(a, N); }
template <int N> static inline vi sar(vi a) { return _mm256_srai_epi32(a, N); }
static inline vf tofloat(vi a) { return _mm256_cvtepi32_ps(a); }
static inline vf bits(vi a) { return _mm256_castsi256_ps(a); }
static inline vi ibits(vf a) { return _mm256_castps_si256(a); }
static inline vi toint(vf a) { return _mm256_cvtps_epi32(a); }

// Horizontal operations. They are exact, so their order does not matter.
static inline float hmax(vf a) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
static inline int32_t hsum(vi a) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

static inline vf load_f16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
static inline void store_f16(uint16_t* p, vf a) {
    _mm_storeu_si128((__m128i*)p,
                     _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline vf load_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline vf load_u8(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
static inline vf load_i8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
static inline void store_i8(int8_t* p, vi a) {
    __m128i h = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(h, h));
}

static inline vb bload(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline vb band(vb a, uint8_t m) { return _mm256_and_si256(a, _mm256_set1_epi8((char)m)); }
template <int N> static inline vb bshr(vb a) {
    return _mm256_and_si256(_mm256_srli_epi16(a, N), _mm256_set1_epi8((char)(0xff >> N)));
}
template <int N> static inline vb bpick(vb a, uint8_t m) {
    if constexpr (N >= 0) return band(_mm256_srli_epi16(a, N), m);
    else return band(_mm256_slli_epi16(a, -N), m);
}
static inline vb bor(vb a, vb b) { return _mm256_or_si256(a, b); }
static inline vb blookup(const uint8_t* table, vb i) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)),
                               i);
}

static inline act32 aload(const int8_t* p) { return {p}; }
// maddubs adds pairs of products into 16 bits with saturation. Up to `run` of its results are
// accumulated in 16 bits, as many as MAXW allows without overflow.
template <int MAXW, int G, int N> static inline vi dot(vi c, const vb* w, act32 a) {
    const __m256i ones = _mm256_set1_epi16(1);
    constexpr int run = 32767 / (2 * 127 * MAXW);  // 8 for 4 bits, 4 for 5, 2 for 6, 1 for signed 8
    __m256i s = _mm256_setzero_si256();
    for (int g = G; g < G + N; g++) {
        int32_t word;
        std::memcpy(&word, a.p + 4 * g, 4);
        __m256i x = _mm256_set1_epi32(word), t;
        if constexpr (MAXW > 127)
            t = _mm256_maddubs_epi16(_mm256_abs_epi8(w[g]), _mm256_sign_epi8(x, w[g]));
        else t = _mm256_maddubs_epi16(w[g], x);
        if ((g - G) % run == 0) {
            if (g > G) c = _mm256_add_epi32(c, _mm256_madd_epi16(s, ones));
            s = t;
        } else s = _mm256_add_epi16(s, t);
    }
    return _mm256_add_epi32(c, _mm256_madd_epi16(s, ones));
}

}  // namespace VB_NS
