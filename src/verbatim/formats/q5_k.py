"""q5_k: 256 values in 8 runs, 5 bits each, with 6-bit scales and minima.

A block: d, m (f16), 12 bytes of scales, 32 of fifth bits, 128 of nibbles;
value = (d * s) * q - (m * t).
"""

from __future__ import annotations

import numpy as np

from verbatim.formats.bits import BITS, low_high, pack_nibbles, spread
from verbatim.formats.format import FileType, Format, GpuBlocks
from verbatim.formats.k_scales import pack_affine, unpack_affine


def _unpack(blocks: np.ndarray, out: np.ndarray) -> None:
    fifth = spread(blocks[:, 16:48], 32, BITS)
    unpack_affine(blocks, low_high(blocks[:, 48:], 32) | (fifth << np.uint8(4)), out)


def _pack(x: np.ndarray, out: np.ndarray) -> None:
    q = pack_affine(x, out, 31)
    fifth = (q >> np.uint8(4)).reshape(len(x), 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
    out[:, 16:48] = np.bitwise_or.reduce(fifth, axis=1)
    out[:, 48:] = pack_nibbles(q, 32)


FORMATS = (
    Format(
        "q5_k", 256, 176, 13, _unpack, pack=_pack, pack_error=0.0366, scales=(0, 2),
        gpu=GpuBlocks(8, 32, 8, offset="add"),
        file_type=FileType(16, ("q5_k_s", "q5_k_m"), small="q5_1"),
    ),
)  # fmt: skip
