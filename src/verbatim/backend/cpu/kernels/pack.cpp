// Packs the quantised blocks of a GGUF tensor into panels of 16 rows (kernels.h), and unpacks
// single rows for the embedding. Portable; packing runs once, at load.
#include <cmath>
#include <cstring>

#include "kernels.h"

#define VB_NS verbatim_portable
#include "vec_scalar.h"

namespace verbatim {

using verbatim_portable::half_to_float;

const KindInfo KIND[KINDS] = {
    {"f32", 2048, 0, 0, false},  {"f16", 1024, 0, 0, false},  {"bf16", 1024, 0, 0, false},
    {"q4_0", 256, 32, 0, true},  {"q4_1", 256, 64, 0, true},  {"q5_0", 320, 32, 0, true},
    {"q5_1", 320, 64, 0, true},  {"q8_0", 512, 32, 0, true},  {"q8_k", 512, 64, 0, true},
    {"q4_k", 256, 32, 64, true}, {"q5_k", 320, 32, 64, true}, {"q6_k", 384, 32, 32, true},
    {"q3_k", 192, 32, 32, true}, {"q2_k", 128, 64, 64, true}, {"q8_h", 512, 128, 0, true},
    {"iq4", 256, 64, 0, true},   {"mxfp4", 256, 64, 0, true},
};

const SourceType* source_type(const char* name) {
    static const SourceType TYPES[] = {
        {"f32", K_F32, 1, 4},     {"f16", K_F16, 1, 2},     {"bf16", K_BF16, 1, 2},
        {"q4_0", K_4, 32, 18},    {"q4_1", K_4M, 32, 20},   {"q5_0", K_5, 32, 22},
        {"q5_1", K_5M, 32, 24},   {"q8_0", K_8, 32, 34},    {"q8_k", K_8W, 256, 292},
        {"q4_k", K_4K, 256, 144}, {"q5_k", K_5K, 256, 176}, {"q6_k", K_6K, 256, 210},
        {"q3_k", K_3K, 256, 110}, {"q2_k", K_2K, 256, 84},  {"q8_f", K_8W, 32, 36},
        {"q8_h", K_8H, 32, 40},   {"iq4_nl", K_4I, 32, 18}, {"iq4_xs", K_4I, 256, 136},
        {"mxfp4", K_4E, 32, 17},
    };
    for (const SourceType& type : TYPES)
        if (!std::strcmp(name, type.name)) return &type;
    return nullptr;
}

size_t panel_bytes(Kind kind, int k) {
    const KindInfo& i = KIND[kind];
    size_t n = i.quantised ? (size_t)(k / 32) * (i.qb + i.sb) + (size_t)(k / 256) * i.ub
                           : (size_t)k * (i.qb / 32);
    return (n + 63) / 64 * 64;
}

namespace {

// One block of 32 values of one row, unpacked. Scales stay the integers and halves of the file, so
// nothing is rounded.
struct UnpackedBlock {
    uint8_t q[32];         // unsigned quants; 8-bit formats: the signed byte
    uint16_t d, m;         // f16 scale and minimum of the block, or d and dmin of the super-block
    float d32[2];          // f32 scales of the halves of the block
    uint8_t sc[2], mn[2];  // integer scales and minima of the halves of the block
};

inline uint16_t u16(const uint8_t* p) {
    uint16_t v;
    std::memcpy(&v, p, 2);
    return v;
}

// Inlined with a constant kind: the switches vanish, and the loops become vector instructions.
#define VB_INLINE inline __attribute__((always_inline))

VB_INLINE void read_legacy_block(Kind kind, const uint8_t* p, UnpackedBlock& o) {
    bool five = kind == K_5 || kind == K_5M, min = kind == K_4M || kind == K_5M;
    o.d = u16(p);
    p += 2;
    if (min) {
        o.m = u16(p);
        p += 2;
    }
    uint32_t high = 0;
    if (five) {
        std::memcpy(&high, p, 4);
        p += 4;
    } else {
        for (int j = 0; j < 16; j++) o.q[j] = p[j] & 15;
        for (int j = 0; j < 16; j++) o.q[j + 16] = p[j] >> 4;
        return;
    }
    for (int j = 0; j < 16; j++) {
        o.q[j] = (uint8_t)((p[j] & 15) | (((high >> j) & 1) << 4));
        o.q[j + 16] = (uint8_t)((p[j] >> 4) | (((high >> (j + 16)) & 1) << 4));
    }
}

// Scale and minimum j of the 8 that q4_k and q5_k pack into 12 bytes, 6 bits each.
VB_INLINE void read_scale_min(const uint8_t* s, int j, uint8_t* sc, uint8_t* mn) {
    if (j < 4) {
        *sc = s[j] & 63;
        *mn = s[j + 4] & 63;
    } else {
        *sc = (uint8_t)((s[j + 4] & 15) | ((s[j - 4] >> 6) << 4));
        *mn = (uint8_t)((s[j + 4] >> 4) | ((s[j] >> 6) << 4));
    }
}

// Block b = 0..7 of the super-block at p.
VB_INLINE void read_super_block(Kind kind, const uint8_t* p, int b, UnpackedBlock& o) {
    switch (kind) {
        case K_4K:
        case K_5K: {
            o.d = u16(p);
            o.m = u16(p + 2);
            read_scale_min(p + 4, b, &o.sc[0], &o.mn[0]);
            const uint8_t* qh = p + 16;
            const uint8_t* qs = p + (kind == K_5K ? 48 : 16) + 32 * (b / 2);
            for (int j = 0; j < 32; j++) {
                o.q[j] = b & 1 ? qs[j] >> 4 : qs[j] & 15;
                if (kind == K_5K) o.q[j] |= (uint8_t)(((qh[j] >> b) & 1) << 4);
            }
            return;
        }
        case K_6K: {
            const uint8_t *ql = p + 64 * (b / 4), *qh = p + 128 + 32 * (b / 4), *sc = p + 192;
            // Parts of 32 values: low nibbles of ql[0..31] and ql[32..63], then the high nibbles.
            int part = b % 4;
            for (int j = 0; j < 32; j++) {
                uint8_t low = ql[j + 32 * (part & 1)];
                o.q[j] = (uint8_t)((part < 2 ? low & 15 : low >> 4) |
                                   (((qh[j] >> (2 * part)) & 3) << 4));
            }
            o.sc[0] = sc[2 * b];
            o.sc[1] = sc[2 * b + 1];
            o.d = u16(p + 208);
            return;
        }
        case K_2K: {
            const uint8_t *sc = p, *qs = p + 16 + 32 * (b / 4);
            for (int j = 0; j < 32; j++) o.q[j] = (qs[j] >> (2 * (b % 4))) & 3;
            for (int h = 0; h < 2; h++) {
                o.sc[h] = sc[2 * b + h] & 15;
                o.mn[h] = sc[2 * b + h] >> 4;
            }
            o.d = u16(p + 80);
            o.m = u16(p + 82);
            return;
        }
        case K_3K: {
            const uint8_t *hm = p, *qs = p + 32 + 32 * (b / 4), *s = p + 96;
            for (int j = 0; j < 32; j++)
                o.q[j] = (uint8_t)(((qs[j] >> (2 * (b % 4))) & 3) | (((hm[j] >> b) & 1) << 2));
            for (int h = 0; h < 2; h++) {
                // 16 scales of 6 bits: the low 4 bits in 8 bytes, the high 2 in the last 4 bytes.
                int i = 2 * b + h;
                int low = i < 8 ? s[i] & 15 : s[i - 8] >> 4;
                int high = (s[8 + i % 4] >> (2 * (i / 4))) & 3;
                o.sc[h] = (uint8_t)(int8_t)((low | (high << 4)) - 32);
            }
            o.d = u16(p + 108);
            return;
        }
        default: return;
    }
}

// E8M0: a power of two, halved because E2M1_VALUES are doubled. The two smallest are subnormal.
// Infinite where the largest of E2M1_VALUES would overflow.
float half_of_e8m0(uint8_t e) {
    uint32_t bits = e > 252 ? 0x7f800000u : e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Part b of a block of 4-bit indices: 16 bytes of nibbles and one scale.
VB_INLINE void read_indices(Kind kind, int values, const uint8_t* p, int b, UnpackedBlock& o) {
    const uint8_t* qs;
    if (kind == K_4E) {
        o.d32[0] = half_of_e8m0(p[0]);
        qs = p + 1;
    } else if (values == 32) {
        o.d32[0] = half_to_float(u16(p));
        qs = p + 2;
    } else {  // iq4_xs: d, 8 times 2 high bits and 8 times 4 low bits of the scales, nibbles
        int high = (u16(p + 2) >> (2 * b)) & 3, low = (p[4 + b / 2] >> (4 * (b & 1))) & 15;
        o.d32[0] = half_to_float(u16(p)) * (float)((low | high << 4) - 32);
        qs = p + 8 + 16 * b;
    }
    for (int j = 0; j < 16; j++) o.q[j] = qs[j] & 15;
    for (int j = 0; j < 16; j++) o.q[j + 16] = qs[j] >> 4;
}

VB_INLINE void read_block(Kind kind, const SourceType& type, const uint8_t* row, int b,
                          UnpackedBlock& o) {
    const int parts = type.values / 32, part = b % parts;
    const uint8_t* p = row + (size_t)(b / parts) * type.bytes;
    switch (kind) {
        case K_4:
        case K_4M:
        case K_5:
        case K_5M: read_legacy_block(kind, p, o); break;
        case K_8:
            o.d = u16(p);
            std::memcpy(o.q, p + 2, 32);
            break;
        case K_8W:
            std::memcpy(o.d32, p, 4);
            std::memcpy(o.q, p + 4 + 32 * part, 32);
            break;
        case K_8H:
            std::memcpy(o.d32, p, 8);
            std::memcpy(o.q, p + 8, 32);
            break;
        case K_4I:
        case K_4E: read_indices(kind, type.values, p, part, o); break;
        default: read_super_block(kind, p, part, o);
    }
}

inline uint32_t word(const uint8_t* q, int g) {
    uint32_t v;
    std::memcpy(&v, q + 4 * g, 4);
    return v;
}
inline void put(uint8_t* p, uint32_t v) { std::memcpy(p, &v, 4); }

// Writes the quants of one row into lane `lane` of a panel block. Byte j of group g is input 4g +
// j; a group is one 32-bit word.
VB_INLINE void pack_quants(Kind kind, const UnpackedBlock& o, int lane, int bias, uint8_t* q) {
    constexpr uint32_t ONE = 0x01010101u, THREE = 0x03030303u, LOW = 0x0f0f0f0fu;
    uint8_t* at = q + lane * 4;
    uint32_t plane = 0;
    switch (kind) {
        case K_8:
        case K_8W:
        case K_8H:
            // x ^ 128 is x + 128 modulo 256.
            for (int g = 0; g < 8; g++) put(at + 64 * g, word(o.q, g) ^ (uint32_t)bias * ONE);
            return;
        case K_2K:
        case K_3K:
            for (int i = 0; i < 2; i++) {
                uint32_t v = 0;
                for (int g = 0; g < 4; g++) v |= (word(o.q, 4 * i + g) & THREE) << (2 * g);
                put(at + 64 * i, v);
            }
            if (kind == K_2K) return;
            for (int g = 0; g < 8; g++) plane |= ((word(o.q, g) >> 2) & ONE) << g;
            put(at + 128, plane);
            return;
        default: break;
    }
    for (int i = 0; i < 4; i++)
        put(at + 64 * i, (word(o.q, 2 * i) & LOW) | (word(o.q, 2 * i + 1) & LOW) << 4);
    if (kind == K_5 || kind == K_5M || kind == K_5K) {
        for (int g = 0; g < 8; g++) plane |= ((word(o.q, g) >> 4) & ONE) << g;
        put(at + 256, plane);
    }
    if (kind == K_6K)
        for (int i = 0; i < 2; i++) {
            uint32_t v = 0;
            for (int g = 0; g < 4; g++) v |= ((word(o.q, 4 * i + g) >> 4) & THREE) << (2 * g);
            put(at + 256 + 64 * i, v);
        }
}

uint8_t unpack_quant(Kind kind, const uint8_t* q, int lane, int i) {
    int g = i / 4, at = lane * 4 + i % 4;
    switch (kind) {
        case K_8:
        case K_8W:
        case K_8H: return q[64 * g + at];
        case K_2K:
        case K_3K: {
            uint8_t v = (q[64 * (g / 4) + at] >> (2 * (g % 4))) & 3;
            return kind == K_3K ? (uint8_t)(v | (((q[128 + at] >> g) & 1) << 2)) : v;
        }
        default: {
            uint8_t v = (q[64 * (g / 2) + at] >> (4 * (g & 1))) & 15;
            if (kind == K_5 || kind == K_5M || kind == K_5K)
                v |= (uint8_t)(((q[256 + at] >> g) & 1) << 4);
            if (kind == K_6K)
                v |= (uint8_t)(((q[256 + 64 * (g / 4) + at] >> (2 * (g % 4))) & 3) << 4);
            return v;
        }
    }
}

VB_INLINE void pack_scales(Kind kind, const UnpackedBlock& o, int b, int lane, uint8_t* sp,
                           uint8_t* up) {
    uint16_t* h = (uint16_t*)sp;
    uint16_t* u = (uint16_t*)up;
    switch (kind) {
        case K_4:
        case K_5:
        case K_8: h[lane] = o.d; return;
        case K_8H: ((float*)sp)[16 + lane] = o.d32[1]; [[fallthrough]];
        case K_8W:
        case K_4I:
        case K_4E: ((float*)sp)[lane] = o.d32[0]; return;
        case K_4M:
        case K_5M:
            h[lane] = o.d;
            h[16 + lane] = o.m;
            return;
        case K_4K:
        case K_5K:
            sp[lane] = o.sc[0];
            sp[16 + lane] = o.mn[0];
            if (b % 8 == 0) {
                u[lane] = o.d;
                u[16 + lane] = o.m;
            }
            return;
        case K_6K:
        case K_3K:
            sp[lane] = o.sc[0];
            sp[16 + lane] = o.sc[1];
            if (b % 8 == 0) u[lane] = o.d;
            return;
        case K_2K:
            for (int j = 0; j < 2; j++) {
                sp[16 * j + lane] = o.sc[j];
                sp[32 + 16 * j + lane] = o.mn[j];
            }
            if (b % 8 == 0) {
                u[lane] = o.d;
                u[16 + lane] = o.m;
            }
            return;
        default: return;
    }
}

// Scale and minimum of half j of a block, with the rounding of the matmul kernels.
void unpack_scales(Kind kind, const uint8_t* sp, const uint8_t* up, int lane, int j, float* s,
                   float* m) {
    const uint16_t* h = (const uint16_t*)sp;
    const uint16_t* u = (const uint16_t*)up;
    *m = 0.0f;
    switch (kind) {
        case K_4:
        case K_5:
        case K_8: *s = half_to_float(h[lane]); return;
        case K_8W:
        case K_4I:
        case K_4E: *s = ((const float*)sp)[lane]; return;
        case K_8H: *s = ((const float*)sp)[16 * j + lane]; return;
        case K_4M:
        case K_5M:
            *s = half_to_float(h[lane]);
            *m = half_to_float(h[16 + lane]);
            return;
        case K_4K:
        case K_5K:
            *s = half_to_float(u[lane]) * (float)sp[lane];
            *m = 0.0f - half_to_float(u[16 + lane]) * (float)sp[16 + lane];
            return;
        case K_6K:
        case K_3K: *s = half_to_float(u[lane]) * (float)(int8_t)sp[16 * j + lane]; return;
        case K_2K:
            *s = half_to_float(u[lane]) * (float)sp[16 * j + lane];
            *m = 0.0f - half_to_float(u[16 + lane]) * (float)sp[32 + 16 * j + lane];
            return;
        default: *s = 0; return;
    }
}

// The row of the first scale or float weight that is infinite or NaN (all exponent bits set); -1:
// all are finite. It must be found here: quantising the activations behind such a weight would turn
// it into an ordinary number. All streams of a panel interleave 16 rows.
template <class T> int non_finite_row(const uint8_t* part, size_t bytes, T exponent) {
    const T* value = (const T*)part;
    bool any = false;
    for (size_t i = 0; i < bytes / sizeof(T); i++) any |= (value[i] & exponent) == exponent;
    if (!any) return -1;
    size_t at = 0;
    while ((value[at] & exponent) != exponent) at++;
    return (int)(at % 16);
}
int non_finite_row(Kind kind, const uint8_t* panel, int k) {
    const KindInfo& info = KIND[kind];
    const uint8_t* scales = panel + (size_t)(k / 32) * info.qb;
    const size_t bytes = (size_t)(k / 32) * info.sb;
    switch (kind) {
        case K_F32: return non_finite_row<uint32_t>(panel, (size_t)k * 64, 0x7f800000);
        case K_F16: return non_finite_row<uint16_t>(panel, (size_t)k * 32, 0x7c00);
        case K_BF16: return non_finite_row<uint16_t>(panel, (size_t)k * 32, 0x7f80);
        case K_8W:
        case K_8H:
        case K_4I:
        case K_4E: return non_finite_row<uint32_t>(scales, bytes, 0x7f800000);
        default: break;
    }
    if (info.ub)
        return non_finite_row<uint16_t>(scales + bytes, (size_t)(k / 256) * info.ub, 0x7c00);
    return non_finite_row<uint16_t>(scales, bytes, 0x7c00);
}

int offset_of(Kind kind, int bias) {
    switch (kind) {
        case K_4: return 8;
        case K_5: return 16;
        case K_6K: return 32;
        case K_3K: return 4;
        case K_8:
        case K_8W:
        case K_8H: return bias;
        default: return 0;
    }
}

template <Kind kind>
void pack_rows(const SourceType& type, const uint8_t* src, size_t row_bytes, int rows, int k,
               int byte_bias, uint8_t* dst) {
    constexpr uint32_t LOW = 0x0f0f0f0fu;
    const KindInfo& info = KIND[kind];
    const int nb = k / 32;
    uint8_t* scales = dst + (size_t)nb * info.qb;
    uint8_t* supers = scales + (size_t)nb * info.sb;
    UnpackedBlock o{};
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < nb; b++) {
            uint8_t* q = dst + (size_t)b * info.qb;
            if constexpr (kind == K_4 || kind == K_4M) {
                // The file has inputs 0..15 in low nibbles, 16..31 in high ones, of 16 bytes.
                const uint8_t* p = src + r * row_bytes + (size_t)b * type.bytes;
                o.d = u16(p);
                if constexpr (kind == K_4M) o.m = u16(p + 2);
                p += kind == K_4M ? 4 : 2;
                for (int i = 0; i < 2; i++) {
                    const uint32_t even = word(p, 2 * i), odd = word(p, 2 * i + 1);
                    put(q + 64 * i + 4 * r, (even & LOW) | (odd & LOW) << 4);
                    put(q + 64 * (i + 2) + 4 * r, ((even >> 4) & LOW) | (odd & ~LOW));
                }
            } else {
                read_block(kind, type, src + r * row_bytes, b, o);
                pack_quants(kind, o, r, byte_bias, q);
            }
            pack_scales(kind, o, b, r, scales + (size_t)b * info.sb,
                        supers + (size_t)(b / 8) * info.ub);
        }
}

}  // namespace

int pack_panel(const SourceType& type, const uint8_t* src, size_t row_bytes, int rows, int k,
               int byte_bias, uint8_t* dst) {
    const Kind kind = type.kind;
    if (rows < 16) std::memset(dst, 0, panel_bytes(kind, k));
    if (!KIND[kind].quantised) {
        int size = KIND[kind].qb / 512;
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < k; i++)
                std::memcpy(dst + ((size_t)i * 16 + r) * size,
                            src + r * row_bytes + (size_t)i * size, size);
        return non_finite_row(kind, dst, k);
    }
    switch (kind) {
#define VB_KIND(name)                                                                 \
    case name: pack_rows<name>(type, src, row_bytes, rows, k, byte_bias, dst); break;
        VB_KIND(K_4)
        VB_KIND(K_4M)
        VB_KIND(K_5)
        VB_KIND(K_5M)
        VB_KIND(K_8)
        VB_KIND(K_8W)
        VB_KIND(K_8H)
        VB_KIND(K_4K)
        VB_KIND(K_5K)
        VB_KIND(K_6K)
        VB_KIND(K_3K)
        VB_KIND(K_2K)
        VB_KIND(K_4I)
        VB_KIND(K_4E)
#undef VB_KIND
        default: break;
    }
    return non_finite_row(kind, dst, k);
}

