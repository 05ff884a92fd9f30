"""Tensor: one weight as stored in its file (raw bytes, type, shape); Weights: all of a model.

Nothing is dequantised until a backend calls `to_f32` or packs the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verbatim.formats.conversion import dequantise
from verbatim.formats.registry import SIZES


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """`data` is a flat uint8 view, usually of a memory map.

    The last axis of `shape` is contiguous; blocks lie along it."""

    name: str
    type: str
    shape: tuple[int, ...]
    data: np.ndarray

    @property
    def row_bytes(self) -> int:
        values, size = SIZES[self.type]
        return self.shape[-1] // values * size

    @property
    def rows(self) -> int:
        return int(np.prod(self.shape[:-1], dtype=np.int64))

    def row_view(self) -> np.ndarray:
        """[rows, row_bytes] uint8, no copy."""
        return self.data.reshape(self.rows, self.row_bytes)

    def to_f32(self) -> np.ndarray:
        return dequantise(self.type, self.data, self.shape)


@dataclass(frozen=True, slots=True)
class Weights(Mapping[str, Tensor]):
    """Weights by internal name (model/spec.py), and the model's digest for fingerprints."""

    tensors: dict[str, Tensor]
    source: str
    digest: str
    metadata: dict[str, Any] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def nbytes(self) -> int:
        return sum(int(t.data.nbytes) for t in self.tensors.values())
