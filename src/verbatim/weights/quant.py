"""Operations on quantised tensors: conversion to another block format, and the search for broken blocks."""

from __future__ import annotations

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.weights.block_formats import BLOCKS, CHUNK_VALUES, dequantise, nbytes
from verbatim.weights.quantise import quantise
from verbatim.weights.tensor import Tensor

__all__ = ["broken_block", "dequantise", "nbytes", "quantise", "requantise"]


def requantise(tensor: Tensor, type: str) -> Tensor:
    """The same weight in another type, a few rows at a time: the peak is the result plus a few MiB, never a float32 copy.

    A loader that lets go of each source before the next one thus needs the quantised model and one tensor's map at most."""
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


# where the floats of a block lie, in bytes; the plain types are nothing else
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
    """The first block that holds a NaN or an infinity (a scale, or the value itself of a plain type); None: all are numbers.

    It reads the whole weight, at some 6 GB/s: right for a small file, a tenth of the loading of a large one."""
    kind, places = _SCALES[tensor.type]
    width = np.dtype(kind).itemsize
    words = tensor.data.view(kind).reshape(-1, BLOCKS[tensor.type][1] // width)
    found: list[int] = []
    for place in places:
        column = words[:, place // width]
        good = (
            (column & np.uint16(0x7F80)) != 0x7F80 if tensor.type == "bf16" else np.isfinite(column)
        )
        if not good.all():
            found.append(int(np.argmin(good)))
    return min(found, default=None)
