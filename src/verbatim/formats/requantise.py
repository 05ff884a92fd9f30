"""Operations on quantised tensors: convert to another block format, find non-finite blocks."""

from __future__ import annotations

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.formats.conversion import CHUNK_VALUES, dequantise, nbytes, quantise
from verbatim.formats.registry import FORMATS
from verbatim.formats.tensor import Tensor


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


def broken_scales(type: str, data: np.ndarray) -> np.ndarray:
    """bool [blocks, scales per block] of flat bytes: the scale is NaN or infinite.

    For f32, f16 and bf16 the values themselves are checked, and a block is one value."""
    form = FORMATS[type]
    blocks = data.reshape(-1, form.size)
    if form.broken is not None:
        return form.broken(blocks)
    columns = np.array(form.scales) // np.dtype(form.scale_type).itemsize
    scales = data.view(form.scale_type).reshape(len(blocks), -1)[:, columns]
    return np.asarray(~np.isfinite(scales))


def broken_block(tensor: Tensor) -> int | None:
    """Index of the first block with a NaN or an infinity among its scales; None if there is none.

    For f32, f16 and bf16 the values themselves are checked. The function reads the whole weight at
    about 6 GB/s, which adds about a tenth to the load time of a large model."""
    broken = broken_scales(tensor.type, tensor.data).any(axis=1)
    return int(np.argmax(broken)) if broken.any() else None
