"""Random weights of every type that a file may hold.

Any bits are valid quants; the scales are small random numbers.
"""

from __future__ import annotations

import numpy as np

from verbatim.weights.tensor import BLOCKS

# byte offsets of the float16 values (scales and minima) in a block
HALVES = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "q3_k": (108,),
    "q2_k": (80, 82),
    "f16": (0,),
}


def random_blocks(kind: str, random: np.random.Generator, rows: int, k: int) -> np.ndarray:
    """The bytes of a [rows, k] matrix, flat uint8."""
    values, size = BLOCKS[kind]
    count = rows * k // values
    out = random.integers(0, 256, (count, size), dtype=np.uint8)
    for at in HALVES.get(kind, ()):
        out[:, at : at + 2] = (
            (random.standard_normal(count) * 0.03).astype("<f2").view(np.uint8).reshape(count, 2)
        )
    if kind in ("f32", "q8_k"):
        out[:, :4] = (
            (random.standard_normal(count) * 0.03).astype("<f4").view(np.uint8).reshape(count, 4)
        )
    if kind == "bf16":
        out[:] = random.standard_normal(count).astype("<f4").view(np.uint8).reshape(count, 4)[:, 2:]
    return out.reshape(-1)
