"""Device code for the element types of the KV cache, in Triton.

KV is the type as the kernels know it: f16; q8 (int8 and a float32 scale per head vector); fp8 (e4m3
without a scale), or fp8_bits, the same for GPUs that do not convert e4m3. The rounding is that of
backend/reference/kv_types.py. A head vector is rounded on its own, so no bit depends on other rows.

Invariant: codes become float16 before a product reads them, in the layout in which a float16 cache
would be loaded. Triton looks for the smallest type from which an operand of tl.dot is converted and
orders the inputs of the tensor cores by it: for 8 bits the small tiles would add in another order
than the large ones, which read the operand from shared memory. So the conversion is inline assembly
that is declared to have effects, which ends that search (tests/backend/test_cuda_compiles.py).
"""

import triton
import triton.language as tl

from verbatim.backend.cuda.kernels.launch import INTERPRETED

ASM: tl.constexpr = tl.constexpr(not INTERPRETED)  # the interpreter has no inline assembly
# Four signed bytes -> four float16 values, the bytes / 128. 0x4800 is 8 in float16, whose last bits
# count in 128ths; 0x4880 is 9.
Q8_ASM: tl.constexpr = tl.constexpr("""
{
.reg .b32 t, h;
xor.b32 t, $2, 0x80808080;
prmt.b32 $0, t, 0x48484848, 0x4140;
prmt.b32 $1, t, 0x48484848, 0x4342;
mov.b32 h, 0x48804880;
sub.f16x2 $0, $0, h;
sub.f16x2 $1, $1, h;
}
""")
# four e4m3 codes -> four float16 values; GPUs from Ada and Hopper on
E4M3_ASM: tl.constexpr = tl.constexpr("""
{
.reg .b16 l, h;
mov.b32 {l, h}, $2;
cvt.rn.f16x2.e4m3x2 $0, l;
cvt.rn.f16x2.e4m3x2 $1, h;
}
""")
# The same for any GPU. A float16 with the bits of an e4m3 is 2^8 too small: its exponent has a bias
# of 15, not 7. 0x5c00 is 256 in float16.
E4M3_BITS_ASM: tl.constexpr = tl.constexpr("""
{
.reg .b32 t, u, s;
prmt.b32 t, $2, 0, 0x1404;
prmt.b32 u, $2, 0, 0x3424;
and.b32 s, t, 0x80008000;
shr.b32 t, t, 1;
lop3.b32 t, t, 0x3f803f80, s, 0xea;
and.b32 s, u, 0x80008000;
shr.b32 u, u, 1;
lop3.b32 u, u, 0x3f803f80, s, 0xea;
mov.b32 s, 0x5c005c00;
mul.f16x2 $0, t, s;
mul.f16x2 $1, u, s;
}
""")


@triton.jit
def q8_codes(x, inside):
    """(int8 codes, float32 scales [heads, 1]) of some head vectors [heads, BLOCK]. The scale of a
    vector with a value that is not finite is NaN."""
    size = tl.where(x == x, tl.abs(x), float("inf"))  # tl.max ignores NaN
    largest = tl.max(tl.where(inside, size, 0.0), 1)[:, None]
    zero = ~(largest > 1e-30)
    divisor = tl.where(zero, 1.0, largest)
    top = tl.zeros_like(divisor) + 127.0
    inverse = tl.where(zero, 0.0, tl.div_rn(top, divisor))
    scale = tl.where(zero, 0.0, tl.div_rn(divisor, top))
    scale = tl.where(largest < float("inf"), scale, float("nan"))
    rounded = x * inverse + 12582912.0  # 1.5 * 2^23: the addition rounds to an integer
    return (rounded - 12582912.0).to(tl.int8), scale


@triton.jit
def e4m3_codes(x):
    """The uint8 codes of the nearest e4m3 numbers, ties to even, clamped to 448; NaN is 0x7f."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # below 2^-6 the step is 2^-9, that of float32 numbers from 2^14 on
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, subnormal, normal)
    code = code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return tl.where(x == x, code, 0x7F).to(tl.uint8)


@triton.jit
def finite_half(x):
    """float16. An infinite value would make the other rows of a query tile NaN: 0 times infinity.
    NaN stays NaN."""
    finite = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
    return finite.to(tl.float16)


@triton.jit
def store_heads(x, to, scales, at, d, DIM, inside, used, KV: tl.constexpr):
    """Write the head vectors [heads, BLOCK] that are `used` to the vectors `at` of the cache."""
    place, mask = at * DIM + d, inside & used
    if KV == "f16":
        tl.store(to + place, finite_half(x), mask=mask)
    elif KV == "q8":
        codes, scale = q8_codes(x, inside)
        tl.store(to + place, codes, mask=mask)
        tl.store(scales + at, scale, mask=used)
    else:
        tl.store(to + place, e4m3_codes(x), mask=mask)


@triton.jit
def widen(codes, KV: tl.constexpr):
    """Codes as float16, exactly; those of q8 divided by 128."""
    if KV == "f16":
        halves = codes
    elif ASM:
        code: tl.constexpr = Q8_ASM if KV == "q8" else E4M3_ASM if KV == "fp8" else E4M3_BITS_ASM
        # not pure: see above
        halves = tl.inline_asm_elementwise(
            code, "=r,=r,r", [codes], dtype=tl.float16, is_pure=False, pack=4
        )
    elif KV == "q8":
        halves = codes.to(tl.float16) * 0.0078125
    else:
        wide = codes.to(tl.int16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        halves = bits.to(tl.float16, bitcast=True) * 256.0
    return halves.to(tl.float16)


@triton.jit
def dequantise(codes, scales, vector, block, KV: tl.constexpr, MASK: tl.constexpr):
    """The codes [positions, BLOCK] of some vectors of the cache as float16 values. MASK: a vector
    whose block is released (-1) has no scale; its codes are 0.

    q8: (code / 128) * (scale * 128), both float16: a scale is 1/127 of the largest value, and 128
    times it keeps all bits where the value does."""
    values = widen(codes, KV)
    if KV == "q8":
        if MASK:
            scale = tl.load(scales + vector, mask=block >= 0, other=0.0)
        else:
            scale = tl.load(scales + vector)
        # at most the largest float16 number, as in a float16 cache
        scale = tl.where(scale * 128.0 > 65504.0, 65504.0, scale * 128.0)
        values = values * scale.to(tl.float16)[:, None]
    return values
