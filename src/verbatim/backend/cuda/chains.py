"""ChainGraphs: a draft layer draws several tokens in a row, without the host in between.

In: steps of a draft layer, with states on the device. Out: `count` drafts per sequence, with their
log-probabilities. The first draft computes all positions of a step; each further one computes the
token and the state of the draft before, which only the device has. Both replay CUDA graphs. A draft
is drawn at the request's temperature with its noise, from the layer's logits as they are: filters,
penalties, bias and masks do not change them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum

import numpy as np
import torch
import triton

from verbatim.backend.cuda.kernels import kernels
from verbatim.backend.cuda.kernels.kernels import QueryTiles
from verbatim.backend.cuda.kernels.launch import launch
from verbatim.backend.cuda.runtime.device_step import DeviceStep, aligned
from verbatim.backend.cuda.runtime.step_graph import GraphInputs, StepGraph
from verbatim.backend.cuda.runtime.step_graphs import MAX_GRAPH_ROWS, MIN_GRAPH_SPANS, graph_rows
from verbatim.backend.cuda.runtime.step_inputs import tile_lines
from verbatim.backend.cuda.sampler import jit_drafts
from verbatim.backend.cuda.sampler.gpu_sampler import to_pinned
from verbatim.base.config import BLOCK_SIZE
from verbatim.base.records import Drawn, SeqStep
from verbatim.model.spec import ModelSpec

CHUNK = 2048  # tokens per program of a draw

# (step, states) -> the states of the next drafts, and logits
Compute = Callable[[DeviceStep, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Wait = Callable[[], list[list[Drawn]]]


def states_width(spec: ModelSpec) -> int:
    """Width of the target's states that a draft layer reads."""
    return spec.hidden if spec.eagle is None else spec.eagle.states


class ChainField(IntEnum):
    """The int32 values of a sequence, which the host writes before the first draft and the device
    advances after each (jit_drafts.advance)."""

    KEY_LOW = 0
    KEY_HIGH = 1
    DRAWN_AT = 2  # position whose noise the draw has
    SCALE = 3  # bits of 1 / temperature as float32; 0: the best token
    COUNT = 4  # drafts so far
    LAST_ROW = 5  # its last row in the step of the first draft
    POSITION = 6  # where the next row is computed
    TOKEN = 7
    SLOT = 8


class ChainInputs:
    """What all drafts of some sequences read and write on the device."""

    def __init__(
        self, sequences: int, spans: int, padding: int, spec: ModelSpec, device: torch.device
    ) -> None:
        self.sequences, self.padding = sequences, padding
        self._stride, width = aligned(sequences), spans * kernels.SPAN // BLOCK_SIZE
        sizes = [len(ChainField) * self._stride, sequences * width]
        self._host, self._width = np.zeros(sum(sizes), np.int32), width
        self._sent = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        fields, table = self._sent.split(sizes)
        self.fields, self.table = fields.view(len(ChainField), -1), table.view(sequences, width)
        self.states = torch.zeros((sequences, spec.hidden), dtype=torch.float32, device=device)
        most = jit_drafts.MOST.value
        self.drawn = torch.zeros((most, 2, sequences), dtype=torch.int32, device=device)
        rows = torch.arange(sequences, dtype=torch.int32, device=device)
        lines = tile_lines(spec, 1, device)
        position = self.of(ChainField.POSITION)
        tiles = QueryTiles(self.table, rows, torch.ones_like(rows), position, lines, 1)
        self.step = DeviceStep(
            self.of(ChainField.TOKEN),
            position,
            (self.of(ChainField.SLOT),),
            ((tiles,),),
            None,
            None,
            spans,
        )
        self.fill(())

    def of(self, field: ChainField) -> torch.Tensor:
        return self.fields[field, : self.sequences]

    def fill(self, steps: Sequence[SeqStep]) -> None:
        """Padding sequences write to the padding block."""
        count, cut = len(steps), self.fields.numel()
        fields = self._host[:cut].reshape(len(ChainField), -1)
        table = self._host[cut:].reshape(self.sequences, -1)
        fields[:], table[:] = 0, self.padding
        fields[ChainField.SLOT] = self.padding * BLOCK_SIZE
        if steps:
            draws = [step.draw for step in steps if step.draw is not None]
            keys = np.array([draw.key for draw in draws], "<u8").view(np.int32).reshape(-1, 2)
            fields[: ChainField.DRAWN_AT, :count] = keys.T
            scales = [0.0 if d.params.greedy else 1.0 / d.params.temperature for d in draws]
            fields[ChainField.SCALE, :count] = np.array(scales, np.float32).view(np.int32)
            fields[ChainField.DRAWN_AT, :count] = [step.end + step.shift for step in steps]
            fields[ChainField.LAST_ROW, :count] = (
                np.cumsum([len(step.tokens) for step in steps]) - 1
            )
            fields[ChainField.POSITION, :count] = [step.end - 1 for step in steps]
            for row, step in zip(table, steps, strict=False):
                blocks = step.blocks[0][: self._width]
                row[: len(blocks)] = blocks
        # pinned, and new for each step: the copy before may still run
        sent = torch.empty(len(self._host), dtype=torch.int32, pin_memory=self._sent.is_cuda)
        sent.numpy()[:] = self._host
        self._sent.copy_(sent, non_blocking=True)


