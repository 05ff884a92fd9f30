"""Convert weights between float32 and block formats; find blocks that are not finite.

In: a type, and the bytes of a file or a float array. Out: a float32 array, or a flat uint8 array of
the bytes as a file stores them. The functions of one format are in its module (registry.py).
"""

from __future__ import annotations

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.formats.format import Format
from verbatim.formats.registry import BLOCKS, FORMATS, WRITABLE

# Values converted at a time: temporaries stay in the CPU cache, and peak memory is the result plus
# a few MiB.
CHUNK_VALUES = 1 << 18
_PACK_VALUES = 1 << 16  # quantisation has more temporaries


def nbytes(type: str, shape: tuple[int, ...]) -> int:
    """Size in bytes of a weight. Python integers do not overflow, however absurd the shape."""
    form = FORMATS[type]
    values, size = form.values, form.size
    if not shape or shape[-1] % values:
        raise ModelError(
            f"a {type} row holds a multiple of {values} values, not {shape[-1] if shape else 0}"
        )
    total = shape[-1] // values * size
    for dim in shape[:-1]:
        total *= dim
    return total


def dequantise(type: str, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Raw bytes (uint8, any shape) -> float32 of `shape`. A copy, except for contiguous f32."""
    form = FORMATS.get(type)
    if form is None:
        raise ModelError(f"unknown weight type {type!r}; known: {', '.join(BLOCKS)}")
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    if raw.size != (expected := nbytes(type, shape)):
        raise ModelError(f"a {type} weight of shape {shape} takes {expected} bytes, not {raw.size}")
    if type == "f32":
        return raw.view("<f4").reshape(shape)
    blocks = raw.reshape(-1, form.size)
    out = np.empty((len(blocks), form.values), dtype=np.float32)
    step = max(1, CHUNK_VALUES // form.values)
    # A hostile file may hold infinite scales: inf and NaN are then the values, without a warning.
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            _unpack(form, blocks[start : start + step], out[start : start + step])
    return out.reshape(shape)


def _unpack(form: Format, blocks: np.ndarray, out: np.ndarray) -> None:
    if form.unpack is not None:
        form.unpack(blocks, out)
        return
    scale, integers = scaled_integers(form.name, blocks)
    shape = (*scale.shape, -1)
    np.multiply(scale[:, :, None], integers.reshape(shape), out=out.reshape(shape))


def scaled_integers(type: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale of each run, and integers, of a format with `scaled`. All runs have one length."""
    scaled = FORMATS[type].scaled
    assert scaled is not None, f"{type} has no integers"
    return scaled(blocks)


def quantise(type: str, array: np.ndarray) -> np.ndarray:
    """Float array (last axis contiguous in the file) -> flat uint8 bytes of `type`.

    Infinities and NaN are an error in the block formats."""
    if type == "f32":
        return np.ascontiguousarray(array, dtype="<f4").reshape(-1).view(np.uint8)
    form = FORMATS.get(type)
    if form is None or form.pack is None:
        raise ModelError(f"weights cannot be written as {type!r}; possible: {', '.join(WRITABLE)}")
    values = form.values
    if array.ndim == 0 or array.shape[-1] % values:
        raise ModelError(
            f"a {type} row holds a multiple of {values} values; shape {array.shape} does not"
        )
    flat = np.ascontiguousarray(array).reshape(-1, values)
    out = np.empty((len(flat), form.size), dtype=np.uint8)
    step = max(1, _PACK_VALUES // values)
    with np.errstate(all="ignore"):  # 1 / 0 in an all-zero block; the result is not used
        for start in range(0, len(flat), step):
            chunk = flat[start : start + step].astype(np.float32, copy=False)
            form.pack(chunk, out[start : start + step])
    return out.reshape(-1)
