"""q2_k: 256 values in 16 runs, 2 bits each, with 4-bit scales and minima.

A block: 16 bytes of (scale s, minimum t), 64 bytes of 2 bits, d, m (f16);
value = (d * s) * q - (m * t).
"""

from __future__ import annotations

import numpy as np

from verbatim.formats.bits import CRUMBS, half, spread
from verbatim.formats.format import Format


def _unpack(blocks: np.ndarray, out: np.ndarray) -> None:
    n = len(blocks)
    scales = blocks[:, :16]
    scale = (half(blocks, 80) * (scales & np.uint8(15))).reshape(n, 16, 1)
    offset = (half(blocks, 82) * (scales >> np.uint8(4))).reshape(n, 16, 1)
    q = spread(blocks[:, 16:80], 32, CRUMBS)
    runs = out.reshape(n, 16, 16)
    np.multiply(scale, q.reshape(n, 16, 16), out=runs)
    runs -= offset


FORMATS = (Format("q2_k", 256, 84, 10, _unpack, scales=(80, 82)),)
