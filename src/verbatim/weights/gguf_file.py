"""GGUFFile: a parsed GGUF model, as gguf.py reads it and split.py joins it from parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verbatim.weights.tensor import Tensor


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """`digest` names the content (see gguf.py); `tensors` keeps the file's order, shapes are ours: rows first, [out, in].
    Of a split model, all of it, under the first part's path."""

    path: Path
    metadata: dict[str, Any] = field(repr=False)
    tensors: dict[str, Tensor] = field(repr=False)
    digest: str
    version: int = 3
    types: dict[str, str] = field(
        default_factory=dict, repr=False
    )  # of the metadata; of an array, its elements'
