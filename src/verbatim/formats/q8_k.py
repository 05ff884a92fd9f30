"""q8_k: 256 signed bytes with one float32 scale.

A block: d (f32), 256 signed bytes, 16 sums (i16, unused); value = d * q.
"""

from __future__ import annotations

import numpy as np

from verbatim.formats.format import Format


def _unpack(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(
        np.ascontiguousarray(blocks[:, :4]).view("<f4"), blocks[:, 4:260].view(np.int8), out=out
    )


FORMATS = (Format("q8_k", 256, 292, 15, _unpack, scales=(0,), scale_type="<f4"),)
