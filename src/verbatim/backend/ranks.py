"""One rank of a tensor-parallel group, as a backend sees it.

In: the split of the model, the rank's number and a socket to each other rank. Out: the native mesh
(backend/cpu/kernels/mesh.h), over which the ranks gather the columns that each has computed, and
the frames in which rank 0 tells the others what to do. Every rank gathers at the same places of the
forward pass, with the same widths.

frame = kind (4 bytes) | length (4 bytes) | body
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from importlib import import_module
from itertools import chain, islice
from typing import TYPE_CHECKING, Protocol

from verbatim.base.errors import BackendError
from verbatim.base.records import SeqStep, StepPlan
from verbatim.model.layer_split import LayerSplit
from verbatim.model.row_split import Split

if TYPE_CHECKING:
    import numpy as np

STEP = b"step"


class Mesh(Protocol):
    """The native sockets to the other ranks."""

    @property
    def rank(self) -> int: ...

    def waits(self) -> list[float]:
        """Seconds in which this rank has waited for the bytes of each rank."""

    def broadcast(self, data: bytes) -> None:
        """Send bytes to every other rank."""

    def gather(self, piece: np.ndarray, sizes: Sequence[int]) -> bytes:
        """The pieces of all ranks, sizes[rank] bytes each; `piece` is uint8."""


def native_mesh(rank: int, fds: Sequence[int]) -> Mesh:
    """fds[r]: a connected stream socket to rank r; -1 for this rank."""
    try:
        native = import_module("verbatim.backend.cpu._native")
    except ImportError:
        raise BackendError(
            "tensor_parallel needs the native kernels, which are not built"
        ) from None
    mesh: Mesh = native.Mesh(rank, list(fds))
    return mesh


class Ranks:
    def __init__(self, split: Split | LayerSplit, mesh: Mesh) -> None:
        self.split, self.mesh, self.rank = split, mesh, mesh.rank

    def start(self, plan: StepPlan) -> None:
        """Rank 0: tell the others to execute the plan."""
        if self.rank == 0:
            self.mesh.broadcast(self.step_frame(plan))

    def step_frame(self, plan: StepPlan) -> bytes:
        """What rank 0 sends before its own part of a step. The others send nothing."""
        return frame(STEP, plan_bytes(plan)) if self.rank == 0 else b""


def frame(kind: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<4sI", kind, len(body)) + body


def plan_bytes(plan: StepPlan) -> bytes:
    """All of a plan that the forward pass depends on, as 32-bit integers. The sampler's part stays
    on rank 0.

    >>> step = SeqStep(7, (11, 12), 4, ((0, 4), (-1,)), draws=1, block=2, picks=(0,))
    >>> same = read_plan(plan_bytes(StepPlan(3, (step,)))).sequences[0]
    >>> same.blocks, same.block, same.picks
    (((0, 4), (-1,)), 2, (0,))
    """
    numbers = array("i", (plan.step, len(plan.copies), len(plan.sequences)))
    numbers.extend(chain.from_iterable(plan.copies))
    for s in plan.sequences:
        numbers.extend((s.start, s.draws, len(s.targets), s.hidden, s.adapter, s.block, s.causal))
        numbers.extend((len(s.picks), len(s.tokens), len(s.blocks), *s.picks))
        numbers.extend(s.tokens)
        for table in s.blocks:
            numbers.append(len(table))
            numbers.extend(table)
    return numbers.tobytes()


def read_plan(body: bytes) -> StepPlan:
    values = iter(array("i", body))

    def some(count: int) -> tuple[int, ...]:
        return tuple(islice(values, count))

    def sequence() -> SeqStep:
        start, draws, targets, hidden, adapter, block, causal, picks, tokens, groups = some(10)
        picked = some(picks)
        computed, blocks = some(tokens), tuple(some(next(values)) for _ in range(groups))
        scored = (0,) * targets  # only their number matters here
        return SeqStep(
            *(0, computed, start, blocks, draws, None, scored, 0, bool(hidden), adapter),
            block=block,
            causal=causal,
            picks=picked,
        )

    step, copies, sequences = some(3)
    copied = tuple((next(values), next(values), next(values)) for _ in range(copies))
    return StepPlan(step, tuple(sequence() for _ in range(sequences)), copied)
