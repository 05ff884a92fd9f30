"""iq1_s and iq1_m: vectors of 8 from a codebook, each shifted by 1/8 up or down.

    iq1_s    d (f16), 32 low index bytes, 8 of (4 times 3 high index bits, 3 scale bits, shift sign)
    iq1_m    32 low index bytes, 16 of (3 high index bits, shift sign), 8 of scales with d in parts

The scale of a run is d * (2 s + 1). The integers here are multiplied by 8, the scale is divided by
8.
"""

from __future__ import annotations

import numpy as np

from verbatim.formats.bits import field, fields, half
from verbatim.formats.codebooks import codebook
from verbatim.formats.format import Format, Scaled


def _shifted(indices: np.ndarray, minus: np.ndarray) -> np.ndarray:
    """8 times the vectors of iq1, plus or minus 1; indices and minus [n, 32]."""
    shift = (1 - 2 * minus.astype(np.int8))[:, :, None]
    vectors: np.ndarray = 8 * codebook("iq1_s")[indices] + shift
    return vectors.reshape(len(indices), -1)


def _iq1_s(blocks: np.ndarray) -> Scaled:
    words = field(blocks, 34, 50, "<u2")
    indices = blocks[:, 2:34] | fields(words, 3, 4) << 8
    scale = half(blocks, 0) * (2 * (words >> 12 & 7) + 1) * np.float32(0.125)
    return scale, _shifted(indices, np.repeat(words >> 15, 4, axis=1))


def _iq1_m_d(blocks: np.ndarray) -> np.ndarray:
    """d [n, 1]: its nibbles are the high ones of the four 16-bit words of scales."""
    words = field(blocks, 48, 56, "<u2") >> 12
    bits = words[:, 0] | words[:, 1] << 4 | words[:, 2] << 8 | words[:, 3] << 12
    return bits.astype("<u2").view("<f2").astype(np.float32)[:, None]


def _iq1_m(blocks: np.ndarray) -> Scaled:
    high = fields(blocks[:, 32:48], 4, 2)
    indices = blocks[:, :32] | (high & 7).astype(np.uint16) << 8
    scales = fields(field(blocks, 48, 56, "<u2"), 3, 4)
    scale = _iq1_m_d(blocks) * (2 * scales + 1) * np.float32(0.125)
    return scale, _shifted(indices, high >> 3)


def _broken_iq1_m(blocks: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # the cast of a NaN
        return np.asarray(~np.isfinite(_iq1_m_d(blocks)))


FORMATS = (
    Format(
        "iq1_m", 256, 56, 29, scaled=_iq1_m, broken=_broken_iq1_m, cpu_type="q8_h",
        cpu_bytes=40 / 32,
    ),
    Format("iq1_s", 256, 50, 19, scaled=_iq1_s, scales=(0,), cpu_type="q8_f", cpu_bytes=36 / 32),
)  # fmt: skip
