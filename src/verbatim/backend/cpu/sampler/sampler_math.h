// The arithmetic of the sampler, bit for bit that of sampling/numerics.py and sampling/draw.py,
// with the same names: IEEE float64, no fused multiply-add, no library function, and no float sum
// whose order is unspecified, so the compiler can vectorise freely.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace VB_NS {
namespace {

constexpr double NEG_INF = -std::numeric_limits<double>::infinity();
constexpr float NEG_INF_F = -std::numeric_limits<float>::infinity();
constexpr double LOG2E = 0x1.71547652b82fep+0, LN2_HI = 0x1.62e42fee00000p-1,
                 LN2_LO = 0x1.a39ef35793c76p-33;
constexpr double ROUND = 0x1.8p+52;
constexpr uint64_t SQRT2_MANTISSA = 0x6A09E667F3BCD, MANTISSA = 0xFFFFFFFFFFFFF;
constexpr double MASS_ONE = 0x1p42, MASS_FLOOR = -30.0;
constexpr uint32_t DOMAIN_TOKEN = 0, DOMAIN_XTC = 1;

template <class To, class From> inline To bits_of(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To out;
    std::memcpy(&out, &x, sizeof out);
    return out;
}
inline uint64_t as_bits(double x) { return bits_of<uint64_t>(x); }
inline double as_double(uint64_t b) { return bits_of<double>(b); }

// ---------------------------------------------------------------------------------------- exp, log

// e^x for -708 <= x <= 0. The low mantissa bits of t hold k; shifted left by 52 they scale p by 2^k
// without a conversion.
inline double exp_live(double x) {
    double t = x * LOG2E + ROUND, k = t - ROUND;
    double r = (x - k * LN2_HI) - k * LN2_LO;
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 1.0 / 2.0;
    p = p * r + 1.0;
    p = p * r + 1.0;
    return as_double(as_bits(p) + (as_bits(t) << 52));
}

inline double log_of(double x) {
    uint64_t bits = as_bits(x), mantissa = bits & MANTISSA;
    uint64_t upper = mantissa >= SQRT2_MANTISSA;
    double k = (double)((int64_t)(bits >> 52) - 1023 + (int64_t)upper);
    double m = as_double(mantissa | ((1023 - upper) << 52));
    double f = m - 1.0, s = f / (2.0 + f), z = s * s;
    double p = 1.0 / 21.0;
    p = p * z + 1.0 / 19.0;
    p = p * z + 1.0 / 17.0;
    p = p * z + 1.0 / 15.0;
    p = p * z + 1.0 / 13.0;
    p = p * z + 1.0 / 11.0;
    p = p * z + 1.0 / 9.0;
    p = p * z + 1.0 / 7.0;
    p = p * z + 1.0 / 5.0;
    p = p * z + 1.0 / 3.0;
    p = p * z + 1.0;
    return k * LN2_HI + ((s + s) * p + k * LN2_LO);
}

// ------------------------------------------------------------------------------------------ masses

// floor(x) for 0 <= x < 2^52. Without a vector conversion to int64 it uses the mantissa bits, which
// vectorises.
inline int64_t floor_int(double x) {
#if defined(__AVX512DQ__) || defined(__aarch64__)
    return (int64_t)x;
#else
    double t = (x + 0x1p52) - 0x1p52;
    t -= t > x ? 1.0 : 0.0;
    return (int64_t)(as_bits(t + 0x1p52) - as_bits(0x1p52));
#endif
}

// Masses are fixed-point: floor(e^d * 2^42). e^-30 * 2^42 is below 1, so the mass of smaller d is
// 0.
inline double above_floor(double d) { return d > MASS_FLOOR ? d : MASS_FLOOR; }
inline int64_t mass_of(double d) { return floor_int(exp_live(above_floor(d)) * MASS_ONE); }

// floor(e^d * -d * 2^42): the contribution of an id to the mean of -d (the entropy).
inline int64_t spread_of(double d) {
    return d > MASS_FLOOR ? floor_int((exp_live(d) * -d) * MASS_ONE) : 0;
}

inline int64_t sum_of(const int64_t* x, int64_t n) {
    int64_t total = 0;  // integers: the order does not matter
    for (int64_t i = 0; i < n; i++) total += x[i];
    return total;
}

inline double log_mass(int64_t total) { return log_of((double)total / MASS_ONE); }

inline int64_t mass_needed(double share, int64_t total) {
    double asked = share * (double)total;
    int64_t needed = (int64_t)asked;
    needed += asked > (double)needed;
    return std::max<int64_t>(1, std::min(total, needed));
}

// ------------------------------------------------------------------------------------------- noise

constexpr uint32_t PHILOX_M0 = 0xD2511F53u, PHILOX_M1 = 0xCD9E8D57u, PHILOX_W0 = 0x9E3779B9u,
                   PHILOX_W1 = 0xBB67AE85u;

// The 64 random bits of one id at one position: Philox 4x32-10.
inline uint64_t noise_bits(uint64_t key, int64_t position, uint32_t id, uint32_t domain) {
    uint32_t c0 = id >> 1, c1 = (uint32_t)position, c2 = (uint32_t)((uint64_t)position >> 32),
             c3 = domain;
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)c0 * PHILOX_M0, p1 = (uint64_t)c2 * PHILOX_M1;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
    return id & 1 ? (c2 | (uint64_t)c3 << 32) : (c0 | (uint64_t)c1 << 32);
}

