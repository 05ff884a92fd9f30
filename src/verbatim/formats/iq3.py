"""iq3_xxs and iq3_s: vectors of 4 from a codebook, with signs.

    iq3_xxs  d (f16), 64 index bytes, 8 times (4 times 7 sign bits, 4 scale bits)
    iq3_s    d, 64 low index bytes, 8 of high index bits, 32 sign bytes, 4 of scales

The scale of a run is d * (s + 1/2) / 2 of iq3_xxs, d * (2 s + 1) of iq3_s.
"""

from __future__ import annotations

import numpy as np

from verbatim.formats.bits import field, fields, half
from verbatim.formats.codebooks import EVEN_SIGNS, offset_scale, signed
from verbatim.formats.format import Format, Scaled


def _iq3_xxs(blocks: np.ndarray) -> Scaled:
    words = field(blocks, 66, 98, "<u4")
    scale = half(blocks, 0) * offset_scale(words >> 28) * np.float32(0.5)
    return scale, signed("iq3_xxs", blocks[:, 2:66], EVEN_SIGNS[fields(words, 7, 4)])


def _iq3_s(blocks: np.ndarray) -> Scaled:
    high = fields(blocks[:, 66:74], 1, 8).astype(np.uint16)
    scale = half(blocks, 0) * (2 * fields(blocks[:, 106:], 4, 2) + 1)
    return scale, signed("iq3_s", blocks[:, 2:66] | high << 8, blocks[:, 74:106])


FORMATS = (
    Format("iq3_s", 256, 110, 21, scaled=_iq3_s, scales=(0,), cpu_type="q8_f", cpu_bytes=36 / 32),
    Format(
        "iq3_xxs", 256, 98, 18, scaled=_iq3_xxs, scales=(0,), cpu_type="q8_f", cpu_bytes=36 / 32
    ),
)