void unpack_row(const Packed& w, int row, int byte_bias, float* out) {
    const uint8_t* p = w.data + (size_t)(row / 16) * w.panel_bytes;
    int lane = row % 16;
    if (w.kind == K_F32) {
        for (int i = 0; i < w.k; i++) out[i] = ((const float*)p)[(size_t)i * 16 + lane];
        return;
    }
    if (w.kind == K_F16 || w.kind == K_BF16) {
        for (int i = 0; i < w.k; i++) {
            uint16_t h = ((const uint16_t*)p)[(size_t)i * 16 + lane];
            uint32_t u = (uint32_t)h << 16;
            if (w.kind == K_F16) out[i] = half_to_float(h);
            else std::memcpy(&out[i], &u, 4);
        }
        return;
    }
    const KindInfo& info = KIND[w.kind];
    int nb = w.k / 32, offset = offset_of(w.kind, byte_bias);
    const uint8_t* scales = p + (size_t)nb * info.qb;
    const uint8_t* supers = scales + (size_t)nb * info.sb;
    bool is_signed = (w.kind == K_8 || w.kind == K_8W || w.kind == K_8H) && byte_bias == 0;
    const int* table = w.kind == K_4I ? IQ4_VALUES : w.kind == K_4E ? E2M1_VALUES : nullptr;
    // The embedding of most models is q8_0, so it gets a faster path.
    if (w.kind == K_8) {
        for (int b = 0; b < nb; b++) {
            const float s = half_to_float(((const uint16_t*)(scales + (size_t)b * info.sb))[lane]);
            const uint8_t* q = p + (size_t)b * info.qb + 4 * lane;
            for (int i = 0; i < 32; i++) {
                const uint8_t v = q[i / 4 * 64 + i % 4];
                // + 0.0f: no negative zero, as in the fused form below.
                out[32 * b + i] = s * (float)(is_signed ? (int)(int8_t)v : (int)v - offset) + 0.0f;
            }
        }
        return;
    }
    for (int b = 0; b < nb; b++) {
        float s[2], m[2];
        for (int j = 0; j < 2; j++)
            unpack_scales(w.kind, scales + (size_t)b * info.sb, supers + (size_t)(b / 8) * info.ub,
                          lane, j, &s[j], &m[j]);
        for (int i = 0; i < 32; i++) {
            uint8_t v = unpack_quant(w.kind, p + (size_t)b * info.qb, lane, i);
            int q = table ? table[v] : is_signed ? (int)(int8_t)v : (int)v - offset;
            out[32 * b + i] = std::fma(s[i / 16], (float)q, m[i / 16]);
        }
    }
}

}  // namespace verbatim
