"""The block formats, written: float32 numbers -> raw bytes. Reading them is quant.py, which also describes each block.

In: a type, a float32 array. Out: a flat uint8 array, the bytes as a file would hold them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.weights.tensor import BLOCKS

_CHUNK_VALUES = 1 << 18  # values at a time: the peak is the input, the result and a few MiB


def quantise(type: str, array: np.ndarray) -> np.ndarray:
    """Float array (last axis contiguous in the file) -> flat uint8 bytes of `type`."""
    if type == "f32":
        return np.ascontiguousarray(array, dtype="<f4").reshape(-1).view(np.uint8)
    if type not in _PACK:
        raise ModelError(f"no way to write weights as {type!r}; possible: f32, {', '.join(_PACK)}")
    values, size = BLOCKS[type]
    if array.ndim == 0 or array.shape[-1] % values:
        raise ModelError(f"a {type} row holds a multiple of {values} values; shape {array.shape} does not")
    flat = np.ascontiguousarray(array).reshape(-1, values)
    out = np.empty((len(flat), size), dtype=np.uint8)
    step = max(1, _CHUNK_VALUES // values)
    with np.errstate(all="ignore"):  # 0 / 0 of an all-zero block, infinities of a broken file: defined below, not a warning
        for start in range(0, len(flat), step):
            chunk = flat[start : start + step].astype(np.float32, copy=False)
            _PACK[type](chunk, out[start : start + step])
    return out.reshape(-1)


def _f16(x: np.ndarray, out: np.ndarray) -> None:
    out.view("<f2")[:] = x


def _bf16(x: np.ndarray, out: np.ndarray) -> None:
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits.astype(np.uint64) + np.uint64(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint64(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    quiet = (bits >> np.uint32(16)) | np.uint32(64)  # rounding could carry a NaN into infinity
    out.view("<u2")[:] = np.where(nan, quiet, rounded)


_PACK: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {"f16": _f16, "bf16": _bf16}
