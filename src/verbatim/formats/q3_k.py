"""q3_k: 256 values in 16 runs, 3 bits each, with 6-bit scales.

A block: 32 bytes of high bits, 64 of 2 bits, 12 of scales, d (f16); value = (d * (s - 32)) * q.
"""

from __future__ import annotations

import numpy as np

from verbatim.formats.bits import BITS, CRUMBS, half, low_high, spread
from verbatim.formats.format import Format


def _unpack(blocks: np.ndarray, out: np.ndarray) -> None:
    n = len(blocks)
    # Sixteen 6-bit scales with an offset of 32. Bytes 0..7 hold the low nibbles (of scales 0..7 in
    # the low half, of 8..15 in the high half). Bytes 8..11 hold the two high bits of scales j, j+4,
    # j+8, j+12, in that order.
    packed = blocks[:, 96:108]
    low = low_high(packed[:, :8], 8)
    high = spread(packed[:, 8:], 4, CRUMBS)
    scales = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    scale = (half(blocks, 108) * scales).reshape(n, 16, 1)
    q = spread(blocks[:, 32:96], 32, CRUMBS).reshape(n, 16, 16).view(np.int8)
    mask = spread(blocks[:, :32], 32, BITS).reshape(n, 16, 16).view(np.int8)
    # A clear bit in the mask means minus four.
    np.multiply(scale, q - np.int8(4) + (mask << np.int8(2)), out=out.reshape(n, 16, 16))


FORMATS = (Format("q3_k", 256, 110, 11, _unpack, scales=(108,)),)
