"""iq4_nl and iq4_xs: 4-bit indices into a table of 16 signed integers.

iq4_nl   d (f16), 16 bytes of nibbles                                       d * TABLE[q]
iq4_xs   d, 2 bytes of high scale bits, 4 of low, 128 of nibbles   d * (s - 32) * TABLE[q]
"""

from __future__ import annotations

import numpy as np

from verbatim.formats.bits import field, fields, half, low_high
from verbatim.formats.format import Format, Scaled

_TABLE = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8
)


def _iq4_nl(blocks: np.ndarray) -> Scaled:
    return half(blocks, 0), _TABLE[low_high(blocks[:, 2:], 16)]


def _iq4_xs(blocks: np.ndarray) -> Scaled:
    high = fields(field(blocks, 2, 4, "<u2"), 2, 8).astype(np.uint8)
    scales = (fields(blocks[:, 4:8], 4, 2) | high << np.uint8(4)).view(np.int8) - np.int8(32)
    return half(blocks, 0) * scales, _TABLE[low_high(blocks[:, 8:], 16)]


FORMATS = (
    Format("iq4_nl", 32, 18, 20, scaled=_iq4_nl, scales=(0,), cpu_bytes=20 / 32),
    Format("iq4_xs", 256, 136, 23, scaled=_iq4_xs, scales=(0,), cpu_bytes=20 / 32),
)
