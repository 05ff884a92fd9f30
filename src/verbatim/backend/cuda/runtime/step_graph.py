"""StepGraph: a captured CUDA graph of one step, and the integers that are its input.

In: the integers of a step. Out: final states and logits. A graph has a fixed number of rows and
attention spans; padding rows fill it up. GraphInputs are those of a decode step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import torch

from verbatim.backend.cuda.kernels import kernels
from verbatim.backend.cuda.kernels.kernels import QueryTiles
from verbatim.backend.cuda.runtime.device_step import DeviceStep
from verbatim.backend.cuda.runtime.recurrent_inputs import RecurrentInputs
from verbatim.backend.step_rows import make_batch
from verbatim.base.config import BLOCK_SIZE
from verbatim.base.records import SeqStep, StepPlan
from verbatim.model.spec import ModelSpec

# final states and logits of a step
Forward: TypeAlias = Callable[[DeviceStep], tuple[torch.Tensor, torch.Tensor]]


class GraphInputs:
    """The integers of a step in which every row is its own query tile, as the input of a graph.

    The host writes them and sends them in one copy. Padding rows write to the padding block. Tiles
    are sorted by position, because attention starts those with the most positions first. All
    sequences grow alike, so their order persists from step to step, and with it the block tables: a
    tile's table is rewritten only if its tuple of blocks is another object than before."""

    def __init__(
        self,
        rows: int,
        spans: int,
        padding: tuple[int, ...],
        lines: int,
        device: torch.device,
        spec: ModelSpec,
        logits_out: torch.Tensor | None = None,
    ) -> None:
        self.rows, self.width, self.padding = rows, spans * kernels.SPAN // BLOCK_SIZE, padding
        groups = len(padding)
        # tokens, positions, the tiles' rows and positions, per group slots, per group block tables
        sizes = [rows] * 4 + [rows] * groups + [rows * self.width] * groups
        self._recurrent = RecurrentInputs(spec, rows, rows)
        sizes = [self._recurrent.size, *sizes]
        self._host = torch.zeros(sum(sizes), dtype=torch.int32)
        self._sent = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        host, *views = [part.numpy() for part in self._host.split(sizes)]
        self._tokens, self._positions, self._tile_rows, self._tile_positions = views[:4]
        self._slots = views[4 : 4 + groups]
        self._tables = [table.reshape(rows, self.width) for table in views[4 + groups :]]
        self._tile_blocks: list[list[tuple[int, ...]]] = [[()] * rows for _ in padding]
        self._padding_tables = [(block,) for block in padding]
        sent, tokens, positions, tile_rows, tile_positions, *rest = self._sent.split(sizes)
        one = torch.ones(rows, dtype=torch.int32, device=device)
        tiles = tuple(
            (QueryTiles(table.view(rows, self.width), tile_rows, one, tile_positions, lines, 1),)
            for table in rest[groups:]
        )
        self.step = DeviceStep(
            tokens, positions, tuple(rest[:groups]), tiles, None, None, spans, logits_out,
            recurrent=self._recurrent.bind(host, sent),
        )  # fmt: skip

    def fill(self, sequences: Sequence[SeqStep], drawn: torch.Tensor | None = None) -> None:
        """Write and send the step's integers. `drawn` replaces the tokens, if only the device has
        them."""
        tokens = [token for s in sequences for token in s.tokens]
        n = len(tokens)
        self._tokens[:n], self._tokens[n:] = tokens, 0
        single = n == len(sequences)  # the usual case, and a shorter loop
        positions = (
            [s.start for s in sequences]
            if single
            else [p for s in sequences for p in range(s.start, s.end)]
        )
        self._positions[:n], self._positions[n:] = positions, 0
        order = np.argsort(self._positions, kind="stable")
        self._tile_rows[:], self._tile_positions[:] = order, self._positions[order]
        block, place = self._tile_positions // BLOCK_SIZE, self._tile_positions % BLOCK_SIZE
        tiles, rows = np.arange(self.rows), order.tolist()
        for group, (table, tile_blocks, slots, padding) in enumerate(
            zip(self._tables, self._tile_blocks, self._slots, self._padding_tables, strict=True)
        ):
            row_blocks = (
                [s.blocks[group] for s in sequences]
                if single
                else [s.blocks[group] for s in sequences for _ in s.tokens]
            )
            row_blocks += [padding] * (self.rows - n)
            for tile, row in enumerate(rows):
                blocks = row_blocks[row]
                if tile_blocks[tile] is not blocks:
                    table[tile, : len(blocks)] = blocks[: self.width]
                    tile_blocks[tile] = blocks
            slots[order] = table[tiles, block] * BLOCK_SIZE + place
            assert slots.min() >= 0, "the block of each token is in the table"
        if self._recurrent.size:
            plan = StepPlan(0, tuple(sequences))
            self._recurrent.fill(make_batch(plan, len(self.padding)) if sequences else None)
        # A new pinned buffer per step: the previous copy may still run, and PyTorch does not reuse
        # pinned memory before the copy from it is done.
        sent = torch.empty(len(self._host), dtype=torch.int32, pin_memory=self._sent.is_cuda)
        # copied by NumPy, because PyTorch would wake one thread per core
        sent.numpy()[:] = self._host.numpy()
        self._sent.copy_(sent, non_blocking=True)
        if drawn is not None:
            self.step.tokens[:n].copy_(drawn)


class HasStep(Protocol):
    step: DeviceStep


Inputs = TypeVar("Inputs", bound=HasStep)


class StepGraph(Generic[Inputs]):
    """A captured CUDA graph of one step of a fixed shape."""

    def __init__(self, inputs: Inputs, forward: Forward, pool: object) -> None:
        """`forward` computes a step; `pool` is the memory that all graphs share, because only one
        of them runs at a time. The inputs are filled with padding."""
        self.inputs = inputs
        torch.cuda.synchronize()  # the inputs are on the device, and no other step runs
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):  # warm-up: compiles kernels, which a capture does not allow
                forward(inputs.step)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.out = forward(inputs.step)

    def replay(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the step whose integers the inputs hold."""
        self.graph.replay()
        hidden, logits = self.out
        return hidden, logits
