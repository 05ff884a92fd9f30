"""Device code for the element types of the KV cache, in Triton.

KV is the type as the kernels know it: f16; q8 (int8 and a float32 scale per head vector); fp8 (e4m3
without a scale), or fp8_bits, the same for GPUs without e4m3 conversions. The rounding is that of
backend/reference/kv_types.py. One program rounds one head vector, so no bit depends on other rows.
"""

import triton
import triton.language as tl


@triton.jit
def q8_codes(x):
    """(int8 codes, float32 scale) of one head vector; x is 0 outside of it."""
    largest = tl.max(tl.abs(x), 0)
    zero = largest <= 1e-30
    divisor = tl.where(zero, 1.0, largest)
    top = tl.zeros_like(divisor) + 127.0
    inverse = tl.where(zero, 0.0, tl.div_rn(top, divisor))
    scale = tl.where(zero, 0.0, tl.div_rn(divisor, top))
    rounded = x * inverse + 12582912.0  # 1.5 * 2^23: the addition rounds to an integer
    return (rounded - 12582912.0).to(tl.int8), scale


@triton.jit
def e4m3_codes(x):
    """The uint8 codes of the nearest e4m3 numbers, ties to even, clamped to 448."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # below 2^-6 the step is 2^-9, that of float32 numbers from 2^14 on
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, subnormal, normal)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def store_head(x, to, scales, at, DIM, BLOCK: tl.constexpr, KV: tl.constexpr, used):
    """Write one head vector to vector `at` of the cache, if `used`."""
    d = tl.arange(0, BLOCK)
    place, mask = at * DIM + d, d < tl.where(used, DIM, 0)
    if KV == "f16":
        tl.store(to + place, x.to(tl.float16), mask=mask)
    elif KV == "q8":
        codes, scale = q8_codes(x)
        tl.store(to + place, codes, mask=mask)
        tl.store(scales + at, scale, mask=used)
    else:
        tl.store(to + place, e4m3_codes(x), mask=mask)


@triton.jit
def widen(codes, KV: tl.constexpr):
    """Codes as float16, which holds each of them exactly. The caller applies the scales of q8."""
    if KV == "fp8":
        halves = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif KV == "fp8_bits":
        # an f16 with the bits of an e4m3 is 2^8 smaller: its exponent has a bias of 15, not 7
        wide = codes.to(tl.int16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        halves = bits.to(tl.float16, bitcast=True) * 256.0
    else:
        halves = codes.to(tl.float16)
    return halves
