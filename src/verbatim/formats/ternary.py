"""tq1_0 and tq2_0: 256 ternary digits with one scale.

    tq1_0    48 bytes of five digits, 4 of four, d (f16)     d * (t - 1)
    tq2_0    64 bytes of 2 bits, d                           d * (t - 1)

The native engine reads them as q2_k with d = dmin and all scales 1.
"""

from __future__ import annotations

import numpy as np

from verbatim.formats.bits import CRUMBS, half, spread
from verbatim.formats.format import Format, Scaled

_POWERS_OF_3 = np.array([1, 3, 9, 27, 81], dtype=np.uint8)


def _tq1_0(blocks: np.ndarray) -> Scaled:
    # A byte b holds digits as a fraction of 256: the digit is the integer part of 3 * b / 256, the
    # following ones are in 3 * b modulo 256.
    parts = [
        (blocks[:, None, start:stop] * _POWERS_OF_3[:digits, None]).reshape(len(blocks), -1)
        for start, stop, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    ]
    digits = (np.concatenate(parts, axis=1).astype(np.uint16) * 3) >> 8
    return half(blocks, 52), digits.astype(np.int8) - np.int8(1)


def _tq2_0(blocks: np.ndarray) -> Scaled:
    return half(blocks, 64), spread(blocks[:, :64], 32, CRUMBS).view(np.int8) - np.int8(1)


FORMATS = (
    Format("tq2_0", 256, 66, 35, scaled=_tq2_0, scales=(64,), cpu_type="q2_k", cpu_bytes=100 / 256),
    Format("tq1_0", 256, 54, 34, scaled=_tq1_0, scales=(52,), cpu_type="q2_k", cpu_bytes=100 / 256),
)
