// Writes the e4m3 codes of an fp8 KV cache, and the scales with which attend.inc reads them. The
// rounding is that of backend/reference/kv_types.py.
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace verbatim {

// attend.inc reads e4m3 numbers divided by 256.
alignas(64) constexpr float E4M3_SCALES[BLOCK] = {
    256, 256, 256, 256, 256, 256, 256, 256, 256, 256, 256, 256, 256, 256, 256, 256};

inline uint32_t float_bits(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
}

// The nearest e4m3 number, ties to even; values out of range are clamped to the largest, 448.
inline uint8_t e4m3(float x) {
    uint32_t bits = float_bits(x), sign = (bits >> 24) & 0x80u;
    float size = x < 0.0f ? -x : x;
    if (!(size < 448.0f)) return (uint8_t)(sign | 0x7eu);
    // Below 2^-6 the step is 2^-9, that of float32 numbers from 2^14 on.
    if (size < 0.015625f)
        return (uint8_t)(sign | (float_bits(size + 16384.0f) - float_bits(16384.0f)));
    bits &= 0x7fffffffu;
    return (uint8_t)(sign | (((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3)));
}

inline void store_e4m3(const float* x, int n, uint8_t* y) {
    for (int i = 0; i < n; i++) y[i] = e4m3(x[i]);
}

}  // namespace verbatim
