"""mxfp4: 32 values of 4 bits (E2M1) with a power of two.

A block: the exponent e (E8M0), 16 bytes of nibbles; value = 2 ** (e - 128) * E2M1[q], with E2M1
doubled so that it holds integers.
"""

from __future__ import annotations

import numpy as np

from verbatim.formats.bits import low_high
from verbatim.formats.format import Format, GpuBlocks, Scaled

E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_E2M1 = np.array(E2M1, dtype=np.int8)
# The largest exponent byte whose values are all finite: 2 ** (252 - 128) * 12.
_LARGEST_E8M0 = 252


def _mxfp4(blocks: np.ndarray) -> Scaled:
    e = blocks[:, :1].astype(np.uint32)
    # The two smallest scales are subnormal.
    bits = np.where(e < 2, np.uint32(0x00200000) << (e & 1), (e - 1) << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32), _E2M1[low_high(blocks[:, 1:], 16)]


def _broken(blocks: np.ndarray) -> np.ndarray:
    return np.asarray(blocks[:, :1] > _LARGEST_E8M0)


FORMATS = (
    Format(
        "mxfp4", 32, 17, 39, scaled=_mxfp4, broken=_broken,
        gpu=GpuBlocks(4, 32, 2, code="e2m1", result="bf16"), cpu_bytes=20 / 32,
    ),
)  # fmt: skip
