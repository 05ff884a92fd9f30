// ARM NEON with dot-product instructions (Armv8.2 dotprod). The i8mm matrix instructions are in
// matmul_i8mm.inc.
#pragma once
#include <arm_neon.h>

namespace VB_NS {

constexpr int VL = 4;
constexpr int BYTE_BIAS = 0;

using vf = float32x4_t;
using vi = int32x4_t;
using vm = uint32x4_t;
using vb = uint8x16_t;
struct act32 {
    int8x16_t lo, hi;
};

static inline vf load(const float* p) { return vld1q_f32(p); }
static inline void store(float* p, vf a) { vst1q_f32(p, a); }
static inline vf set1(float x) { return vdupq_n_f32(x); }
static inline vf add(vf a, vf b) { return vaddq_f32(a, b); }
static inline vf sub(vf a, vf b) { return vsubq_f32(a, b); }
static inline vf mul(vf a, vf b) { return vmulq_f32(a, b); }
static inline vf div(vf a, vf b) { return vdivq_f32(a, b); }
static inline vf fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
static inline vf vmax(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline vf vmin(vf a, vf b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
static inline vf vabs(vf a) { return vabsq_f32(a); }
static inline vm lt(vf a, vf b) { return vcltq_f32(a, b); }
static inline vf select(vm m, vf a, vf b) { return vbslq_f32(m, a, b); }
static inline vf sqrt1(vf a) { return vsqrtq_f32(a); }

static inline vi iload(const int32_t* p) { return vld1q_s32(p); }
static inline void istore(int32_t* p, vi a) { vst1q_s32(p, a); }
static inline vi iset1(int32_t x) { return vdupq_n_s32(x); }
static inline vi iadd(vi a, vi b) { return vaddq_s32(a, b); }
static inline vi isub(vi a, vi b) { return vsubq_s32(a, b); }
template <int N> static inline vi shl(vi a) { return vshlq_n_s32(a, N); }
template <int N> static inline vi sar(vi a) { return vshrq_n_s32(a, N); }
static inline vf tofloat(vi a) { return vcvtq_f32_s32(a); }
static inline vf bits(vi a) { return vreinterpretq_f32_s32(a); }
static inline vi ibits(vf a) { return vreinterpretq_s32_f32(a); }
static inline vi toint(vf a) { return vcvtnq_s32_f32(a); }

// Horizontal operations. They are exact, so their order does not matter.
static inline float hmax(vf a) { return vmaxvq_f32(a); }
static inline int32_t hsum(vi a) { return vaddvq_s32(a); }

static inline vf load_f16(const uint16_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
static inline void store_f16(uint16_t* p, vf a) {
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a)));
}
static inline vf load_bf16(const uint16_t* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
static inline vf load_u8(const uint8_t* p) {
    uint32_t u;
    std::memcpy(&u, p, 4);
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(u)))));
}
static inline vf load_i8(const int8_t* p) {
    uint32_t u;
    std::memcpy(&u, p, 4);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(u)))));
}
static inline void store_i8(int8_t* p, vi a) {
    int16x4_t h = vmovn_s32(a);
    int8x8_t b = vmovn_s16(vcombine_s16(h, h));
    uint32_t u = vget_lane_u32(vreinterpret_u32_s8(b), 0);
    std::memcpy(p, &u, 4);
}

static inline vb bload(const uint8_t* p) { return vld1q_u8(p); }
static inline vb band(vb a, uint8_t m) { return vandq_u8(a, vdupq_n_u8(m)); }
template <int N> static inline vb bshr(vb a) { return vshrq_n_u8(a, N); }
template <int N> static inline vb bpick(vb a, uint8_t m) {
    if constexpr (N > 0) return vandq_u8(vshrq_n_u8(a, N > 0 ? N : 1), vdupq_n_u8(m));
    else if constexpr (N < 0) return vandq_u8(vshlq_n_u8(a, N < 0 ? -N : 0), vdupq_n_u8(m));
    else return vandq_u8(a, vdupq_n_u8(m));
}
static inline vb bor(vb a, vb b) { return vorrq_u8(a, b); }
static inline vb blookup(const uint8_t* table, vb i) { return vqtbl1q_u8(vld1q_u8(table), i); }

static inline act32 aload(const int8_t* p) { return {vld1q_s8(p), vld1q_s8(p + 16)}; }
template <int MAXW, int G, int N> static inline vi dot(vi c, const vb* w, act32 a) {
#define VB_STEP(g, part, lane)         \
    if constexpr (G <= g && g < G + N) \
        c = vdotq_laneq_s32(c, vreinterpretq_s8_u8(w[g]), a.part, lane);
    // clang-format off
    VB_STEP(0, lo, 0) VB_STEP(1, lo, 1) VB_STEP(2, lo, 2) VB_STEP(3, lo, 3)
    VB_STEP(4, hi, 0) VB_STEP(5, hi, 1) VB_STEP(6, hi, 2) VB_STEP(7, hi, 3)
#undef VB_STEP
    return c;
    // clang-format on
}

}  // namespace VB_NS
