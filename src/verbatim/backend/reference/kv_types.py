"""The element types of the KV cache: the specification that the other backends follow.

In: float32 keys or values, one head vector in the last axis. Out: the values that a cache of that
type gives back. A vector is rounded on its own, so its bits do not depend on the batch, the chunk
or the neighbouring tokens.

f16: the reference does not round; its cache is float32.
q8: 8-bit integers with one float32 scale per head vector.
fp8: e4m3 (4 exponent bits, 3 mantissa bits, no infinities) without a scale: ADR 24.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

F32 = np.float32
Array: TypeAlias = Any  # a float32 array
TINY = F32(1e-30)  # a vector whose largest magnitude is not above this is stored as zeros
E4M3_MAX = F32(448)  # larger magnitudes are clamped to it
_SMALLEST_NORMAL = F32(2.0**-6)  # e4m3's; below it the step is 2^-9
_STEP_2_9 = F32(2.0**14)  # float32 numbers of this size are multiples of 2^-9


def round_kv(x: Array, kv_type: str) -> Array:
    """The values of x after a round trip through a cache of this type."""
    if kv_type == "q8":
        codes, scales = q8_codes(x)
        return codes.astype(F32) * scales[..., None]
    if kv_type == "fp8":
        return E4M3_VALUES[e4m3_codes(x)]
    assert kv_type == "f16", kv_type
    return x


def q8_codes(x: Array) -> tuple[Array, Array]:
    """(int8 codes, float32 scales without the last axis): x is about codes * scales. The scale of a
    vector with a value that is not finite is NaN.

    >>> codes, scales = q8_codes(np.array([0.5, -1.0, 0.25], np.float32))
    >>> codes.tolist(), round(float(scales) * 127, 6)
    ([64, -127, 32], 1.0)
    """
    largest = np.abs(x).max(axis=-1)
    zero = ~(largest > TINY)
    divisor = np.where(zero, F32(1), largest)
    inverse = np.where(zero, F32(0), F32(127) / divisor)
    scales = np.where(zero, F32(0), divisor / F32(127))
    scales = np.where(largest < np.inf, scales, F32(np.nan))
    with np.errstate(invalid="ignore"):  # the codes of such a vector mean nothing
        return np.rint(x * inverse[..., None]).astype(np.int8), scales


def e4m3_codes(x: Array) -> Array:
    """The uint8 codes of the nearest e4m3 numbers; a tie goes to the even code, NaN is 0x7f.

    >>> e4m3_codes(np.array([1.0, -1.0, 1000.0], np.float32)).tolist()
    [56, 184, 126]
    """
    x = np.ascontiguousarray(x, F32)
    size = np.minimum(np.abs(x), E4M3_MAX)
    bits = size.view(np.uint32)
    # normal: round the mantissa to 3 bits, then move the exponent's bias from 127 to 7
    normal = ((bits + np.uint32(0x7FFFF) + ((bits >> 20) & 1)) >> 20) - np.uint32(120 << 3)
    # subnormal: the addition rounds to a multiple of 2^-9, which ends up in the low bits
    subnormal = (size + _STEP_2_9).view(np.uint32) - _STEP_2_9.view(np.uint32)
    codes = np.where(size < _SMALLEST_NORMAL, subnormal, normal)
    codes = codes | ((x.view(np.uint32) >> 24) & 0x80)
    return np.where(np.isnan(x), 0x7F, codes).astype(np.uint8)


def _e4m3_values() -> Array:
    """The number of each code. 0x7f and 0xff are NaN; no cache holds 0xff."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(
        exponent == 0, mantissa / 8.0 * 2.0**-6, (1 + mantissa / 8.0) * 2.0 ** (exponent - 7.0)
    )
    values = np.where(code & 0x80, -size, size)
    values[code & 0x7F == 0x7F] = np.nan
    return values.astype(F32)


E4M3_VALUES = _e4m3_values()
