"""Noise, exponential and logarithm on the device, in Triton: the numbers of sampling/draw.py and
sampling/numerics.py.

In float64 they have the same bits: only `+ - * /`, conversions and integer sums. In float32 they
have an error that docs/numerics.md bounds. The kernels of the sampler call them, launched
without fused multiply-add.
"""

import triton
import triton.language as tl

MASS_ONE: tl.constexpr = tl.constexpr(4398046511104.0)  # 2^42, the mass of the most likely id
EXP_13: tl.constexpr = tl.constexpr(1.6059043836821613e-10)  # 1 / 13!
EXP_12: tl.constexpr = tl.constexpr(2.08767569878681e-09)  # 1 / 12!
EXP_11: tl.constexpr = tl.constexpr(2.505210838544172e-08)  # 1 / 11!
EXP_10: tl.constexpr = tl.constexpr(2.755731922398589e-07)  # 1 / 10!
EXP_9: tl.constexpr = tl.constexpr(2.7557319223985893e-06)  # 1 / 9!
EXP_8: tl.constexpr = tl.constexpr(2.48015873015873e-05)  # 1 / 8!
EXP_7: tl.constexpr = tl.constexpr(0.0001984126984126984)  # 1 / 7!
EXP_6: tl.constexpr = tl.constexpr(0.001388888888888889)  # 1 / 6!
EXP_5: tl.constexpr = tl.constexpr(0.008333333333333333)  # 1 / 5!
EXP_4: tl.constexpr = tl.constexpr(0.041666666666666664)  # 1 / 4!
EXP_3: tl.constexpr = tl.constexpr(0.16666666666666666)  # 1 / 3!
LOG_21: tl.constexpr = tl.constexpr(0.047619047619047616)  # 1 / 21
LOG_19: tl.constexpr = tl.constexpr(0.05263157894736842)  # 1 / 19
LOG_17: tl.constexpr = tl.constexpr(0.058823529411764705)  # 1 / 17
LOG_15: tl.constexpr = tl.constexpr(0.06666666666666667)  # 1 / 15
LOG_13: tl.constexpr = tl.constexpr(0.07692307692307693)  # 1 / 13
LOG_11: tl.constexpr = tl.constexpr(0.09090909090909091)  # 1 / 11
LOG_9: tl.constexpr = tl.constexpr(0.1111111111111111)  # 1 / 9
LOG_7: tl.constexpr = tl.constexpr(0.14285714285714285)  # 1 / 7
LOG_5: tl.constexpr = tl.constexpr(0.2)  # 1 / 5
LOG_3: tl.constexpr = tl.constexpr(0.3333333333333333)  # 1 / 3


# ---- float32: the Gumbel noise of sampling/draw.py, the same random bits, rounded


@triton.jit
def philox(counter, position, k0, k1, step=0):
    """Philox4x32-10 for counters (counter, position, step, 0); all uint32."""
    c0, c1 = counter, position
    c2, c3 = tl.zeros_like(c0) + step, tl.zeros_like(c0)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def uniform(high, low):
    """(the upper 52 of 64 bits + 1/2) / 2^52. The relative error does not grow for small values."""
    return (
        high.to(tl.float32) * 1048576.0 + ((low >> 12).to(tl.float32) + 0.5)
    ) * 2.220446049250313e-16


