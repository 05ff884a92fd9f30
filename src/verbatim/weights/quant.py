"""Operations on quantised tensors: convert to another block format, find non-finite blocks."""

from __future__ import annotations

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.weights.block_formats import BLOCKS, CHUNK_VALUES, dequantise, nbytes
from verbatim.weights.quantise import quantise
from verbatim.weights.tensor import Tensor

__all__ = ["broken_block", "dequantise", "nbytes", "quantise", "requantise"]


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


# Float type of a block's scales, and their byte offsets in the block.
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
}


def broken_block(tensor: Tensor) -> int | None:
    """Index of the first block with a NaN or an infinity among its scales; None if there is none.

    For f32, f16 and bf16 the values themselves are checked. The function reads the whole weight at
    about 6 GB/s, which adds about a tenth to the load time of a large model."""
    kind, offsets = _SCALES[tensor.type]
    width = np.dtype(kind).itemsize
    values = tensor.data.view(kind).reshape(-1, BLOCKS[tensor.type][1] // width)
    found: list[int] = []
    for offset in offsets:
        column = values[:, offset // width]
        finite = (
            (column & np.uint16(0x7F80)) != 0x7F80 if tensor.type == "bf16" else np.isfinite(column)
        )
        if not finite.all():
            found.append(int(np.argmin(finite)))
    return min(found, default=None)
