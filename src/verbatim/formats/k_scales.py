"""What the K-quants share: the search for scales; and, where a block has offsets, 6-bit scales and
minima.

The formats leave the choice of scales to the writer. Here each run tries a few scales around the
one that covers its range, fits scale and offset by least squares for each, and keeps the one with
the smallest squared error. Errors of large values weigh more, because they matter most in a dot
product.
"""

from __future__ import annotations

import numpy as np

from verbatim.formats.bits import half, inverse_of, put_half, to_bytes

# Offsets added to the number of levels; each gives one candidate scale. Twice as many candidates
# lower the error by only 0.5 %.
_LEVEL_OFFSETS = (0.0, -1.5, -0.8, -0.4, 0.4, 0.8)


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Twelve bytes -> eight 6-bit scales and eight 6-bit minima.

    Bytes 0..3: scale j in the low six bits, the two high bits of scale j+4 above them.
    Bytes 4..7: the same for the minima. Bytes 8..11: low nibbles of scale and minimum j+4."""
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = np.concatenate(
        [a & np.uint8(63), (c & np.uint8(15)) | ((a >> np.uint8(2)) & np.uint8(48))], axis=1
    )
    minimum = np.concatenate(
        [b & np.uint8(63), (c >> np.uint8(4)) | ((b >> np.uint8(2)) & np.uint8(48))], axis=1
    )
    return scale, minimum


def unpack_affine(blocks: np.ndarray, q: np.ndarray, out: np.ndarray) -> None:
    n = len(blocks)
    scales, minima = _k_scales(blocks[:, 4:16])
    runs = out.reshape(n, 8, 32)
    np.multiply((half(blocks, 0) * scales).reshape(n, 8, 1), q.reshape(n, 8, 32), out=runs)
    runs -= (half(blocks, 2) * minima).reshape(n, 8, 1)


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
        inverse = inverse_of(spread / np.float32(levels + level_offset))
        q = np.clip(np.rint((runs - low) * inverse), 0, levels)
        wq = w * q
        sum_q = wq.sum(-1, keepdims=True)
        sum_qq = (wq * q).sum(-1, keepdims=True)
        sum_xq = (wq * runs).sum(-1, keepdims=True)
        det = sum_w * sum_qq - sum_q * sum_q
        scale = np.where(det > 0, (sum_w * sum_xq - sum_x * sum_q) / det, best_scale)
        offset = np.where(det > 0, (sum_qq * sum_x - sum_q * sum_xq) / det, best_low)
        positive = offset > 0  # not representable: fit a line through the origin instead
        offset = np.where(positive, np.float32(0), offset)
        scale = np.where(positive & (sum_qq > 0), sum_xq / sum_qq, scale)
        error = (w * np.square(scale * q + offset - runs)).sum(-1, keepdims=True)
        better = (error < best) & (scale > 0)
        best = np.where(better, error, best)
        best_scale = np.where(better, scale, best_scale)
        best_low = np.where(better, offset, best_low)
    return best_scale[..., 0], -best_low[..., 0]


def _pack_k_scales(scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
    """Eight 6-bit scales and minima [n, 8] -> twelve bytes; inverse of _k_scales."""
    high_scale = (scale[:, 4:] >> np.uint8(4)) << np.uint8(6)
    high_minimum = (minimum[:, 4:] >> np.uint8(4)) << np.uint8(6)
    low = (scale[:, 4:] & np.uint8(15)) | ((minimum[:, 4:] & np.uint8(15)) << np.uint8(4))
    return np.concatenate([scale[:, :4] | high_scale, minimum[:, :4] | high_minimum, low], axis=1)


def pack_affine(x: np.ndarray, out: np.ndarray, levels: int) -> np.ndarray:
    """Writes d, m and the scales, returns q [n, 256]."""
    n = len(x)
    runs = x.reshape(n, 8, 32)
    scale, offset = _fit_affine(runs, levels)
    d = put_half(out, 0, scale.max(axis=1, keepdims=True) / np.float32(63))
    m = put_half(out, 2, offset.max(axis=1, keepdims=True) / np.float32(63))
    s = to_bytes(np.rint(scale * inverse_of(d)), 63)
    # If d is 0, the values are too small for f16 and all become 0.
    t = to_bytes(np.where(d > 0, np.rint(offset * inverse_of(m)), 0), 63)
    out[:, 4:16] = _pack_k_scales(s, t)
    # Quantise the values with the rounded scales, which is what dequantisation uses.
    q = np.rint((runs + (m * t)[..., None]) * inverse_of(d * s)[..., None])
    return to_bytes(q, levels).reshape(n, 256)


def fit_symmetric(runs: np.ndarray, half: int) -> np.ndarray:
    """[..., 16] -> signed scale per run: x ≈ scale * q, q in -half .. half - 1."""
    w = _weights(runs)
    largest = np.take_along_axis(runs, np.abs(runs).argmax(-1, keepdims=True), axis=-1)
    best_scale = largest / np.float32(-half)
    best = np.full_like(largest, np.inf)
    for level_offset in _LEVEL_OFFSETS:
        q = np.clip(
            np.rint(runs * inverse_of(largest / np.float32(-(half + level_offset)))),
            -half,
            half - 1,
        )
        wq = w * q
        sum_qq = (wq * q).sum(-1, keepdims=True)
        scale = np.where(sum_qq > 0, (wq * runs).sum(-1, keepdims=True) / sum_qq, best_scale)
        error = (w * np.square(scale * q - runs)).sum(-1, keepdims=True)
        better = error < best
        best, best_scale = np.where(better, error, best), np.where(better, scale, best_scale)
    result: np.ndarray = best_scale[..., 0]
    return result
