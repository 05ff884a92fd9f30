"""GGUFFile: a parsed GGUF model, read by gguf.py or joined from parts by split.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verbatim.formats.tensor import Tensor


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """`digest` identifies the content (see gguf.py). `tensors` is in file order; shapes are
    [out, in]. For a split model: all parts joined, under the path of the first part."""

    path: Path
    metadata: dict[str, Any] = field(repr=False)
    tensors: dict[str, Tensor] = field(repr=False)
    digest: str
    version: int = 3
    # Value type of each metadata key; for an array, the type of its elements.
    types: dict[str, str] = field(default_factory=dict, repr=False)