@triton.jit
def split_exponent(x):
    """x = 2^k (1 + f), with 1 + f from sqrt(1/2) to sqrt(2); k and f are exact."""
    bits = x.to(tl.int32, bitcast=True)
    k = (bits - 0x3F3504F3) >> 23
    return k, (bits - (k << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def log_of(k, f):
    """log(2^k (1 + f)). For k = 0 the relative error stays bounded however small f is."""
    s = f / (2.0 + f)
    z = s * s
    tail = z * (0.3333333333333333 + z * (0.2 + z * (0.14285714285714285 + z * 0.1111111111111111)))
    return k.to(tl.float32) * 0.6931471805599453 + (s + s) * (1.0 + tail)


@triton.jit
def gumbel(high, low):
    """-log(-log(u)) of 64 random bits. Near u = 1 it uses 1 - u, made of the inverted bits."""
    k, f = split_exponent(uniform(high, low))
    k, f = split_exponent(
        -log_of(k, tl.where(k == 0, -uniform(high ^ 0xFFFFFFFF, low ^ 0xFFFFFFFF), f))
    )
    return -log_of(k, f)


@triton.jit
def gumbel_noise(first, position, k0, k1, BV: tl.constexpr, step=0):
    """The noise of BV token ids from id 2 * first on. The others are uint32 [rows, 1].

    One Philox call gives the bits of two neighbouring ids."""
    pair = (first + tl.arange(0, BV // 2)).to(tl.uint32, bitcast=True)[None, :]
    pair, position = tl.broadcast(pair, position)
    even_low, even_high, odd_low, odd_high = philox(pair, position, k0, k1, step)
    return gumbel(tl.interleave(even_high, odd_high), tl.interleave(even_low, odd_low))


# ---- float64, as sampling/numerics.py


@triton.jit
def exp64(x):
    """e^x for x <= 0; 0 below -708."""
    live = x >= -708.0
    x = tl.where(live, x, 0.0)
    k = (x * 1.4426950408889634 + 6755399441055744.0) - 6755399441055744.0
    r = (x - k * 0.6931471803691238) - k * 1.9082149292705877e-10
    p = r * EXP_13 + EXP_12
    p = p * r + EXP_11
    p = p * r + EXP_10
    p = p * r + EXP_9
    p = p * r + EXP_8
    p = p * r + EXP_7
    p = p * r + EXP_6
    p = p * r + EXP_5
    p = p * r + EXP_4
    p = p * r + EXP_3
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    bits = p.to(tl.int64, bitcast=True) + (k.to(tl.int64) << 52)
    return tl.where(live, bits.to(tl.float64, bitcast=True), 0.0)


@triton.jit
def log64(x):
    """Natural logarithm of positive normal numbers."""
    bits = x.to(tl.int64, bitcast=True)
    mantissa = bits & 0xFFFFFFFFFFFFF
    upper = (mantissa >= 0x6A09E667F3BCD).to(tl.int64)
    k = ((bits >> 52) - 1023 + upper).to(tl.float64)
    f = (mantissa | ((1023 - upper) << 52)).to(tl.float64, bitcast=True) - 1.0
    s = f / (2.0 + f)
    z = s * s
    p = z * LOG_21 + LOG_19
    p = p * z + LOG_17
    p = p * z + LOG_15
    p = p * z + LOG_13
    p = p * z + LOG_11
    p = p * z + LOG_9
    p = p * z + LOG_7
    p = p * z + LOG_5
    p = p * z + LOG_3
    p = p * z + 1.0
    return k * 0.6931471803691238 + ((s + s) * p + k * 1.9082149292705877e-10)


@triton.jit
def mass_of(d):
    """floor(e^d * 2^42) for d <= 0; 0 for d <= -30."""
    live = d > -30.0
    e = exp64(tl.where(live, d, 0.0))
    return tl.where(live, (e * MASS_ONE).to(tl.int64), 0)


@triton.jit
def spread_of(d):
    """floor(e^d * -d * 2^42) for d <= 0; 0 for d <= -30."""
    live = d > -30.0
    d = tl.where(live, d, 0.0)
    return ((exp64(d) * -d) * MASS_ONE).to(tl.int64)


@triton.jit
def gumbel64(id, position, k0, k1, step=0):
    """The noise of sampling/draw.py for these ids; the others are uint32."""
    pair = (id >> 1).to(tl.uint32, bitcast=True)
    pair, position = tl.broadcast(pair, position)
    even_low, even_high, odd_low, odd_high = philox(pair, position, k0, k1, step)
    odd = (id & 1) == 1
    high = tl.where(odd, odd_high, even_high).to(tl.uint64)
    low = tl.where(odd, odd_low, even_low).to(tl.uint64)
    bits = (((high << 32) | low) >> 12).to(tl.int64)
    return -log64(-log64((bits.to(tl.float64) + 0.5) * 2.220446049250313e-16))
