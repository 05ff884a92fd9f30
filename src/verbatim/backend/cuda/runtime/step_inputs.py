"""The inputs of a step with prompts: rows, slots and query tiles as integers, on the host and on
the device.

In: a Batch. Out: a DeviceStep of exactly its rows (`to_device`), or of a fixed shape that a CUDA
graph needs (PaddedInputs). Padding rows write to the padding block and belong to no tile. A row's
bits depend only on its own sequence, so padding changes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from verbatim.backend.cuda.kernels import kernels
from verbatim.backend.cuda.kernels.kernels import QueryTiles
from verbatim.backend.cuda.kernels.lora import adapter_rows
from verbatim.backend.cuda.kernels.recurrent import RecurrentStep
from verbatim.backend.cuda.runtime.device_step import DeviceStep, aligned
from verbatim.backend.cuda.runtime.recurrent_inputs import RecurrentInputs, step_arrays
from verbatim.backend.step_rows import Batch
from verbatim.base.config import BLOCK_SIZE
from verbatim.model.spec import ModelSpec

MAX_OUTPUTS = 256  # rows of logits of a step that replays a graph
OUTPUTS = (16, MAX_OUTPUTS)  # sizes to which they are rounded up, and the tiles of few rows
MORE_TILES = 32  # tiles beyond those of full ones: sequences whose last tile is not full
MIN_ROWS = 64  # the smallest tile of a large matmul
MAX_ROWS = 8192  # steps with more run longer than the host's launches, so no graph


class TileArrays(NamedTuple):
    """Query tiles with the same number of lines. All are int32 [tiles]."""

    first_row: np.ndarray
    rows: np.ndarray  # rows of the tile
    owner: np.ndarray  # index of the sequence


class StepShape(NamedTuple):
    """The fixed sizes of a graph's inputs."""

    rows: int
    outputs: int  # output rows; also the number of decode tiles, and of recurrent sequences
    tiles: int  # prefill tiles
    spans: int
    all_rows: bool = False  # every row's final state is an output; `outputs` are those with logits
    # Rows see later ones of their block, so there are ends; only then decode tiles may be absent.
    ends: bool = False
    decode: bool = True


