"""q6_k: 256 values in 16 runs, 6 bits each, with signed 8-bit scales.

A block: 128 bytes of low 4 bits, 64 of high 2 bits, 16 signed scales s, d (f16);
value = (d * s) * (q - 32).
"""

from __future__ import annotations

import numpy as np

from verbatim.formats.bits import CRUMBS, half, inverse_of, low_high, pack_nibbles, put_half, spread
from verbatim.formats.format import FileType, Format, GpuBlocks
from verbatim.formats.k_scales import fit_symmetric


def _unpack(blocks: np.ndarray, out: np.ndarray) -> None:
    n = len(blocks)
    low = low_high(blocks[:, :128], 64)
    high = spread(blocks[:, 128:192], 32, CRUMBS)
    q = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    scale = (half(blocks, 208) * blocks[:, 192:208].view(np.int8)).reshape(n, 16, 1)
    np.multiply(scale, q.reshape(n, 16, 16), out=out.reshape(n, 16, 16))


def _pack(x: np.ndarray, out: np.ndarray) -> None:
    n = len(x)
    runs = x.reshape(n, 16, 16)
    scale = fit_symmetric(runs, 32)
    largest = np.take_along_axis(scale, np.abs(scale).argmax(axis=1, keepdims=True), axis=1)
    # The largest scale maps to -128: int8 has one more negative value than positive ones.
    d = put_half(out, 208, largest / np.float32(-128))
    s = np.clip(np.rint(scale * inverse_of(d)), -128, 127).astype(np.int8)
    out[:, 192:208] = s.view(np.uint8)
    q = np.clip(np.rint(runs * inverse_of(d * s)[..., None]), -32, 31).astype(np.int8)
    q = (q + np.int8(32)).view(np.uint8).reshape(n, 256)
    out[:, :128] = pack_nibbles(q, 64)
    high = (q >> np.uint8(4)).reshape(n, 2, 4, 32) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    out[:, 128:192] = np.bitwise_or.reduce(high, axis=2).reshape(n, 64)


FORMATS = (
    Format(
        "q6_k", 256, 210, 14, _unpack, pack=_pack, pack_error=0.0178, scales=(208,),
        gpu=GpuBlocks(8, 16, 4), file_type=FileType(18, small="q8_0"),
    ),
)  # fmt: skip
