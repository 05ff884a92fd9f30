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

from verbatim.formats.block_formats import BLOCKS, CHUNK_VALUES
from verbatim.formats.codebook_formats import SCALED, scaled_integers
from verbatim.formats.tensor import Tensor

NATIVE = ("iq4_nl", "iq4_xs", "mxfp4")  # types of SCALED that the kernels read themselves
_TERNARY = ("tq1_0", "tq2_0")
# Bytes per weight in memory, of the types that are rewritten or whose scales are widened to f32.
MEMORY: dict[str, float] = {
    **dict.fromkeys(NATIVE, 20 / 32),
    **dict.fromkeys(("iq1_s", "iq2_xxs", "iq3_xxs", "iq3_s"), 36 / 32),
    **dict.fromkeys(("iq1_m", "iq2_xs", "iq2_s"), 40 / 32),
    **dict.fromkeys(_TERNARY, 100 / 256),
}
_CRUMB_SHIFTS = np.array([0, 2, 4, 6], np.uint8)[:, None]


def memory_bytes(t: Tensor) -> int:
    """Bytes of the tensor in the native engine."""
    return int(prod(t.shape) * MEMORY[t.type]) if t.type in MEMORY else int(t.data.nbytes)


def repack(t: Tensor) -> tuple[str, np.ndarray]:
    """The type of the native engine, and flat uint8 bytes."""
    data = np.ascontiguousarray(t.data).reshape(-1).view(np.uint8)
    if t.type not in SCALED or t.type in NATIVE:
        return t.type, data
    values, size = BLOCKS[t.type]
    blocks = data.reshape(-1, size)
    step = max(1, CHUNK_VALUES // values)
    write = _q2_k if t.type in _TERNARY else _q8
    # A damaged file may hold infinite scales: the engine rejects them with the tensor's name.
    with np.errstate(all="ignore"):
        parts = [
            write(*scaled_integers(t.type, blocks[start : start + step]))
            for start in range(0, len(blocks), step)
        ]
    kind = "q2_k" if t.type in _TERNARY else ("q8_f" if parts[0].shape[1] == 36 else "q8_h")
    return kind, np.concatenate(parts).reshape(-1)


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
