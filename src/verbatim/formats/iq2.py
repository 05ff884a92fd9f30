"""iq2_xxs, iq2_xs, iq2_s: vectors of 8 from a codebook, with signs.

    iq2_xxs  d (f16), 8 times (4 index bytes; 4 times 7 sign bits, 4 scale bits)
    iq2_xs   d, 32 times (9 index bits, 7 sign bits), 8 bytes of scales, 16 runs of 16
    iq2_s    d, 32 low index bytes, 32 sign bytes, 8 of high index bits, 8 of scales, 16 runs of 16

The scale of a run is d * (s + 1/2) / 4. Seven sign bits stand for eight: the eighth makes the
number of minus signs even.
"""

from __future__ import annotations

import numpy as np

from verbatim.formats.bits import field, fields, half
from verbatim.formats.codebooks import EVEN_SIGNS, offset_scale, signed
from verbatim.formats.format import Format, Scaled


def _iq2_xxs(blocks: np.ndarray) -> Scaled:
    words = field(blocks, 2, 66, "<u4").reshape(len(blocks), 8, 2)
    indices = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    signs = EVEN_SIGNS[fields(words[:, :, 1], 7, 4)]
    scale = half(blocks, 0) * offset_scale(words[:, :, 1] >> 28) * np.float32(0.25)
    return scale, signed("iq2_xxs", indices, signs)


def _iq2_xs(blocks: np.ndarray) -> Scaled:
    words = field(blocks, 2, 66, "<u2")
    scales = fields(blocks[:, 66:], 4, 2)
    scale = half(blocks, 0) * offset_scale(scales) * np.float32(0.25)
    return scale, signed("iq2_xs", words & np.uint16(511), EVEN_SIGNS[words >> 9])


def _iq2_s(blocks: np.ndarray) -> Scaled:
    high = fields(blocks[:, 66:74], 2, 4).astype(np.uint16)
    scale = half(blocks, 0) * offset_scale(fields(blocks[:, 74:], 4, 2)) * np.float32(0.25)
    return scale, signed("iq2_s", blocks[:, 2:34] | high << 8, blocks[:, 34:66])


FORMATS = (
    Format("iq2_s", 256, 82, 22, scaled=_iq2_s, scales=(0,), cpu_type="q8_h", cpu_bytes=40 / 32),
    Format("iq2_xs", 256, 74, 17, scaled=_iq2_xs, scales=(0,), cpu_type="q8_h", cpu_bytes=40 / 32),
    Format(
        "iq2_xxs", 256, 66, 16, scaled=_iq2_xxs, scales=(0,), cpu_type="q8_f", cpu_bytes=36 / 32
    ),
)
