"""Adapter: the LoRA matrices of one adapter by the model's internal weight names.

The adapted product of a weight W is x · Wᵀ + B · (scale · A · x): the base row, then a low-rank
sum, then the bias. A backend applies it to the rows of the requests that name the adapter, and to
no other row, so requests of many adapters and of the base model share a batch without a change of
any bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from verbatim.formats.tensor import Tensor

# Weights that an adapter may change, by the end of their names.
ADAPTED = (
    *("attn.q", "attn.k", "attn.v", "attn.o", "attn.gate", "mlp.gate", "mlp.up", "mlp.down"),
    *("shared.gate", "shared.up", "shared.down"),
)


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """One adapted matrix: x · Wᵀ + scale · (x · Aᵀ) · Bᵀ."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


def is_adapted(name: str) -> bool:
    """Whether the weight of this internal name can have an adapter."""
    return name.startswith("layers.") and name.split(".", 2)[2] in ADAPTED


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    name: str  # requests name it
    digest: str  # hash of every matrix and scale
    parts: Mapping[str, LowRank]  # internal weight name -> matrices
    path: str = ""
    warnings: tuple[str, ...] = ()  # shown at load

    @property
    def rank(self) -> int:
        """The largest rank of its pairs of matrices."""
        return max(part.rank for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        return sum(int(p.a.data.nbytes + p.b.data.nbytes) for p in self.parts.values())


def merged(weight: Tensor, part: LowRank) -> np.ndarray:
    """W + scale · B · A in float32: the weight of a merged model."""
    delta = part.b.to_f32().astype(np.float64) @ part.a.to_f32().astype(np.float64)
    total = weight.to_f32() + np.float64(part.scale) * delta
    return np.asarray(total, np.float32)
