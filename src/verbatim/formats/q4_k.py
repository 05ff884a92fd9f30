"""q4_k: 256 values in 8 runs, 4 bits each, with 6-bit scales and minima.

A block: d, m (f16), 12 bytes of scales, 128 of nibbles; value = (d * s) * q - (m * t).
"""

from __future__ import annotations

import numpy as np

from verbatim.formats.bits import low_high, pack_nibbles
from verbatim.formats.format import FileType, Format, GpuBlocks
from verbatim.formats.k_scales import pack_affine, unpack_affine


def _unpack(blocks: np.ndarray, out: np.ndarray) -> None:
    unpack_affine(blocks, low_high(blocks[:, 16:], 32), out)


def _pack(x: np.ndarray, out: np.ndarray) -> None:
    out[:, 16:] = pack_nibbles(pack_affine(x, out, 15), 32)


FORMATS = (
    Format(
        "q4_k", 256, 144, 12, _unpack, pack=_pack, pack_error=0.0736, scales=(0, 2),
        gpu=GpuBlocks(4, 32, 8, offset="add"),
        file_type=FileType(14, ("q4_k_s", "q4_k_m"), small="q5_0"),
    ),
)  # fmt: skip
