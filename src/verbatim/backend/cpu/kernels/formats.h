// Unpacking of the weights and scales of each packed format: the only part of a matrix product that
// depends on the format.
//
//   weights(q, s, w)   the block's 8 vectors (4 bytes per lane) for native vector s of the panel
//   scale / minimum    of the block (GS 32), or of its half j (GS 16): exact products
//
// The integer sum starts at -OFFSET * (sum of activations), so that quants can be stored unsigned.
#pragma once
#include "kernels.h"
#include "vec.h"

namespace VB_NS {

using verbatim::Kind;

static inline void nibbles(const uint8_t* q, int s, vb* w) {
    VB_UNROLL(4)
    for (int i = 0; i < 4; i++) {
        vb v = bload(q + 64 * i + s * 4 * VL);
        w[2 * i] = band(v, 15);
        w[2 * i + 1] = bshr<4>(v);
    }
}
// One high bit for each of the 8 groups, shifted to bit TO.
template <int TO> static inline void plane1(const uint8_t* h, int s, vb* w) {
    vb v = bload(h + s * 4 * VL);
    constexpr uint8_t m = 1 << TO;
    w[0] = bor(w[0], bpick<0 - TO>(v, m));
    w[1] = bor(w[1], bpick<1 - TO>(v, m));
    w[2] = bor(w[2], bpick<2 - TO>(v, m));
    w[3] = bor(w[3], bpick<3 - TO>(v, m));
    w[4] = bor(w[4], bpick<4 - TO>(v, m));
    w[5] = bor(w[5], bpick<5 - TO>(v, m));
    w[6] = bor(w[6], bpick<6 - TO>(v, m));
    w[7] = bor(w[7], bpick<7 - TO>(v, m));
}
// 2-bit quants: 4 groups in each of two vectors.
static inline void pairs(const uint8_t* q, int s, vb* w) {
    VB_UNROLL(2)
    for (int i = 0; i < 2; i++) {
        vb v = bload(q + 64 * i + s * 4 * VL);
        w[4 * i] = band(v, 3);
        w[4 * i + 1] = bpick<2>(v, 3);
        w[4 * i + 2] = bpick<4>(v, 3);
        w[4 * i + 3] = bshr<6>(v);
    }
}

// Scale readers. sp and up point at the scales and super-block scales of this panel; b is the
// block, s the native vector, j the half of the block.
struct HalfScale {
    static constexpr int GS = 32, SB = 32, UB = 0;
    static constexpr bool MIN = false;
    const uint8_t *sp, *up;
    inline vf scale(int b, int s, int) const {
        return load_f16((const uint16_t*)(sp + (size_t)b * SB) + s * VL);
    }
    inline vf minimum(int, int, int) const { return set1(0.0f); }
};
struct FloatScale : HalfScale {
    static constexpr int SB = 64;
    inline vf scale(int b, int s, int) const {
        return load((const float*)(sp + (size_t)b * SB) + s * VL);
    }
};
struct FloatScale16 : HalfScale {  // one scale for each half of the block
    static constexpr int GS = 16, SB = 128;
    inline vf scale(int b, int s, int j) const {
        return load((const float*)(sp + (size_t)b * SB) + 16 * j + s * VL);
    }
};
struct HalfScaleMin : HalfScale {
    static constexpr int SB = 64;
    static constexpr bool MIN = true;
    inline vf scale(int b, int s, int) const {
        return load_f16((const uint16_t*)(sp + (size_t)b * SB) + s * VL);
    }
    inline vf minimum(int b, int s, int) const {
        return load_f16((const uint16_t*)(sp + (size_t)b * SB) + 16 + s * VL);
    }
};
struct SuperScaleMin {  // 8 blocks of 32 share one d and dmin
    static constexpr int GS = 32, SB = 32, UB = 64;
    static constexpr bool MIN = true;
    const uint8_t *sp, *up;
    inline vf d(int b, int s, int o) const {
        return load_f16((const uint16_t*)(up + (size_t)(b >> 3) * UB) + o + s * VL);
    }
    inline vf scale(int b, int s, int) const {
        return mul(d(b, s, 0), load_u8(sp + (size_t)b * SB + s * VL));
    }
    inline vf minimum(int b, int s, int) const {
        return sub(set1(0.0f), mul(d(b, s, 16), load_u8(sp + (size_t)b * SB + 16 + s * VL)));
    }
};
struct SuperScale16 {  // 16 blocks of 16 share one d
    static constexpr int GS = 16, SB = 32, UB = 32;
    static constexpr bool MIN = false;
    const uint8_t *sp, *up;
    inline vf scale(int b, int s, int j) const {
        return mul(load_f16((const uint16_t*)(up + (size_t)(b >> 3) * UB) + s * VL),
                   load_i8((const int8_t*)(sp + (size_t)b * SB + 16 * j) + s * VL));
    }
    inline vf minimum(int, int, int) const { return set1(0.0f); }
};
struct SuperScaleMin16 {
    static constexpr int GS = 16, SB = 64, UB = 64;
    static constexpr bool MIN = true;
    const uint8_t *sp, *up;
    inline vf d(int b, int s, int o) const {
        return load_f16((const uint16_t*)(up + (size_t)(b >> 3) * UB) + o + s * VL);
    }
    inline vf scale(int b, int s, int j) const {
        return mul(d(b, s, 0), load_u8(sp + (size_t)b * SB + 16 * j + s * VL));
    }
    inline vf minimum(int b, int s, int j) const {
        return sub(set1(0.0f),
                   mul(d(b, s, 16), load_u8(sp + (size_t)b * SB + 32 + 16 * j + s * VL)));
    }
};

struct F4 : HalfScale {
    static constexpr int QB = 256, MAXW = 15, OFFSET = 8;
    static inline void weights(const uint8_t* q, int s, vb* w) { nibbles(q, s, w); }
};
struct F4M : HalfScaleMin {
    static constexpr int QB = 256, MAXW = 15, OFFSET = 0;
    static inline void weights(const uint8_t* q, int s, vb* w) { nibbles(q, s, w); }
};
struct F5 : HalfScale {
    static constexpr int QB = 320, MAXW = 31, OFFSET = 16;
    static inline void weights(const uint8_t* q, int s, vb* w) {
        nibbles(q, s, w);
        plane1<4>(q + 256, s, w);
    }
};
struct F5M : HalfScaleMin {
    static constexpr int QB = 320, MAXW = 31, OFFSET = 0;
    static inline void weights(const uint8_t* q, int s, vb* w) {
        nibbles(q, s, w);
        plane1<4>(q + 256, s, w);
    }
};
template <class S> struct F8T : S {
    static constexpr int QB = 512, MAXW = 128, OFFSET = BYTE_BIAS;
    static inline void weights(const uint8_t* q, int s, vb* w) {
        VB_UNROLL(8)
        for (int i = 0; i < 8; i++) w[i] = bload(q + 64 * i + s * 4 * VL);
    }
};
using F8 = F8T<HalfScale>;
using F8W = F8T<FloatScale>;
using F8H = F8T<FloatScale16>;
// 4-bit indices into a table of 16 values, stored as value + OFFSET.
template <class T> struct Table4 : FloatScale {
    static constexpr int QB = 256, MAXW = T::MAXW, OFFSET = T::OFFSET;
    static inline void weights(const uint8_t* q, int s, vb* w) {
        static constexpr T table{};
        nibbles(q, s, w);
        VB_UNROLL(8)
        for (int i = 0; i < 8; i++) w[i] = blookup(table.v, w[i]);
    }
};
struct Iq4Table {
    static constexpr int MAXW = 128, OFFSET = BYTE_BIAS;
    uint8_t v[16];
    constexpr Iq4Table() : v{} {
        for (int i = 0; i < 16; i++) v[i] = (uint8_t)(verbatim::IQ4_VALUES[i] + OFFSET);
    }
};
struct E2m1Table {
    static constexpr int MAXW = 24, OFFSET = 12;
    uint8_t v[16];
    constexpr E2m1Table() : v{} {
        for (int i = 0; i < 16; i++) v[i] = (uint8_t)(verbatim::E2M1_VALUES[i] + OFFSET);
    }
};
using F4I = Table4<Iq4Table>;
using F4E = Table4<E2m1Table>;
struct F4K : SuperScaleMin {
    static constexpr int QB = 256, MAXW = 15, OFFSET = 0;
    static inline void weights(const uint8_t* q, int s, vb* w) { nibbles(q, s, w); }
};
struct F5K : SuperScaleMin {
    static constexpr int QB = 320, MAXW = 31, OFFSET = 0;
    static inline void weights(const uint8_t* q, int s, vb* w) {
        nibbles(q, s, w);
        plane1<4>(q + 256, s, w);
    }
};
struct F6K : SuperScale16 {
    static constexpr int QB = 384, MAXW = 63, OFFSET = 32;
    static inline void weights(const uint8_t* q, int s, vb* w) {
        nibbles(q, s, w);
        VB_UNROLL(2)
        for (int i = 0; i < 2; i++) {
            vb v = bload(q + 256 + 64 * i + s * 4 * VL);
            w[4 * i] = bor(w[4 * i], bpick<-4>(v, 0x30));
            w[4 * i + 1] = bor(w[4 * i + 1], bpick<-2>(v, 0x30));
            w[4 * i + 2] = bor(w[4 * i + 2], bpick<0>(v, 0x30));
            w[4 * i + 3] = bor(w[4 * i + 3], bpick<2>(v, 0x30));
        }
    }
};
struct F3K : SuperScale16 {
    static constexpr int QB = 192, MAXW = 7, OFFSET = 4;
    static inline void weights(const uint8_t* q, int s, vb* w) {
        pairs(q, s, w);
        plane1<2>(q + 128, s, w);
    }
};
struct F2K : SuperScaleMin16 {
    static constexpr int QB = 128, MAXW = 3, OFFSET = 0;
    static inline void weights(const uint8_t* q, int s, vb* w) { pairs(q, s, w); }
};

}  // namespace VB_NS
