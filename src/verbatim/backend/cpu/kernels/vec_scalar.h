// Portable C++: four lanes in arrays. The reference for the bits of the other vector layers.
#pragma once
#include <cmath>

namespace VB_NS {

constexpr int VL = 4;
constexpr int BYTE_BIAS = 0;  // 8-bit weights are stored signed
// A table, one primitive per line.
// clang-format off
#define VB_EACH for (int i = 0; i < VL; i++)

struct vf { float v[4]; };
struct vi { int32_t v[4]; };
struct vm { bool v[4]; };
struct vb { uint8_t v[16]; };
struct act32 { const int8_t* p; };

static inline vf load(const float* p) { vf r; std::memcpy(r.v, p, 16); return r; }
static inline void store(float* p, vf a) { std::memcpy(p, a.v, 16); }
static inline vf set1(float x) { return {{x, x, x, x}}; }
static inline vf add(vf a, vf b) { vf r; VB_EACH r.v[i] = a.v[i] + b.v[i]; return r; }
static inline vf sub(vf a, vf b) { vf r; VB_EACH r.v[i] = a.v[i] - b.v[i]; return r; }
static inline vf mul(vf a, vf b) { vf r; VB_EACH r.v[i] = a.v[i] * b.v[i]; return r; }
static inline vf div(vf a, vf b) { vf r; VB_EACH r.v[i] = a.v[i] / b.v[i]; return r; }
static inline vf fma(vf a, vf b, vf c) {
    vf r; VB_EACH r.v[i] = std::fma(a.v[i], b.v[i], c.v[i]); return r;
}
static inline vf vmax(vf a, vf b) {
    vf r; VB_EACH r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return r;
}
static inline vf vmin(vf a, vf b) {
    vf r; VB_EACH r.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return r;
}
static inline vf vabs(vf a) { vf r; VB_EACH r.v[i] = std::fabs(a.v[i]); return r; }
static inline vm lt(vf a, vf b) { vm r; VB_EACH r.v[i] = a.v[i] < b.v[i]; return r; }
static inline vf select(vm m, vf a, vf b) {
    vf r; VB_EACH r.v[i] = m.v[i] ? a.v[i] : b.v[i]; return r;
}
static inline vf sqrt1(vf a) { vf r; VB_EACH r.v[i] = std::sqrt(a.v[i]); return r; }

static inline vi iload(const int32_t* p) { vi r; std::memcpy(r.v, p, 16); return r; }
static inline void istore(int32_t* p, vi a) { std::memcpy(p, a.v, 16); }
static inline vi iset1(int32_t x) { return {{x, x, x, x}}; }
static inline vi iadd(vi a, vi b) {
    vi r; VB_EACH r.v[i] = (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i]); return r;
}
static inline vi isub(vi a, vi b) {
    vi r; VB_EACH r.v[i] = (int32_t)((uint32_t)a.v[i] - (uint32_t)b.v[i]); return r;
}
template <int N> static inline vi sar(vi a) { vi r; VB_EACH r.v[i] = a.v[i] >> N; return r; }
template <int N> static inline vi shl(vi a) {
    vi r; VB_EACH r.v[i] = (int32_t)((uint32_t)a.v[i] << N); return r;
}
static inline vf tofloat(vi a) { vf r; VB_EACH r.v[i] = (float)a.v[i]; return r; }
static inline vf bits(vi a) { vf r; std::memcpy(r.v, a.v, 16); return r; }
static inline vi ibits(vf a) { vi r; std::memcpy(r.v, a.v, 16); return r; }
static inline vi toint(vf a) {  // rounds to nearest even; |a| is below 2^22
    vi r;
    VB_EACH r.v[i] = (int32_t)((a.v[i] + 12582912.0f) - 12582912.0f);
    return r;
}

// Horizontal operations. They are exact, so their order does not matter.
static inline float hmax(vf a) {
    float m = a.v[0]; for (int i = 1; i < 4; i++) m = a.v[i] > m ? a.v[i] : m; return m;
}
static inline int32_t hsum(vi a) { return a.v[0] + a.v[1] + a.v[2] + a.v[3]; }

