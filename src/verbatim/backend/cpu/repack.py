"""Rewrite weights of types with a codebook into blocks that the native kernels read, without loss.

In: a Tensor of any GGUF type. Out: a type of the native engine (SourceType in kernels.h) and bytes.
The matmul kernels compute with integers and scales; a codebook index is replaced by its integers:

    iq1_s, iq2_xxs, iq3_xxs, iq3_s    q8_f: an f32 scale and 32 signed bytes
    iq1_m, iq2_xs, iq2_s              q8_h: two f32 scales and 32 signed bytes
    tq1_0, tq2_0                      q2_k with d = dmin and all scales 1: d * q - d

So these types need more memory than their file (MEMORY). All others are passed as they are.
"""

from __future__ import annotations

from math import prod

import numpy as np

from verbatim.formats.conversion import CHUNK_VALUES, scaled_integers
from verbatim.formats.registry import FORMATS
from verbatim.formats.tensor import Tensor

# Bytes per weight in memory, of the types that are rewritten or whose scales are widened to f32.
MEMORY = {name: f.cpu_bytes for name, f in FORMATS.items() if f.cpu_bytes is not None}
_CRUMB_SHIFTS = np.array([0, 2, 4, 6], np.uint8)[:, None]


def memory_bytes(t: Tensor) -> int:
    """Bytes of the tensor in the native engine."""
    return int(prod(t.shape) * MEMORY[t.type]) if t.type in MEMORY else int(t.data.nbytes)


def repack(t: Tensor) -> tuple[str, np.ndarray]:
    """The type of the native engine, and flat uint8 bytes."""
    data = np.ascontiguousarray(t.data).reshape(-1).view(np.uint8)
    form = FORMATS[t.type]
    if not form.cpu_type:
        return t.type, data
    blocks = data.reshape(-1, form.size)
    step = max(1, CHUNK_VALUES // form.values)
    write = _WRITERS[form.cpu_type]
    # A damaged file may hold infinite scales: the engine rejects them with the tensor's name.
    with np.errstate(all="ignore"):
        parts = [
            write(*scaled_integers(t.type, blocks[start : start + step]))
            for start in range(0, len(blocks), step)
        ]
    return form.cpu_type, np.concatenate(parts).reshape(-1)


def _q8(scale: np.ndarray, integers: np.ndarray) -> np.ndarray:
    """[n, runs] and [n, 256] -> uint8 [n * 8, 36 or 40]."""
    scales = np.ascontiguousarray(scale, dtype="<f4").reshape(integers.size // 32, -1)
    return np.concatenate([scales.view(np.uint8), integers.reshape(-1, 32).view(np.uint8)], axis=1)


def _q2_k(scale: np.ndarray, integers: np.ndarray) -> np.ndarray:
    """[n, 1] and [n, 256] from -1 to 2 -> uint8 [n, 84]."""
    n = len(integers)
    crumbs = (integers + np.int8(1)).view(np.uint8).reshape(n, 2, 4, 32) << _CRUMB_SHIFTS
    packed = np.bitwise_or.reduce(crumbs, axis=2).reshape(n, 64)
    d = scale.astype("<f2").view(np.uint8)
    return np.concatenate([np.full((n, 16), 0x11, np.uint8), packed, d, d], axis=1)


_WRITERS = {"q8_f": _q8, "q8_h": _q8, "q2_k": _q2_k}