def cut_tiles(batch: Batch, spec: ModelSpec, device: torch.device) -> dict[int, TileArrays]:
    """Lines per query tile -> the tiles, by position: attention starts those with the most
    positions first. Each has rows of one sequence.

    A draft has its own tile: the product of a NaN value and a weight of 0 is NaN, so a wrong draft
    with such a value would change the rows before it."""
    first, counts = batch.first[:-1], np.diff(batch.first)
    shape = tile_shape(spec)
    single = np.zeros(len(counts), bool)
    single[batch.drafted] = True
    few = np.where(single, 1, counts) * (shape[0] // shape[1]) <= kernels.DECODE_LINES
    few_lines, many_lines = (
        kernels.tile_lines(*shape, rows, device) for rows in (1, kernels.DECODE_LINES + 1)
    )
    of_sequence = np.where(few, few_lines, many_lines)
    cuts = {}
    for lines in np.unique(of_sequence).tolist():
        chosen = np.flatnonzero(of_sequence == lines)
        most = np.where(single[chosen], 1, tile_rows(lines, spec))
        tiles = -(-counts[chosen] // most)
        owner, most = np.repeat(chosen, tiles), np.repeat(most, tiles)
        number = np.arange(len(owner)) - np.repeat(
            np.cumsum(tiles) - tiles, tiles
        )  # in its sequence
        row = first[owner] + number * most
        order = np.argsort(batch.positions[row], kind="stable")
        rows = np.minimum(most, counts[owner] - number * most)
        cuts[lines] = TileArrays(*(part[order].astype(np.int32) for part in (row, rows, owner)))
    return cuts


def tile_shape(spec: ModelSpec) -> tuple[int, int, int]:
    """What decides about the tiles: query heads, the fewest KV heads of a layer, the largest
    head."""
    return spec.heads, spec.min_kv_heads, spec.max_head_dim


def tile_lines(spec: ModelSpec, rows: int, device: torch.device) -> int:
    """Lines of the query tiles of a sequence that computes this many rows in a step."""
    return kernels.tile_lines(*tile_shape(spec), rows, device)


def tile_rows(lines: int, spec: ModelSpec) -> int:
    """Rows of a full tile: a row has one line per query head that shares a KV head. A layer with
    more KV heads than others leaves lines of its tiles empty."""
    return lines // (spec.heads // spec.min_kv_heads)


def slots_of(batch: Batch, table: np.ndarray) -> np.ndarray:
    """The cache slot of each row: block * BLOCK_SIZE + place in the block."""
    owner = np.repeat(np.arange(len(batch.first) - 1), np.diff(batch.first))
    blocks = table[owner, batch.positions // BLOCK_SIZE]
    assert blocks.min() >= 0, "the block of each token is in the table"
    return np.asarray(blocks * BLOCK_SIZE + batch.positions % BLOCK_SIZE, np.int32)


def to_device(batch: Batch, spec: ModelSpec, device: torch.device) -> DeviceStep:
    """Copy the step's integers to the device."""
    cuts = cut_tiles(batch, spec, device)
    arrays = [batch.tokens, batch.positions, batch.outputs, batch.logits]
    arrays += [slots_of(batch, table) for table in batch.tables]
    for tiles in cuts.values():
        arrays += [tiles.first_row, tiles.rows, batch.positions[tiles.first_row]]
        arrays += [table[tiles.owner] for table in batch.tables]
    if spec.recurrent:
        arrays += step_arrays(spec, batch)
    later = sees_later(batch)
    tokens, positions, outputs, logits, *rest = _send(
        [*arrays, batch.ends] if later else arrays, device
    )
    ends = rest.pop() if later else None
    groups = len(batch.tables)
    slots, rest = tuple(rest[:groups]), rest[groups:]
    tilings: list[list[QueryTiles]] = [[] for _ in range(groups)]
    for lines in cuts:
        first, counts, first_positions, *tables = rest[: 3 + groups]
        rest = rest[3 + groups :]
        for tiling, table in zip(tilings, tables, strict=True):
            rows = tile_rows(lines, spec)
            tiling.append(QueryTiles(table, first, counts, first_positions, lines, rows, ends))
    all_outputs = len(batch.outputs) == batch.rows
    all_logits = len(batch.logits) == len(batch.outputs)
    return DeviceStep(
        tokens,
        positions,
        slots,
        tuple(tuple(tiling) for tiling in tilings),
        None if all_outputs else outputs,
        None if all_logits else logits,
        kernels.span_count(int(batch.positions.max()) + 1),
        adapters=adapter_rows(batch.adapters, device),
        output_adapters=adapter_rows(batch.adapters[batch.outputs], device),
        recurrent=RecurrentStep(*rest) if spec.recurrent else None,
    )


def sees_later(batch: Batch) -> bool:
    """Whether a row's attention is not causal."""
    return not bool((batch.ends == batch.positions + 1).all())


def _send(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy several int32 arrays to the device in one transfer."""
    sizes = [aligned(a.size) for a in arrays]
    flat = np.zeros(sum(sizes), np.int32)
    for place, a in zip(np.split(flat, np.cumsum(sizes)[:-1]), arrays, strict=True):
        place[: a.size] = a.reshape(-1)
    pieces = torch.from_numpy(flat).to(device).split(sizes)
    return [piece[: a.size].view(a.shape) for piece, a in zip(pieces, arrays, strict=True)]


# ---- a fixed shape


def padded_shape(batch: Batch, cuts: dict[int, TileArrays], spec: ModelSpec) -> StepShape | None:
    """The smallest shape that holds the step, or None if it has more rows, logits or tiles than a
    graph.

    Rows are rounded up by an eighth at most."""
    if spec.diffusion is not None and sees_later(batch):
        return _block_shape(batch, cuts)
    sequences = len(batch.first) - 1 if spec.recurrent else 0
    rows = _padded_rows(batch.rows)
    if rows > MAX_ROWS:
        return None
    few = len(cuts[kernels.DECODE_LINES].rows) if kernels.DECODE_LINES in cuts else 0
    all_rows = len(batch.logits) < len(batch.outputs)
    outputs = next((n for n in OUTPUTS if n >= max(few, len(batch.logits), sequences)), None)
    if outputs is None or not len(batch.outputs):
        return None
    others = [lines for lines in cuts if lines != kernels.DECODE_LINES]
    if len(others) != 1:
        return None
    tiles = aligned(-(-rows // tile_rows(others[0], spec)) + MORE_TILES)
    if len(cuts[others[0]].rows) > tiles:
        return None
    return StepShape(rows, outputs, tiles, _spans(batch), all_rows)


def _padded_rows(rows: int) -> int:
    step = max(MIN_ROWS, 1 << max(0, rows.bit_length() - 4))
    return -(-rows // step) * step


def _spans(batch: Batch) -> int:
    spans = 2  # times a power of four: few shapes, so few graphs are captured
    while spans < kernels.span_count(int(batch.positions.max()) + 1):
        spans *= 4
    return spans


def _block_shape(batch: Batch, cuts: dict[int, TileArrays]) -> StepShape | None:
    """The shape of a step with blocks of a diffusion model: mostly few rows, most with logits.
    Small sizes are rounded up to powers of two."""
    counts = {lines: len(tiles.rows) for lines, tiles in cuts.items()}
    few, many = counts.pop(kernels.DECODE_LINES, 0), [*counts.values()]
    if not len(batch.logits) == len(batch.outputs) > 0 or len(many) > 1:
        return None
    rows = _power(batch.rows) if batch.rows <= MIN_ROWS else _padded_rows(batch.rows)
    tiles = _power(max(many)) if many else 0
    outputs = max(OUTPUTS[0], _power(max(few, len(batch.outputs))))
    if rows > MAX_ROWS or outputs > MAX_OUTPUTS:
        return None
    return StepShape(rows, outputs, tiles, _spans(batch), ends=True, decode=few > 0)


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


class PaddedInputs:
    """The integers of a step of a fixed shape. The host writes and sends them in one copy."""

    def __init__(
        self,
        shape: StepShape,
        padding: tuple[int, ...],
        spec: ModelSpec,
        device: torch.device,
        logits_out: torch.Tensor | None = None,
    ) -> None:
        self.shape, self.padding, self._spec, self._device = shape, padding, spec, device
        self._width = shape.spans * kernels.SPAN // BLOCK_SIZE
        groups = len(padding)
        prompt_lines = tile_lines(spec, max(shape.rows, kernels.DECODE_LINES + 1), device)
        self._lines = {kernels.DECODE_LINES: shape.outputs} if shape.decode else {}
        self._lines |= {prompt_lines: shape.tiles} if shape.tiles else {}
        # tokens, positions, outputs, slots per group; per kind of tile first rows, counts, first
        # positions and a table per group
        sizes = [shape.rows, shape.rows, shape.outputs, *[shape.rows] * groups]
        self._recurrent = RecurrentInputs(spec, shape.rows, shape.outputs)
        for count in self._lines.values():
            sizes += [count, count, count, *[count * self._width] * groups]
        sizes = [self._recurrent.size, *sizes, shape.rows if shape.ends else 0]
        self._host = np.zeros(sum(sizes), np.int32)
        self._sent = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        host, *self._parts, self._ends = np.split(self._host, np.cumsum(sizes)[:-1])
        sent, tokens, positions, outputs, *rest, ends = self._sent.split(sizes)
        slots, rest = tuple(rest[:groups]), rest[groups:]
        tilings: list[list[QueryTiles]] = [[] for _ in range(groups)]
        for lines, count in self._lines.items():
            first, counts, first_positions, *tables = rest[: 3 + groups]
            rest = rest[3 + groups :]
            rows = tile_rows(lines, spec)
            for tiling, table in zip(tilings, tables, strict=True):
                of_tile = table.view(count, self._width)
                tiling.append(
                    QueryTiles(
                        of_tile, first, counts, first_positions, lines, rows,
                        ends if shape.ends else None,
                    )
                )  # fmt: skip
        self.step = DeviceStep(
            tokens,
            positions,
            slots,
            tuple(tuple(tiling) for tiling in tilings),
            None if shape.all_rows else outputs,
            outputs if shape.all_rows else None,
            shape.spans,
            logits_out,
            recurrent=self._recurrent.bind(host, sent),
        )

    def fill(self, batch: Batch | None, cuts: dict[int, TileArrays]) -> None:
        """Write and send a step's integers; without a batch, those of padding alone."""
        self._host[:] = 0
        groups = len(self.padding)
        tokens, positions, outputs, *rest = self._parts
        for slots, padding in zip(rest[:groups], self.padding, strict=True):
            slots[:] = padding * BLOCK_SIZE
        if batch is not None:
            n = batch.rows
            tokens[:n], positions[:n] = batch.tokens, batch.positions
            outputs[: len(batch.logits)] = batch.outputs[batch.logits]
            self._ends[:n] = batch.ends[: len(self._ends)]
            for slots, table in zip(rest[:groups], batch.tables, strict=True):
                slots[:n] = slots_of(batch, table)
            self._fill_tiles(batch, cuts, rest[groups:])
        self._recurrent.fill(batch)
        # A new pinned buffer per step: the previous copy may still run, and PyTorch does not reuse
        # pinned memory before the copy from it is done.
        sent = torch.empty(len(self._host), dtype=torch.int32, pin_memory=self._sent.is_cuda)
        sent.numpy()[:] = self._host
        self._sent.copy_(sent, non_blocking=True)

    def _fill_tiles(
        self, batch: Batch, cuts: dict[int, TileArrays], parts: Sequence[np.ndarray]
    ) -> None:
        groups = len(self.padding)
        for i, (lines, count) in enumerate(self._lines.items()):
            if lines not in cuts:
                continue
            first, counts, first_positions, *tables = parts[i * (3 + groups) :][: 3 + groups]
            tiles = cuts[lines]
            n = len(tiles.rows)
            first[:n], counts[:n] = tiles.first_row, tiles.rows
            first_positions[:n] = batch.positions[tiles.first_row]
            for table, source in zip(tables, batch.tables, strict=True):
                width = min(self._width, source.shape[1])
                table.reshape(count, self._width)[:n, :width] = source[tiles.owner, :width]
