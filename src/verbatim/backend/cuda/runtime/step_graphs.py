"""StepGraphs: run the forward pass of a plan, by a CUDA graph where there is one for its shape.

In: a StepPlan, and `compute`, which launches the kernels of a DeviceStep. Out: final
states and logits. Decode steps have a graph per number of rows and attention spans, steps with
prompts one per shape to which they are padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from verbatim.backend.cuda.kernels import kernels
from verbatim.backend.cuda.runtime.step_graph import Forward, GraphInputs, StepGraph
from verbatim.backend.cuda.runtime.step_inputs import (
    MAX_OUTPUTS,
    PaddedInputs,
    StepShape,
    cut_tiles,
    padded_shape,
    tile_lines,
    to_device,
)
from verbatim.backend.step_rows import Batch, make_batch
from verbatim.base.records import SeqStep, StepPlan
from verbatim.model.spec import ModelSpec

MAX_GRAPH_ROWS = MAX_OUTPUTS  # rows of a decode step that replays a CUDA graph
# Graphs of steps with prompts, least recently used first. Each has its own integers, with a block
# table per query tile: up to 35 MB for 8,192 rows and 131,072 positions.
MAX_PADDED_GRAPHS = 64
MIN_GRAPH_SPANS = 4  # attention spans of a graph; fewer would only add graphs


class StepGraphs:
    """`padding`: per cache group an extra block that no sequence owns, for the padding rows.
    `graphs`: False for a step that the host takes part in."""

    def __init__(self, spec: ModelSpec, device: torch.device, *, graphs: bool = True) -> None:
        self._spec, self._device = spec, device
        self.padding: tuple[int, ...] = ()
        self._of_rows: dict[tuple[int, int], StepGraph[GraphInputs]] = {}
        self._of_shapes: dict[StepShape, StepGraph[PaddedInputs]] = {}
        self._seen_shapes: set[StepShape] = set()
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._use_graphs = graphs and device.type == "cuda"

    def forward(
        self, compute: Forward, plan: StepPlan, tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Final states [outputs, H] and logits [logits, V] of the rows that need them.

        `compute` launches each kernel of a step. `tokens` [rows] replaces the plan's tokens, if
        only the device has them."""
        all_logits = all(
            len(s.targets) + s.draws >= len(s.tokens) and s.block == 1 for s in plan.sequences
        )
        use_graphs = self._use_graphs and all(s.adapter < 0 for s in plan.sequences)
        if use_graphs and all_logits and plan.rows <= MAX_GRAPH_ROWS:
            return self._replay(compute, plan.sequences, tokens)
        batch = make_batch(plan, len(self._spec.groups))
        if use_graphs and tokens is None and not any(s.targets for s in plan.sequences):
            replayed = self._replay_padded(compute, batch)
            if replayed is not None:
                return replayed
        step = to_device(batch, self._spec, self._device)
        if tokens is not None:
            step.tokens.copy_(tokens)
        return compute(step)

    def _replay(
        self, compute: Forward, sequences: Sequence[SeqStep], tokens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A step in which every row needs logits. One CUDA graph is captured per number of rows
        and spans, both rounded up."""
        rows = sum(len(s.tokens) for s in sequences)
        size = graph_rows(rows)
        spans = 1 << (kernels.span_count(max([s.end for s in sequences])) - 1).bit_length()
        spans = max(MIN_GRAPH_SPANS, spans)
        graph = self._of_rows.get((size, spans))
        if graph is None:
            lines = tile_lines(self._spec, 1, self._device)
            inputs = GraphInputs(
                size, spans, self.padding, lines, self._device, self._spec, self._logits[:size]
            )
            inputs.fill(())
            graph = self._of_rows[size, spans] = StepGraph(inputs, compute, self._pool)
        graph.inputs.fill(sequences, tokens)
        hidden, logits = graph.replay()
        return hidden[:rows], logits[:rows]

    def _replay_padded(
        self, compute: Forward, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A step with prompts, padded to the shape of a CUDA graph. A shape is captured when it
        comes up for the second time; None: launch each kernel instead."""
        cuts = cut_tiles(batch, self._spec, self._device)
        shape = padded_shape(batch, cuts, self._spec)
        if shape is None:
            return None
        graph = self._of_shapes.pop(shape, None)  # put back as the most recently used
        if graph is None:
            if shape not in self._seen_shapes:
                self._seen_shapes.add(shape)
                return None
            logits = self._logits[: shape.outputs]
            inputs = PaddedInputs(shape, self.padding, self._spec, self._device, logits)
            inputs.fill(None, {})
            graph = StepGraph(inputs, compute, self._pool)
            if len(self._of_shapes) >= MAX_PADDED_GRAPHS:
                self._of_shapes.pop(next(iter(self._of_shapes)))
        self._of_shapes[shape] = graph
        graph.inputs.fill(batch, cuts)
        hidden, logits = graph.replay()
        count = len(batch.outputs)
        if shape.all_rows:
            same = count == batch.rows
            outputs = slice(count) if same else torch.from_numpy(batch.outputs).to(self._device)
            return hidden[outputs], logits[: len(batch.logits)]
        return hidden[:count], logits[:count]

    @cached_property
    def _logits(self) -> torch.Tensor:
        """The logits of every graph: only one runs at a time."""
        return torch.empty(
            (MAX_OUTPUTS, self._spec.vocab), dtype=torch.float32, device=self._device
        )

    def drop(self) -> None:
        self._of_rows.clear()
        self._of_shapes.clear()
        self._seen_shapes.clear()

    def close(self) -> None:
        self.drop()
        self.__dict__.pop("_logits", None)


def graph_rows(rows: int) -> int:
    """Rows of the graph for a decode step: a power of two, or a multiple of 64, which is how many
    the smallest tile of a large matmul has."""
    return 1 << (rows - 1).bit_length() if rows <= 64 else -(-rows // 64) * 64
