"""Quantisation: float32 -> raw bytes of a block format. block_formats.py describes the formats.

In: a type and a float array. Out: a flat uint8 array, the bytes as stored in a file.

The formats with 32 values per block have the bits of ggml's reference quantisation. The formats
with 256 values leave the choice of scales to the writer. Here each run tries a few scales around
the one that covers its range, fits scale and offset by least squares for each, and keeps the one
with the smallest squared error. Errors of large values weigh more, because they matter most in a
dot product.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.formats.block_formats import BLOCKS

# Values converted at a time; peak memory is the input, the result and a few MiB of temporaries.
_CHUNK_VALUES = 1 << 16


def quantise(type: str, array: np.ndarray) -> np.ndarray:
    """Float array (last axis contiguous in the file) -> flat uint8 bytes of `type`.

    Infinities and NaN are an error in the block formats."""
    if type == "f32":
        return np.ascontiguousarray(array, dtype="<f4").reshape(-1).view(np.uint8)
    if type not in _PACK:
        raise ModelError(
            f"weights cannot be written as {type!r}; possible: f32, {', '.join(_PACK)}"
        )
    values, size = BLOCKS[type]
    if array.ndim == 0 or array.shape[-1] % values:
        raise ModelError(
            f"a {type} row holds a multiple of {values} values; shape {array.shape} does not"
        )
    flat = np.ascontiguousarray(array).reshape(-1, values)
    out = np.empty((len(flat), size), dtype=np.uint8)
    step = max(1, _CHUNK_VALUES // values)
    with np.errstate(all="ignore"):  # 1 / 0 in an all-zero block; the result is not used
        for start in range(0, len(flat), step):
            chunk = flat[start : start + step].astype(np.float32, copy=False)
            _PACK[type](chunk, out[start : start + step])
    return out.reshape(-1)


def _put_half(out: np.ndarray, at: int, value: np.ndarray) -> np.ndarray:
    """Write [n, 1] float32 as f16 at byte `at` of each block. Returns the rounded values."""
    half = value.astype("<f2")
    if not np.isfinite(half).all():
        raise ModelError("a weight is infinite, not a number, or too large for a 16-bit scale")
    out[:, at : at + 2] = half.view(np.uint8)
    rounded: np.ndarray = half.astype(np.float32)
    return rounded


def _inverse(d: np.ndarray) -> np.ndarray:
    """1 / d, or 0 where d is 0 or so small that 1 / d overflows."""
    inverse = 1 / d
    finite: np.ndarray = np.where(np.isfinite(inverse), inverse, np.float32(0))
    return finite


def _round_away(x: np.ndarray) -> np.ndarray:
    """Round half away from zero like C's roundf; NumPy's rint rounds half to even."""
    magnitude = np.abs(x)
    whole = np.floor(magnitude)
    whole += magnitude - whole >= np.float32(0.5)
    rounded: np.ndarray = np.copysign(whole, x)
    return rounded


def _to_bytes(q: np.ndarray, largest: int) -> np.ndarray:
    clipped: np.ndarray = np.clip(q, 0, largest).astype(np.uint8)
    return clipped


def _pack_nibbles(q: np.ndarray, width: int) -> np.ndarray:
    """[n, m] -> [n, m/2]: of each 2·width values, the first `width` become low nibbles and the
    others high nibbles."""
    pairs = q.reshape(len(q), -1, 2, width)
    packed: np.ndarray = (pairs[:, :, 0] & np.uint8(15)) | (pairs[:, :, 1] << np.uint8(4))
    return packed.reshape(len(q), -1)


# ------------------------------------------------------------------------------------ plain floats
# x: float32 [n, values per block]; out: uint8 [n, bytes per block], written


def _f16(x: np.ndarray, out: np.ndarray) -> None:
    half = x.astype("<f2")
    if not np.isfinite(half).all() and np.isfinite(x).all():
        raise ModelError(f"the weight {np.abs(x).max()} is too large for f16 (65504); use bf16")
    out[:] = half.view(np.uint8)


def _bf16(x: np.ndarray, out: np.ndarray) -> None:
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (
        bits.astype(np.uint64) + np.uint64(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    ) >> np.uint64(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    quiet = (bits >> np.uint32(16)) | np.uint32(64)  # rounding could carry a NaN into infinity
    out[:] = np.where(nan, quiet, rounded).astype("<u2").view(np.uint8)


# ------------------------------------------------------------------------------ blocks of 32 values


def _q8_0(x: np.ndarray, out: np.ndarray) -> None:
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    _put_half(out, 0, d)
    out[:, 2:] = _round_away(x * _inverse(d)).astype(np.int8).view(np.uint8)


def _symmetric(x: np.ndarray, out: np.ndarray, half: int) -> np.ndarray:
    """q4_0 and q5_0: the value of largest magnitude maps to -half. Returns q in 0 .. 2 half - 1."""
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    d = largest / np.float32(-half)
    _put_half(out, 0, d)
    return _to_bytes(np.trunc(x * _inverse(d) + np.float32(half + 0.5)), 2 * half - 1)


def _affine(x: np.ndarray, out: np.ndarray, levels: int) -> np.ndarray:
    """q4_1 and q5_1: the smallest value maps to 0, the largest to `levels`. Returns q."""
    minimum = x.min(axis=1, keepdims=True)
    d = (x.max(axis=1, keepdims=True) - minimum) / np.float32(levels)
    _put_half(out, 0, d)
    _put_half(out, 2, minimum)
    return _to_bytes(np.trunc((x - minimum) * _inverse(d) + np.float32(0.5)), levels)


def _put_fifth_bits(q: np.ndarray, out: np.ndarray, at: int) -> None:
    out[:, at : at + 4] = np.packbits(q >> np.uint8(4), axis=1, bitorder="little")


def _q4_0(x: np.ndarray, out: np.ndarray) -> None:
    out[:, 2:] = _pack_nibbles(_symmetric(x, out, 8), 16)


def _q4_1(x: np.ndarray, out: np.ndarray) -> None:
    out[:, 4:] = _pack_nibbles(_affine(x, out, 15), 16)


def _q5_0(x: np.ndarray, out: np.ndarray) -> None:
    q = _symmetric(x, out, 16)
    _put_fifth_bits(q, out, 2)
    out[:, 6:] = _pack_nibbles(q, 16)


def _q5_1(x: np.ndarray, out: np.ndarray) -> None:
    q = _affine(x, out, 31)
    _put_fifth_bits(q, out, 4)
    out[:, 8:] = _pack_nibbles(q, 16)


# ----------------------------------------------------------------------------- blocks of 256 values

# Offsets added to the number of levels; each gives one candidate scale. Twice as many candidates
# lower the error by only 0.5 %.
_LEVEL_OFFSETS = (0.0, -1.5, -0.8, -0.4, 0.4, 0.8)


def _weights(runs: np.ndarray) -> np.ndarray:
    """Weight of the error of each value: its magnitude plus the RMS of its run."""
    weights: np.ndarray = np.sqrt((runs * runs).mean(axis=-1, keepdims=True)) + np.abs(runs)
    return weights


def _fit_affine(runs: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """[..., 32] -> scale and offset >= 0 per run: x ≈ scale * q - offset, q in 0 .. levels."""
    w = _weights(runs)
    sum_w, sum_x = w.sum(-1, keepdims=True), (w * runs).sum(-1, keepdims=True)
    # The format has no negative offset.
    low = np.minimum(runs.min(-1, keepdims=True), np.float32(0))
    spread = np.maximum(runs.max(-1, keepdims=True) - low, np.float32(0))
    best_scale, best_low = spread / np.float32(levels), low
    best = np.full_like(low, np.inf)
    for level_offset in _LEVEL_OFFSETS:
        q = np.clip(
            np.rint((runs - low) * _inverse(spread / np.float32(levels + level_offset))), 0, levels
        )
        wq = w * q
        sum_q, sum_qq, sum_xq = (
            wq.sum(-1, keepdims=True),
            (wq * q).sum(-1, keepdims=True),
            (wq * runs).sum(-1, keepdims=True),
        )
        det = sum_w * sum_qq - sum_q * sum_q
        scale = np.where(det > 0, (sum_w * sum_xq - sum_x * sum_q) / det, best_scale)
        offset = np.where(det > 0, (sum_qq * sum_x - sum_q * sum_xq) / det, best_low)
        positive = offset > 0  # not representable: fit a line through the origin instead
        offset = np.where(positive, np.float32(0), offset)
        scale = np.where(positive & (sum_qq > 0), sum_xq / sum_qq, scale)
        error = (w * np.square(scale * q + offset - runs)).sum(-1, keepdims=True)
        better = (error < best) & (scale > 0)
        best = np.where(better, error, best)
        best_scale, best_low = (
            np.where(better, scale, best_scale),
            np.where(better, offset, best_low),
        )
    return best_scale[..., 0], -best_low[..., 0]


def _pack_k_scales(scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
    """Eight 6-bit scales and minima [n, 8] -> twelve bytes; inverse of block_formats._k_scales."""
    high_scale, high_minimum = (
        (scale[:, 4:] >> np.uint8(4)) << np.uint8(6),
        (minimum[:, 4:] >> np.uint8(4)) << np.uint8(6),
    )
    low = (scale[:, 4:] & np.uint8(15)) | ((minimum[:, 4:] & np.uint8(15)) << np.uint8(4))
    return np.concatenate([scale[:, :4] | high_scale, minimum[:, :4] | high_minimum, low], axis=1)


def _k_affine(x: np.ndarray, out: np.ndarray, levels: int) -> np.ndarray:
    """q4_k and q5_k: writes d, m and the scales, returns q [n, 256]."""
    n = len(x)
    runs = x.reshape(n, 8, 32)
    scale, offset = _fit_affine(runs, levels)
    d = _put_half(out, 0, scale.max(axis=1, keepdims=True) / np.float32(63))
    m = _put_half(out, 2, offset.max(axis=1, keepdims=True) / np.float32(63))
    s = _to_bytes(np.rint(scale * _inverse(d)), 63)
    # If d is 0, the values are too small for f16 and all become 0.
    t = _to_bytes(np.where(d > 0, np.rint(offset * _inverse(m)), 0), 63)
    out[:, 4:16] = _pack_k_scales(s, t)
    # Quantise the values with the rounded scales, which is what dequantisation uses.
    q = np.rint((runs + (m * t)[..., None]) * _inverse(d * s)[..., None])
    return _to_bytes(q, levels).reshape(n, 256)


def _q4_k(x: np.ndarray, out: np.ndarray) -> None:
    out[:, 16:] = _pack_nibbles(_k_affine(x, out, 15), 32)


def _q5_k(x: np.ndarray, out: np.ndarray) -> None:
    q = _k_affine(x, out, 31)
    fifth = (q >> np.uint8(4)).reshape(len(x), 8, 32) << np.arange(8, dtype=np.uint8).reshape(
        1, 8, 1
    )
    out[:, 16:48] = np.bitwise_or.reduce(fifth, axis=1)
    out[:, 48:] = _pack_nibbles(q, 32)


def _fit_symmetric(runs: np.ndarray, half: int) -> np.ndarray:
    """[..., 16] -> signed scale per run: x ≈ scale * q, q in -half .. half - 1."""
    w = _weights(runs)
    largest = np.take_along_axis(runs, np.abs(runs).argmax(-1, keepdims=True), axis=-1)
    best_scale = largest / np.float32(-half)
    best = np.full_like(largest, np.inf)
    for level_offset in _LEVEL_OFFSETS:
        q = np.clip(
            np.rint(runs * _inverse(largest / np.float32(-(half + level_offset)))), -half, half - 1
        )
        wq = w * q
        sum_qq = (wq * q).sum(-1, keepdims=True)
        scale = np.where(sum_qq > 0, (wq * runs).sum(-1, keepdims=True) / sum_qq, best_scale)
        error = (w * np.square(scale * q - runs)).sum(-1, keepdims=True)
        better = error < best
        best, best_scale = np.where(better, error, best), np.where(better, scale, best_scale)
    result: np.ndarray = best_scale[..., 0]
    return result


def _q6_k(x: np.ndarray, out: np.ndarray) -> None:
    n = len(x)
    runs = x.reshape(n, 16, 16)
    scale = _fit_symmetric(runs, 32)
    largest = np.take_along_axis(scale, np.abs(scale).argmax(axis=1, keepdims=True), axis=1)
    # The largest scale maps to -128: int8 has one more negative value than positive ones.
    d = _put_half(out, 208, largest / np.float32(-128))
    s = np.clip(np.rint(scale * _inverse(d)), -128, 127).astype(np.int8)
    out[:, 192:208] = s.view(np.uint8)
    q = np.clip(np.rint(runs * _inverse(d * s)[..., None]), -32, 31).astype(np.int8).reshape(n, 256)
    q = (q + np.int8(32)).view(np.uint8)
    out[:, :128] = _pack_nibbles(q, 64)
    high = (q >> np.uint8(4)).reshape(n, 2, 4, 32) << np.array(
        [0, 2, 4, 6], dtype=np.uint8
    ).reshape(1, 1, 4, 1)
    out[:, 128:192] = np.bitwise_or.reduce(high, axis=2).reshape(n, 64)


_PACK: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
    "f16": _f16,
    "bf16": _bf16,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}
WRITABLE = ("f32", *_PACK)
