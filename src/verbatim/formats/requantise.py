"""Operations on quantised tensors: convert to another block format, find non-finite blocks."""

from __future__ import annotations

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.formats.block_formats import BLOCKS, CHUNK_VALUES, dequantise, nbytes
from verbatim.formats.codebook_formats import iq1_m_d
from verbatim.formats.quantise import quantise
from verbatim.formats.tensor import Tensor

__all__ = ["broken_block", "broken_scales", "dequantise", "nbytes", "quantise", "requantise"]


def requantise(tensor: Tensor, type: str) -> Tensor:
    """Convert a weight to another type, a few rows at a time.

    Peak memory is the result plus a few MiB, never a float32 copy of the weight."""
    if tensor.type == type:
        return tensor
    try:
        out = np.empty(nbytes(type, tensor.shape), dtype=np.uint8).reshape(tensor.rows, -1)
        rows = tensor.row_view()
        step = max(1, CHUNK_VALUES // tensor.shape[-1])
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step]
            values = dequantise(tensor.type, chunk, (len(chunk), tensor.shape[-1]))
            out[start : start + step] = quantise(type, values).reshape(len(chunk), -1)
    except ModelError as error:
        raise ModelError(
            f"weight {tensor.name!r} cannot be turned into {type}: {error.message}"
        ) from None
    return Tensor(tensor.name, type, tensor.shape, out.reshape(-1))


# Float type of a block's scales, and their byte offsets in the block. See also broken_scales.
_SCALES: dict[str, tuple[str, tuple[int, ...]]] = {
    "f32": ("<f4", (0,)),
    "f16": ("<f2", (0,)),
    "bf16": ("<u2", (0,)),
    "q4_0": ("<f2", (0,)),
    "q4_1": ("<f2", (0, 2)),
    "q5_0": ("<f2", (0,)),
    "q5_1": ("<f2", (0, 2)),
    "q8_0": ("<f2", (0,)),
    "q2_k": ("<f2", (80, 82)),
    "q3_k": ("<f2", (108,)),
    "q4_k": ("<f2", (0, 2)),
    "q5_k": ("<f2", (0, 2)),
    "q6_k": ("<f2", (208,)),
    "q8_k": ("<f4", (0,)),
    "iq4_nl": ("<f2", (0,)),
    "iq4_xs": ("<f2", (0,)),
    "iq3_s": ("<f2", (0,)),
    "iq3_xxs": ("<f2", (0,)),
    "iq2_s": ("<f2", (0,)),
    "iq2_xs": ("<f2", (0,)),
    "iq2_xxs": ("<f2", (0,)),
    "iq1_s": ("<f2", (0,)),
    "tq2_0": ("<f2", (64,)),
    "tq1_0": ("<f2", (52,)),
}
# The largest exponent byte of mxfp4 whose values are all finite: 2 ** (252 - 128) * 12.
_LARGEST_E8M0 = 252


def broken_scales(type: str, data: np.ndarray) -> np.ndarray:
    """bool [blocks, scales per block] of flat bytes: the scale is NaN or infinite.

    For f32, f16 and bf16 the values themselves are checked, and a block is one value."""
    blocks = data.reshape(-1, BLOCKS[type][1])
    if type == "mxfp4":
        return np.asarray(blocks[:, :1] > _LARGEST_E8M0)
    if type == "iq1_m":
        with np.errstate(invalid="ignore"):  # the cast of a NaN
            return np.asarray(~np.isfinite(iq1_m_d(blocks)))
    kind, offsets = _SCALES[type]
    if kind == "<u2":
        return np.asarray(data.view(kind) & np.uint16(0x7F80) == 0x7F80)[:, None]
    columns = np.array(offsets) // np.dtype(kind).itemsize
    return np.asarray(~np.isfinite(data.view(kind).reshape(len(blocks), -1)[:, columns]))


def broken_block(tensor: Tensor) -> int | None:
    """Index of the first block with a NaN or an infinity among its scales; None if there is none.

    For f32, f16 and bf16 the values themselves are checked. The function reads the whole weight at
    about 6 GB/s, which adds about a tenth to the load time of a large model."""
    broken = broken_scales(tensor.type, tensor.data).any(axis=1)
    return int(np.argmax(broken)) if broken.any() else None
