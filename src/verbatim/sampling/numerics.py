"""Arithmetic of the sampler, defined bit for bit: float64 in, float64 or int64 out, elementwise.

Uses only IEEE additions, subtractions, multiplications, divisions, square roots and comparisons: no
fused multiply-add, no library transcendental function, no float sum in an unspecified order.
Probability masses are integers, so they can be added in any order on any number of lanes.
docs/numerics.md is the same specification for authors of a backend.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

LOG2E = float.fromhex("0x1.71547652b82fep+0")
# 32 significant bits: k * LN2_HI is exact for |k| < 2^21
LN2_HI = float.fromhex("0x1.62e42fee00000p-1")
LN2_LO = float.fromhex("0x1.a39ef35793c76p-33")
ROUND = float.fromhex("0x1.8p+52")  # t + ROUND - ROUND rounds t to an integer, ties to even
SQRT2_MANTISSA = 0x6A09E667F3BCD  # mantissa bits of sqrt(2)
SQRT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
EXP_FLOOR = -708.0  # below this exp gives 0 (the true value is under 2^-1021)

MASS_BITS = 42
MASS_ONE = float(1 << MASS_BITS)  # the mass of the most likely token
MASS_FLOOR = -30.0  # exp(-30) * 2^42 < 1: the mass is 0
MAX_VOCAB = 1 << 20  # 2^20 masses of at most 2^42 stay below 2^63

# 1/13!, 1/12!, ..., 1/2!, 1, 1: each the nearest float64 to the true value
EXP_TERMS = tuple(
    1.0 / f
    for f in (
        *(6227020800.0, 479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0),
        *(120.0, 24.0, 6.0, 2.0, 1.0, 1.0),
    )
)
# 1/21, 1/19, ..., 1/3, 1
LOG_TERMS = tuple(1.0 / f for f in (21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0))


def exp(x: F64) -> F64:
    """e^x for x <= 0, to about one unit in the last place; 0 below -708.

    x = k ln 2 + r with |r| <= 0.347; e^r is its Taylor series to r^13 by Horner's rule; k is added
    to the exponent bits.

    >>> exp(np.array([0.0, -1.0])).tolist()
    [1.0, 0.36787944117144233]
    """
    live = x >= EXP_FLOOR
    x = np.where(live, x, 0.0)
    k = (x * LOG2E + ROUND) - ROUND
    r = (x - k * LN2_HI) - k * LN2_LO
    p = np.full_like(r, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        p *= r
        p += term
    bits = p.view(np.int64) + (k.astype(np.int64) << 52)
    out: F64 = np.where(live, bits.view(np.float64), 0.0)
    return out


def log(x: F64) -> F64:
    """Natural logarithm of positive normal numbers, to about one unit in the last place, also near
    1.

    x = 2^k m with m in [sqrt(1/2), sqrt(2)); with f = m - 1 and s = f / (2 + f),
    log m = 2 (s + s^3/3 + ... + s^21/21).

    >>> log(np.array([1.0, 10.0])).tolist()
    [0.0, 2.302585092994046]
    """
    bits = x.view(np.int64)
    mantissa = bits & 0xFFFFFFFFFFFFF
    upper = (mantissa >= SQRT2_MANTISSA).astype(np.int64)  # m is halved, k grows by one
    k = ((bits >> 52) - 1023 + upper).astype(np.float64)
    m = (mantissa | ((1023 - upper) << 52)).view(np.float64)
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    p = np.full_like(z, LOG_TERMS[0])
    for term in LOG_TERMS[1:]:
        p *= z
        p += term
    out: F64 = k * LN2_HI + ((s + s) * p + k * LN2_LO)
    return out


def log1(x: float) -> float:
    """`log` of one number, in Python's floats: a tenth of the time of NumPy's calls."""
    m, k = math.frexp(x)  # m in [1/2, 1)
    if m < SQRT_HALF:
        m, k = m + m, k - 1
    s = (m - 1.0) / (m + 1.0)
    p, z = LOG_TERMS[0], s * s
    for term in LOG_TERMS[1:]:
        p = p * z + term
    return k * LN2_HI + ((s + s) * p + k * LN2_LO)


def power(base: float, exponent: float) -> float:
    """base ** exponent for base >= 1 from exp and log above: equal beam scores on every machine."""
    if exponent in (0.0, 1.0):
        return base if exponent else 1.0
    y = exponent * log1(base)
    small = float(exp(np.array([-abs(y)]))[0])
    return 1.0 / small if y > 0 else small


def masses(d: F64) -> I64:
    """floor(e^d * 2^42) for d <= 0: each token's mass; the most likely token has d = 0.

    >>> masses(np.array([0.0, -1.0, -30.0])).tolist()
    [4398046511104, 1617950892750, 0]
    """
    return _scaled(d, lambda e, _: e * MASS_ONE)


def spreads(d: F64) -> I64:
    """floor(e^d * -d * 2^42): each token's term of the mean of -d, which is the entropy less the
    log of the total mass."""
    return _scaled(d, lambda e, live: (e * -live) * MASS_ONE)


def _scaled(d: F64, value: Any) -> I64:
    out = np.zeros(d.shape, np.int64)
    live = np.flatnonzero(d > MASS_FLOOR)  # all others, most of a vocabulary, are 0
    some = d[live]
    out[live] = value(exp(some), some).astype(np.int64)
    return out


def log_mass(total: int) -> float:
    """log(total / 2^42): the log normaliser of a row whose best logit is 0."""
    return log1(float(total) / MASS_ONE)


def mass_needed(share: float, total: int) -> int:
    """Smallest mass that is at least `share` of `total`: ceil of one float64 product, clamped to
    1 .. total."""
    product = share * float(total)
    whole = int(product)
    return max(1, min(total, whole + (product > whole)))


def lane_sum(values: F64) -> float:
    """A float sum in one fixed order: lane j of eight adds values j, j+8, j+16, ...; then
    ((0+4)+(2+6)) + ((1+5)+(3+7)). Used where an integer sum would lose accuracy (TopNSigma)."""
    padded = np.zeros(-(-len(values) // 8) * 8)
    padded[: len(values)] = values
    lanes = np.add.accumulate(padded.reshape(-1, 8), axis=0)[-1] if len(values) else np.zeros(8)
    a = [float(lane) for lane in lanes]
    return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))


def best(values: NDArray[Any], count: int) -> I64:
    """Indices of the `count` largest, largest first; a tie goes to the lower index.

    >>> best(np.array([1.0, 3.0, 3.0, 2.0]), 3).tolist()
    [1, 2, 3]
    """
    if count < len(values):
        edge = np.partition(values, len(values) - count)[len(values) - count]
        above = np.flatnonzero(values > edge)
        equal = np.flatnonzero(values == edge)[: count - len(above)]
        chosen = np.sort(np.concatenate([above, equal]))
    else:
        chosen = np.arange(len(values))
    out: I64 = chosen[np.argsort(-values[chosen], kind="stable")]
    return out