inline double uniform_of(uint64_t bits) { return ((double)(int64_t)(bits >> 12) + 0.5) * 0x1p-52; }

// Vectorised Philox in 64-bit lanes of which the lower half is used: vector units have a 32 x 32 ->
// 64 bit multiply, which compilers do not find in a plain loop.
#if defined(__AVX512F__)
constexpr int VECTOR = 64;
#elif defined(__AVX2__)
constexpr int VECTOR = 32;
#else
constexpr int VECTOR = 16;
#endif
typedef uint64_t Wide __attribute__((vector_size(VECTOR)));
typedef uint32_t Narrow __attribute__((vector_size(VECTOR / 2)));
constexpr int WIDE = VECTOR / 8, COUNTERS = 16;  // counters per vector, counters per call

inline __attribute__((always_inline)) Wide product(Wide a, uint32_t m) {
#if defined(__AVX512F__)
    return (Wide)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(m));
#elif defined(__AVX2__)
    return (Wide)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(m));
#elif defined(__SSE2__)
    return (Wide)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(m));
#elif defined(__aarch64__)
    return (Wide)vmull_u32(vmovn_u64((uint64x2_t)a), vdup_n_u32(m));
#else
    return (a & (Wide{} + 0xFFFFFFFFu)) * (Wide{} + m);
#endif
}

// For each of COUNTERS counters (id / 2): the upper 32 noise bits of its even and of its odd id, in
// the lower half of each entry. counters(at) returns the vector of counters from `at` on. Two
// vectors at a time hide the latency of the multiplies.
template <class Counters>
inline void noise_words(uint64_t key, int64_t position, Counters counters, uint64_t* even,
                        uint64_t* odd) {
    for (int at = 0; at < COUNTERS; at += 2 * WIDE) {
        Wide c0[2], c1[2], c2[2], c3[2];
        uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
        for (int v = 0; v < 2; v++) {
            c0[v] = counters(at + v * WIDE);
            c1[v] = Wide{} + (uint32_t)position;
            c2[v] = Wide{} + (uint32_t)((uint64_t)position >> 32);
            c3[v] = Wide{} + DOMAIN_TOKEN;
        }
        for (int round = 0; round < 10; round++) {
            for (int v = 0; v < 2; v++) {
                Wide p0 = product(c0[v], PHILOX_M0), p1 = product(c2[v], PHILOX_M1);
                c0[v] = (p1 >> 32) ^ c1[v] ^ (Wide{} + k0);
                c2[v] = (p0 >> 32) ^ c3[v] ^ (Wide{} + k1);
                c1[v] = p1;
                c3[v] = p0;
            }
            k0 += PHILOX_W0;
            k1 += PHILOX_W1;
        }
        for (int v = 0; v < 2; v++) {
            std::memcpy(even + at + v * WIDE, &c1[v], VECTOR);
            std::memcpy(odd + at + v * WIDE, &c3[v], VECTOR);
        }
    }
}

// Counters of arbitrary ids, and consecutive counters from `first` on.
inline auto counters_of(const int32_t* ids) {
    return [ids](int at) {
        Narrow some;
        std::memcpy(&some, ids + at, sizeof some);
        return __builtin_convertvector(some, Wide) >> 1;
    };
}
inline auto counters_from(uint64_t first) {
    return [first](int at) {
        static constexpr uint64_t STEPS[8] = {0, 1, 2, 3, 4, 5, 6, 7};
        Wide steps;
        std::memcpy(&steps, STEPS, VECTOR);
        return steps + (first + (uint64_t)at);
    };
}

}  // namespace
}  // namespace VB_NS
