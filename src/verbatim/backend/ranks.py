"""One rank of a tensor-parallel group, as a backend sees it.

In: the split of the model, the rank's number and a socket to each other rank. Out: the native mesh
(backend/cpu/kernels/mesh.h), over which the ranks gather the columns that each has computed. Every
rank gathers at the same places of the forward pass, with the same widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from verbatim.model.split import Split


class Ranks:
    def __init__(self, split: Split, rank: int, fds: Sequence[int]) -> None:
        self.split, self.rank = split, rank
        native: Any = import_module("verbatim.backend.cpu._native")
        self.mesh: Any = native.Mesh(rank, list(fds))
