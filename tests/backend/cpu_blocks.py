"""Random weights of every type that a file may hold.

Any bits are valid quants; the scales are small random numbers.
"""

from __future__ import annotations

import numpy as np

from verbatim.backend.cpu.repack import repack
from verbatim.formats.registry import FORMATS
from verbatim.formats.tensor import Tensor


def random_blocks(
    kind: str, random: np.random.Generator, rows: int, k: int, scale: float = 0.03
) -> np.ndarray:
    """The bytes of a [rows, k] matrix, flat uint8. `scale`: of the blocks' float16 scales."""
    form = FORMATS[kind]
    count = rows * k // form.values
    out = random.integers(0, 256, (count, form.size), dtype=np.uint8)
    for at in form.scales if form.scale_type == "<f2" else ():
        out[:, at : at + 2] = (
            (random.standard_normal(count) * scale).astype("<f2").view(np.uint8).reshape(count, 2)
        )
    if kind in ("f32", "q8_k"):
        out[:, :4] = (
            (random.standard_normal(count) * 0.03).astype("<f4").view(np.uint8).reshape(count, 4)
        )
    if kind == "mxfp4":
        out[:, 0] = 118 + out[:, 0] % 8  # exponents around 2 ** -6
    if kind == "iq1_m":  # a scale in four parts: 0.0156 to 0.0311
        out[:, 49::2] = out[:, 49::2] & 0x0F | np.array([0x00, 0x00, 0x40, 0x20], np.uint8)
    if kind == "bf16":
        out[:] = random.standard_normal(count).astype("<f4").view(np.uint8).reshape(count, 4)[:, 2:]
    return out.reshape(-1)


def matmul(
    isa: str, kind: str, weights: np.ndarray, n: int, x: np.ndarray, fine: bool = False
) -> np.ndarray:
    """x times the transpose of an [n, k] matrix of any type of a file, as the backend computes it:
    a type with a codebook is rewritten first. `fine`: with int12 activations, else int8."""
    from verbatim.backend.cpu import backend as cpu  # where the extension is built

    tensor = Tensor("w", kind, (n, x.shape[-1]), weights)
    product: np.ndarray = cpu.native.product(isa, *repack(tensor), n, x, fine)
    return product