// clang-format on
static inline float half_to_float(uint16_t h) {
    uint32_t s = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 0x3ff, u;
    if (e == 31) u = s | 0x7f800000u | (m << 13);
    else if (e) u = s | ((e + 112) << 23) | (m << 13);
    else {
        float f = (float)m * 5.9604644775390625e-8f;  // m * 2^-24, exact
        std::memcpy(&u, &f, 4);
        u |= s;
    }
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}
static inline uint16_t float_to_half(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    uint32_t s = (u >> 16) & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000u) return (uint16_t)(s | 0x7e00);
    if (a >= 0x477ff000u) return (uint16_t)(s | 0x7c00);  // rounds to 65536 or more: infinity
    if (a < 0x38800000u) {  // below 2^-14: subnormal, in units of 2^-24
        float f;
        std::memcpy(&f, &a, 4);
        // The last place of the sum is 2^-24, so this addition rounds to nearest even.
        f += 0.5f;
        uint32_t r;
        std::memcpy(&r, &f, 4);
        return (uint16_t)(s | (r - 0x3f000000u));
    }
    a += 0xfff + ((a >> 13) & 1);
    return (uint16_t)(s | ((a - 0x38000000u) >> 13));
}
// clang-format off
static inline vf load_f16(const uint16_t* p) {
    vf r; VB_EACH r.v[i] = half_to_float(p[i]); return r;
}
static inline void store_f16(uint16_t* p, vf a) { VB_EACH p[i] = float_to_half(a.v[i]); }
static inline vf load_bf16(const uint16_t* p) {
    vf r;
    VB_EACH { uint32_t u = (uint32_t)p[i] << 16; std::memcpy(&r.v[i], &u, 4); }
    return r;
}
static inline vf load_u8(const uint8_t* p) { vf r; VB_EACH r.v[i] = (float)p[i]; return r; }
static inline vf load_i8(const int8_t* p) { vf r; VB_EACH r.v[i] = (float)p[i]; return r; }
static inline void store_i8(int8_t* p, vi a) { VB_EACH p[i] = (int8_t)a.v[i]; }

static inline vb bload(const uint8_t* p) { vb r; std::memcpy(r.v, p, 16); return r; }
static inline vb band(vb a, uint8_t m) {
    vb r; for (int i = 0; i < 16; i++) r.v[i] = a.v[i] & m; return r;
}
template <int N> static inline vb bshr(vb a) {
    vb r; for (int i = 0; i < 16; i++) r.v[i] = (uint8_t)(a.v[i] >> N); return r;
}
// clang-format on
// (a >> N, or a << -N) & m: selects bits of a plane of high bits.
template <int N> static inline vb bpick(vb a, uint8_t m) {
    vb r;
    for (int i = 0; i < 16; i++)
        r.v[i] = (uint8_t)((N >= 0 ? a.v[i] >> (N & 7) : a.v[i] << (-N & 7)) & m);
    return r;
}
static inline vb blookup(const uint8_t* table, vb k) {
    vb r;
    for (int i = 0; i < 16; i++) r.v[i] = table[k.v[i]];
    return r;
}
static inline vb bor(vb a, vb b) {
    vb r;
    for (int i = 0; i < 16; i++) r.v[i] = a.v[i] | b.v[i];
    return r;
}

static inline act32 aload(const int8_t* p) { return {p}; }
// c + the sum over groups g = G .. G+N-1 of the 4-byte dot products of w[g] and activation bytes 4g
// .. 4g+3. MAXW is the largest |w|.
template <int MAXW, int G, int N> static inline vi dot(vi c, const vb* w, act32 a) {
    for (int g = G; g < G + N; g++) VB_EACH {
            int s = 0;
            for (int j = 0; j < 4; j++)
                s += (MAXW > 127 ? (int)(int8_t)w[g].v[4 * i + j] : (int)w[g].v[4 * i + j]) *
                     a.p[4 * g + j];
            c.v[i] += s;
        }
    return c;
}
#undef VB_EACH

}  // namespace VB_NS
