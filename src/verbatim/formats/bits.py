"""Bits of blocks: fields of a few bits to bytes and back, float16 scales, rounding."""

from __future__ import annotations

import numpy as np

from verbatim.base.errors import ModelError

# Bit shifts that unpack a byte into 2 nibbles, 4 two-bit values, or 8 bits.
NIBBLES = np.array([0, 4], dtype=np.uint8).reshape(1, 1, 2, 1)
CRUMBS = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
BITS = np.arange(8, dtype=np.uint8).reshape(1, 1, 8, 1)


def half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The f16 at byte `at` of each block, as f32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def spread(packed: np.ndarray, width: int, shifts: np.ndarray) -> np.ndarray:
    """Bytes [n, m] -> their fields [n, k m]: the first field of `width` bytes, then the second.
    `shifts`: NIBBLES, CRUMBS or BITS."""
    n, mask = len(packed), (1 << 8 // shifts.size) - 1
    fields: np.ndarray = (packed.reshape(n, -1, 1, width) >> shifts) & np.uint8(mask)
    return fields.reshape(n, -1)


def low_high(packed: np.ndarray, width: int) -> np.ndarray:
    """Bytes [n, m] -> nibbles [n, 2 m]: low nibbles of `width` bytes, then their high nibbles."""
    return spread(packed, width, NIBBLES)


def put_half(out: np.ndarray, at: int, value: np.ndarray) -> np.ndarray:
    """Write [n, 1] float32 as f16 at byte `at` of each block. Returns the rounded values."""
    half = value.astype("<f2")
    if not np.isfinite(half).all():
        raise ModelError("a weight is infinite, not a number, or too large for a 16-bit scale")
    out[:, at : at + 2] = half.view(np.uint8)
    rounded: np.ndarray = half.astype(np.float32)
    return rounded


def inverse_of(d: np.ndarray) -> np.ndarray:
    """1 / d, or 0 where d is 0 or so small that 1 / d overflows."""
    inverse = 1 / d
    finite: np.ndarray = np.where(np.isfinite(inverse), inverse, np.float32(0))
    return finite


def round_away(x: np.ndarray) -> np.ndarray:
    """Round half away from zero like C's roundf; NumPy's rint rounds half to even."""
    magnitude = np.abs(x)
    whole = np.floor(magnitude)
    whole += magnitude - whole >= np.float32(0.5)
    rounded: np.ndarray = np.copysign(whole, x)
    return rounded


def to_bytes(q: np.ndarray, largest: int) -> np.ndarray:
    clipped: np.ndarray = np.clip(q, 0, largest).astype(np.uint8)
    return clipped


def pack_nibbles(q: np.ndarray, width: int) -> np.ndarray:
    """[n, m] -> [n, m/2]: of each 2·width values, the first `width` become low nibbles and the
    others high nibbles."""
    pairs = q.reshape(len(q), -1, 2, width)
    packed: np.ndarray = (pairs[:, :, 0] & np.uint8(15)) | (pairs[:, :, 1] << np.uint8(4))
    return packed.reshape(len(q), -1)


def field(blocks: np.ndarray, start: int, stop: int, kind: str = "u1") -> np.ndarray:
    """Bytes start..stop of each block, as `kind` [n, count]."""
    found: np.ndarray = np.ascontiguousarray(blocks[:, start:stop]).view(kind)
    return found


def fields(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """[n, m] -> [n, m * count]: `count` fields of `bits` bits of each integer, lowest first."""
    shifts = np.arange(0, bits * count, bits, dtype=packed.dtype)
    mask = packed.dtype.type((1 << bits) - 1)
    found: np.ndarray = (packed[:, :, None] >> shifts) & mask
    return found.reshape(len(packed), -1)
