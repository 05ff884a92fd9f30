"""q4_0, q4_1, q5_0, q5_1, q8_0: 32 values of one row with one scale, and perhaps an offset.

Fields of a block in order (d and m are f16):

    q4_0  d, 16 bytes of nibbles                         value = d * (q - 8)
    q4_1  d, m, 16 bytes of nibbles                      value = d * q + m
    q5_0  d, 4 bytes of fifth bits, 16 of nibbles        value = d * (q - 16)
    q5_1  d, m, 4 bytes of fifth bits, 16 of nibbles     value = d * q + m
    q8_0  d, 32 signed bytes                             value = d * q

Packing has the bits of ggml's reference quantisation.
"""

from __future__ import annotations

import numpy as np

from verbatim.formats.bits import (
    half,
    inverse_of,
    low_high,
    pack_nibbles,
    put_half,
    round_away,
    to_bytes,
)
from verbatim.formats.format import FileType, Format, GpuBlocks


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """Four bytes [n, 4] -> [n, 32] of 0 or 16; value j takes bit j."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=-1, bitorder="little") << np.uint8(4)


def _put_fifth_bits(q: np.ndarray, out: np.ndarray, at: int) -> None:
    out[:, at : at + 4] = np.packbits(q >> np.uint8(4), axis=1, bitorder="little")


def _symmetric(x: np.ndarray, out: np.ndarray, half: int) -> np.ndarray:
    """q4_0 and q5_0: the value of largest magnitude maps to -half. Returns q in 0 .. 2 half - 1."""
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    d = largest / np.float32(-half)
    put_half(out, 0, d)
    return to_bytes(np.trunc(x * inverse_of(d) + np.float32(half + 0.5)), 2 * half - 1)


def _affine(x: np.ndarray, out: np.ndarray, levels: int) -> np.ndarray:
    """q4_1 and q5_1: the smallest value maps to 0, the largest to `levels`. Returns q."""
    minimum = x.min(axis=1, keepdims=True)
    d = (x.max(axis=1, keepdims=True) - minimum) / np.float32(levels)
    put_half(out, 0, d)
    put_half(out, 2, minimum)
    return to_bytes(np.trunc((x - minimum) * inverse_of(d) + np.float32(0.5)), levels)


def _unpack_q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    q = low_high(blocks[:, 2:], 16).view(np.int8) - np.int8(8)
    np.multiply(half(blocks, 0), q, out=out)


def _pack_q4_0(x: np.ndarray, out: np.ndarray) -> None:
    out[:, 2:] = pack_nibbles(_symmetric(x, out, 8), 16)


def _unpack_q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(half(blocks, 0), low_high(blocks[:, 4:], 16), out=out)
    out += half(blocks, 2)


def _pack_q4_1(x: np.ndarray, out: np.ndarray) -> None:
    out[:, 4:] = pack_nibbles(_affine(x, out, 15), 16)


def _unpack_q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    q = (low_high(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])).view(np.int8) - np.int8(16)
    np.multiply(half(blocks, 0), q, out=out)


def _pack_q5_0(x: np.ndarray, out: np.ndarray) -> None:
    q = _symmetric(x, out, 16)
    _put_fifth_bits(q, out, 2)
    out[:, 6:] = pack_nibbles(q, 16)


def _unpack_q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(half(blocks, 0), low_high(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8]), out=out)
    out += half(blocks, 2)


def _pack_q5_1(x: np.ndarray, out: np.ndarray) -> None:
    q = _affine(x, out, 31)
    _put_fifth_bits(q, out, 4)
    out[:, 8:] = pack_nibbles(q, 16)


def _unpack_q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(half(blocks, 0), blocks[:, 2:].view(np.int8), out=out)


def _pack_q8_0(x: np.ndarray, out: np.ndarray) -> None:
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    put_half(out, 0, d)
    out[:, 2:] = round_away(x * inverse_of(d)).astype(np.int8).view(np.uint8)


FORMATS = (
    Format(
        "q4_0", 32, 18, 2, _unpack_q4_0, pack=_pack_q4_0, pack_error=0.096, scales=(0,),
        gpu=GpuBlocks(4, 32, 2), file_type=FileType(2),
    ),
    Format(
        "q4_1", 32, 20, 3, _unpack_q4_1, pack=_pack_q4_1, pack_error=0.086, scales=(0, 2),
        gpu=GpuBlocks(4, 32, 4, offset="add"), file_type=FileType(3),
    ),
    Format(
        "q5_0", 32, 22, 6, _unpack_q5_0, pack=_pack_q5_0, pack_error=0.048, scales=(0,),
        gpu=GpuBlocks(8, 32, 2), file_type=FileType(8),
    ),
    Format(
        "q5_1", 32, 24, 7, _unpack_q5_1, pack=_pack_q5_1, pack_error=0.042, scales=(0, 2),
        gpu=GpuBlocks(8, 32, 4, offset="add"), file_type=FileType(9),
    ),
    Format(
        "q8_0", 32, 34, 8, _unpack_q8_0, pack=_pack_q8_0, pack_error=0.006, scales=(0,),
        gpu=GpuBlocks(8, 32, 2), file_type=FileType(7),
    ),
)  # fmt: skip