class FirstInputs:
    """The step of the first draft: all waiting positions, and their states."""

    def __init__(self, rows: GraphInputs, chain: ChainInputs, width: int) -> None:
        self.rows, self.chain = rows, chain
        self.states = torch.zeros(
            (rows.rows, width), dtype=torch.float32, device=chain.table.device
        )
        self.step = replace(rows.step, outputs=chain.of(ChainField.LAST_ROW))

    def fill(self, steps: Sequence[SeqStep]) -> None:
        given = torch.stack([row for step in steps for row in step.states])
        self.states[: len(given)] = given
        self.rows.fill(steps)


class ChainGraphs:
    """`ids`: the token of each logit, where a layer drafts some of the vocabulary only. `padding`:
    a block of the cache that no sequence owns."""

    def __init__(
        self, spec: ModelSpec, compute: Compute, ids: torch.Tensor | None, device: torch.device
    ) -> None:
        assert len(spec.groups) == 1, "the layers of a draft layer have one kind of cache"
        self._spec, self._compute, self._ids, self._device = spec, compute, ids, device
        self.padding: tuple[int, ...] = ()
        # by (sequences, spans), and by (rows, sequences, spans)
        self._chains: dict[tuple[int, int], tuple[ChainInputs, Callable[[], object]]] = {}
        self._firsts: dict[tuple[int, int, int], tuple[FirstInputs, Callable[[], object]]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def start(self, steps: Sequence[SeqStep], count: int) -> Wait:
        assert count <= jit_drafts.MOST.value, "the device keeps so many drafts"
        rows = sum(len(step.tokens) for step in steps)
        if rows > MAX_GRAPH_ROWS and len(steps) > 1:
            half = len(steps) // 2
            first, second = self.start(steps[:half], count), self.start(steps[half:], count)
            return lambda: first() + second()
        end = max(step.end for step in steps) + count
        spans = max(MIN_GRAPH_SPANS, 1 << (kernels.span_count(end) - 1).bit_length())
        chain, draw_next = self._chain(graph_rows(len(steps)), spans)
        inputs, draw_first = self._first(graph_rows(rows), chain, spans)
        chain.fill(steps)
        inputs.fill(steps)
        draw_first()
        for _ in range(count - 1):
            draw_next()
        on_host = to_pinned(chain.drawn[:count]) if self._pool else chain.drawn[:count].clone()
        arrived = torch.cuda.Event() if self._pool else None
        if arrived is not None:
            arrived.record()

        def wait() -> list[list[Drawn]]:
            if arrived is not None:
                arrived.synchronize()
            tokens, logprobs = on_host.numpy()[:, :, : len(steps)].transpose(1, 2, 0)
            pairs = zip(tokens.tolist(), logprobs.copy().view(np.float32).tolist(), strict=True)
            return [list(map(Drawn, *pair)) for pair in pairs]

        return wait

    def _chain(self, sequences: int, spans: int) -> tuple[ChainInputs, Callable[[], object]]:
        found = self._chains.get((sequences, spans))
        if found is None:
            inputs = ChainInputs(sequences, spans, self.padding[0], self._spec, self._device)
            found = inputs, self._run(inputs, inputs, inputs.states)
            self._chains[sequences, spans] = found
        return found

    def _first(
        self, rows: int, chain: ChainInputs, spans: int
    ) -> tuple[FirstInputs, Callable[[], object]]:
        key = rows, chain.sequences, spans
        found = self._firsts.get(key)
        if found is None:
            spec, device = self._spec, self._device
            lines = tile_lines(spec, 1, device)
            inputs = GraphInputs(rows, spans, self.padding, lines, device, spec)
            inputs.fill(())
            first = FirstInputs(inputs, chain, states_width(spec))
            found = self._firsts[key] = first, self._run(first, chain, first.states)
        return found

    def _run(
        self, inputs: FirstInputs | ChainInputs, chain: ChainInputs, states: torch.Tensor
    ) -> Callable[[], object]:
        """Draws a draft of each sequence when it is called."""

        def forward(step: DeviceStep) -> tuple[torch.Tensor, torch.Tensor]:
            own, logits = self._compute(step, states)
            chain.states.copy_(own)
            self._select(chain, logits)
            return own, logits

        if self._device.type != "cuda":
            return lambda: forward(inputs.step)
        return StepGraph(inputs, forward, self._pool).replay

    def _select(self, chain: ChainInputs, logits: torch.Tensor) -> None:
        """Draw a token of each sequence, and advance its fields."""
        count, vocab = logits.shape
        chunks = triton.cdiv(vocab, CHUNK)
        parts = torch.empty((count, chunks, 4), dtype=torch.float32, device=self._device)
        tokens = torch.empty((count, chunks), dtype=torch.int32, device=self._device)
        ids, fields, stride = self._ids, chain.fields, chain.fields.shape[1]
        launch(
            jit_drafts.draw_chunks,
            (count, chunks, 1),
            (logits, logits if ids is None else ids, fields, parts, tokens, vocab, chunks, stride),
            (ids is not None, CHUNK),
        )
        launch(
            jit_drafts.advance,
            (count, 1, 1),
            (
                parts, tokens, fields, chain.table, chain.drawn,
                count, chunks, stride, chain.table.shape[1], self._spec.context,
            ),
            (BLOCK_SIZE, triton.next_power_of_2(chunks)),
        )  # fmt: skip

    def drop(self) -> None:
        self._chains.clear()
        self._firsts.clear()
