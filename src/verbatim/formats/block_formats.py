"""GGUF block formats: block sizes, and dequantisation (raw bytes -> float32).

In: a type of BLOCKS, the bytes as stored in the file, the shape. Out: a float32 array of that
shape. quantise.py is the inverse.

A block packs 32 or 256 consecutive values of one row. Fields of a block in order (d and m are f16):

    q4_0  d, 16 bytes of nibbles                     value = d * (q - 8)
    q4_1  d, m, 16 bytes of nibbles                  value = d * q + m
    q5_0  d, 4 bytes of fifth bits, 16 of nibbles    value = d * (q - 16)
    q5_1  d, m, 4 bytes of fifth bits, 16 of nibbles     value = d * q + m
    q8_0  d, 32 signed bytes                         value = d * q
    q2_k  16 scale bytes, 64 bytes of 2 bits, d, m   value = (d * s) * q - (m * t), 16 runs of 16
    q3_k  32 bytes of high bits, 64 of 2 bits, 12 of scales, d                     16 runs of 16
    q4_k  d, m, 12 bytes of scales, 128 of nibbles   value = (d * s) * q - (m * t),  8 runs of 32
    q5_k  d, m, 12 bytes of scales, 32 of fifth bits, 128 of nibbles                 8 runs of 32
    q6_k  128 bytes of low 4 bits, 64 of high 2 bits, 16 signed scales, d          16 runs of 16
    q8_k  d (f32), 256 signed bytes, 16 sums (i16, unused)    value = d * q

The iq and tq formats and mxfp4 are in codebook_formats.py, the blocks of quantised safetensors in
checkpoint_blocks.py.

The order of float operations is part of the format: every value has the bits of ggml's conversion.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.formats.checkpoint_blocks import (
    CHECKPOINT_BLOCKS,
    CHECKPOINT_TYPES,
    unpack_blocks,
)
from verbatim.formats.codebook_formats import SCALED, scaled_integers

# type -> (values per block, bytes per block)
BLOCKS: dict[str, tuple[int, int]] = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q8_0": (32, 34),
    "q2_k": (256, 84),
    "q3_k": (256, 110),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "q8_k": (256, 292),
    "iq4_nl": (32, 18),
    "iq4_xs": (256, 136),
    "iq3_s": (256, 110),
    "iq3_xxs": (256, 98),
    "iq2_s": (256, 82),
    "iq2_xs": (256, 74),
    "iq2_xxs": (256, 66),
    "iq1_m": (256, 56),
    "iq1_s": (256, 50),
    "tq2_0": (256, 66),
    "tq1_0": (256, 54),
    "mxfp4": (32, 17),
}
SIZES = BLOCKS | CHECKPOINT_BLOCKS  # also of types that no file holds
# Values converted at a time: temporaries stay in the CPU cache, and peak memory is the result plus
# a few MiB.
CHUNK_VALUES = 1 << 18

# Bit shifts that unpack a byte into 2 nibbles, 4 two-bit values, or 8 bits.
_NIBBLES = np.array([0, 4], dtype=np.uint8).reshape(1, 1, 2, 1)
_CRUMBS = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
_BITS = np.arange(8, dtype=np.uint8).reshape(1, 1, 8, 1)


def nbytes(type: str, shape: tuple[int, ...]) -> int:
    """Size in bytes of a weight. Python integers do not overflow, however absurd the shape."""
    values, size = SIZES[type]
    if not shape or shape[-1] % values:
        raise ModelError(
            f"a {type} row holds a multiple of {values} values, not {shape[-1] if shape else 0}"
        )
    total = shape[-1] // values * size
    for dim in shape[:-1]:
        total *= dim
    return total


def dequantise(type: str, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Raw bytes (uint8, any shape) -> float32 of `shape`. A copy, except for contiguous f32."""
    if type not in SIZES:
        raise ModelError(f"unknown weight type {type!r}; known: {', '.join(BLOCKS)}")
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    if raw.size != (expected := nbytes(type, shape)):
        raise ModelError(f"a {type} weight of shape {shape} takes {expected} bytes, not {raw.size}")
    if type == "f32":
        return raw.view("<f4").reshape(shape)
    values, size = SIZES[type]
    blocks = raw.reshape(-1, size)
    out = np.empty((len(blocks), values), dtype=np.float32)
    step = max(1, CHUNK_VALUES // values)
    # A hostile file may hold infinite scales: inf and NaN are then the values, without a warning.
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            part, target = blocks[start : start + step], out[start : start + step]
            if type in SCALED:
                _scaled(type, part, target)
            elif type in CHECKPOINT_TYPES:
                unpack_blocks(type, part, target)
            else:
                _UNPACK[type](part, target)
    return out.reshape(shape)


# ------------------------------------------------------------------------- one function per type
# blocks: uint8 [n, bytes per block]; out: float32 [n, values per block], written


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The f16 at byte `at` of each block, as f32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _low_high(packed: np.ndarray, width: int) -> np.ndarray:
    """Bytes [n, m] -> nibbles [n, 2 m]: low nibbles of `width` bytes, then their high nibbles."""
    n = len(packed)
    return ((packed.reshape(n, -1, 1, width) >> _NIBBLES) & np.uint8(15)).reshape(n, -1)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """Four bytes [n, 4] -> [n, 32] of 0 or 16; value j takes bit j."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=-1, bitorder="little") << np.uint8(4)


def _scaled(type: str, blocks: np.ndarray, out: np.ndarray) -> None:
    scale, integers = scaled_integers(type, blocks)
    shape = (*scale.shape, -1)
    np.multiply(scale[:, :, None], integers.reshape(shape), out=out.reshape(shape))


def _f16(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = blocks.view("<f2")


def _bf16(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    q = _low_high(blocks[:, 2:], 16).view(np.int8) - np.int8(8)
    np.multiply(_half(blocks, 0), q, out=out)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_half(blocks, 0), _low_high(blocks[:, 4:], 16), out=out)
    out += _half(blocks, 2)


def _q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    q = (_low_high(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])).view(np.int8) - np.int8(16)
    np.multiply(_half(blocks, 0), q, out=out)


def _q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(
        _half(blocks, 0), _low_high(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8]), out=out
    )
    out += _half(blocks, 2)


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_half(blocks, 0), blocks[:, 2:].view(np.int8), out=out)


def _q2_k(blocks: np.ndarray, out: np.ndarray) -> None:
    n = len(blocks)
    scales = blocks[:, :16]
    scale = (_half(blocks, 80) * (scales & np.uint8(15))).reshape(n, 16, 1)
    offset = (_half(blocks, 82) * (scales >> np.uint8(4))).reshape(n, 16, 1)
    q = (blocks[:, 16:80].reshape(n, 2, 1, 32) >> _CRUMBS) & np.uint8(3)
    runs = out.reshape(n, 16, 16)
    np.multiply(scale, q.reshape(n, 16, 16), out=runs)
    runs -= offset


def _q3_k(blocks: np.ndarray, out: np.ndarray) -> None:
    n = len(blocks)
    # Sixteen 6-bit scales with an offset of 32. Bytes 0..7 hold the low nibbles (of scales 0..7 in
    # the low half, of 8..15 in the high half). Bytes 8..11 hold the two high bits of scales j, j+4,
    # j+8, j+12, in that order.
    packed = blocks[:, 96:108]
    low = _low_high(packed[:, :8], 8)
    high = ((packed[:, 8:].reshape(n, 1, 1, 4) >> _CRUMBS) & np.uint8(3)).reshape(n, 16)
    scales = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    scale = (_half(blocks, 108) * scales).reshape(n, 16, 1)
    q = (
        ((blocks[:, 32:96].reshape(n, 2, 1, 32) >> _CRUMBS) & np.uint8(3))
        .reshape(n, 16, 16)
        .view(np.int8)
    )
    mask = (
        ((blocks[:, :32].reshape(n, 1, 1, 32) >> _BITS) & np.uint8(1))
        .reshape(n, 16, 16)
        .view(np.int8)
    )
    # A clear bit in the mask means minus four.
    np.multiply(scale, q - np.int8(4) + (mask << np.int8(2)), out=out.reshape(n, 16, 16))


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Twelve bytes -> eight 6-bit scales and eight 6-bit minima (q4_k and q5_k).

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


def _k_affine(blocks: np.ndarray, q: np.ndarray, out: np.ndarray) -> None:
    n = len(blocks)
    scales, minima = _k_scales(blocks[:, 4:16])
    runs = out.reshape(n, 8, 32)
    np.multiply((_half(blocks, 0) * scales).reshape(n, 8, 1), q.reshape(n, 8, 32), out=runs)
    runs -= (_half(blocks, 2) * minima).reshape(n, 8, 1)


def _q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    _k_affine(blocks, _low_high(blocks[:, 16:], 32), out)


def _q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    n = len(blocks)
    fifth = ((blocks[:, 16:48].reshape(n, 1, 1, 32) >> _BITS) & np.uint8(1)).reshape(
        n, 256
    ) << np.uint8(4)
    _k_affine(blocks, _low_high(blocks[:, 48:], 32) | fifth, out)


def _q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    n = len(blocks)
    low = _low_high(blocks[:, :128], 64)
    high = ((blocks[:, 128:192].reshape(n, 2, 1, 32) >> _CRUMBS) & np.uint8(3)).reshape(n, 256)
    q = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    scale = (_half(blocks, 208) * blocks[:, 192:208].view(np.int8)).reshape(n, 16, 1)
    np.multiply(scale, q.reshape(n, 16, 16), out=out.reshape(n, 16, 16))


def _q8_k(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(
        np.ascontiguousarray(blocks[:, :4]).view("<f4"), blocks[:, 4:260].view(np.int8), out=out
    )


_UNPACK: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
    "f16": _f16,
    "bf16": _bf16,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "q8_k": _q8_k,
}
