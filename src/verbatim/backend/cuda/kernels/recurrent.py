"""Recurrent layers on the GPU: their caches, and the launch of their kernels.

Caches are float32. A block of a delta net holds, per value head, the state before the block, and
of each position the keys, the values and the gates: logarithm of the decay, beta
(docs/adr/0023-recurrent-state.md, docs/adr/0031-delta-nets-by-block.md).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

import torch
import triton

from verbatim.backend.cuda.kernels import jit_recurrent
from verbatim.backend.cuda.kernels.few_rows import product as few_rows
from verbatim.backend.cuda.kernels.few_rows.product import dependence
from verbatim.backend.cuda.kernels.launch import launch
from verbatim.base.records import CacheGroup
from verbatim.model.spec import DeltaSpec, ModelSpec

Caches = tuple[torch.Tensor, ...]  # one group's: [layers, blocks, …]

LINES = 4  # rows, or heads of rows, per program: one warp each, so it does not affect the bits
COLUMNS = 128  # channels of a short convolution per program


class Tile(NamedTuple):
    """How a kernel of a delta net is launched. It affects the bits."""

    values: int  # values of a head per program
    warps: int
    stages: int


ADVANCE = Tile(16, 1, 2)
OUTPUTS = Tile(64, 4, 3)
PART = 32  # keys of the state that delta_outputs reads at once
WARPS = 2  # 16 values of a head each; does not affect the bits
STAGES = 4  # blocks whose keys, values and queries it copies ahead
FEW_SEQUENCES = 8  # for more, two kernels with more programs per SM decode faster
MIN_DIM = 16  # the smallest operand of a product


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentStep:
    """Integers (int32, on the device) of a step of a model with recurrent layers. A tile is a block
    in which a sequence has rows in this step, or the whole block before them, whose end is the
    state that they need."""

    inputs: torch.Tensor  # [rows, taps]: cache slot of each input of the convolution, -1: none
    ages: torch.Tensor  # [rows]: number of the row in its sequence's rows
    tiles: torch.Tensor  # [sequences + 1]: tiles of each sequence; 0 behind the last sequence
    blocks: torch.Tensor  # [tiles]: its cache block
    positions: torch.Tensor  # [tiles]: the block's first position
    starts: torch.Tensor  # [tiles]: position of the sequence's first row in this step
    ends: torch.Tensor  # [tiles]: position after its last row; 0: the step does not have this tile
    rows: torch.Tensor  # [tiles]: the sequence's first row


def empty_caches(
    spec: ModelSpec, group: CacheGroup, blocks: int, size: int, device: torch.device
) -> Caches:
    layers = len(group.layers)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros((layers, blocks, *shape), dtype=torch.float32, device=device)

    if group.kind == "conv":
        return (zeros(size, spec.conv_channels),)
    delta = spec.delta
    assert delta is not None
    return (
        zeros(delta.value_heads, delta.key_dim, delta.value_dim),
        zeros(delta.key_heads, size, delta.key_dim),
        zeros(delta.value_heads, size, delta.value_dim),
        zeros(delta.value_heads, size, 2),
    )


def short_conv(
    x: torch.Tensor,
    kernel: torch.Tensor,
    bias: torch.Tensor | None,
    inputs: torch.Tensor,
    step: RecurrentStep,
    dtype: torch.dtype,
) -> torch.Tensor:
    """c * (convolution of b * u): [rows, channels] in `dtype`. x: [rows, 3 * channels]."""
    channels, taps = kernel.shape
    out = torch.empty((len(x), channels), dtype=dtype, device=x.device)
    launch(
        jit_recurrent.short_conv,
        (triton.cdiv(len(x), LINES), triton.cdiv(channels, COLUMNS), 1),
        (
            x, inputs, kernel, kernel if bias is None else bias, step.inputs, step.ages, out,
            len(x), channels,
        ),
        (taps, bias is not None, LINES, COLUMNS),
        dependent=dependence(len(x)),
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True, eq=False)
class DeltaLayer:
    """A layer's tensors."""

    kernel: torch.Tensor
    decay: torch.Tensor
    dt: torch.Tensor
    norm: torch.Tensor
    inputs: torch.Tensor  # cache of the convolution
    caches: Caches  # states, keys, values, gates


def delta_net(
    spec: ModelSpec,
    layer: DeltaLayer,
    products: tuple[torch.Tensor, ...],
    slots: torch.Tensor,
    step: RecurrentStep,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[rows, values] in `dtype`. `products`: qkv, z, b, a, each of them columns of a matrix."""
    delta = spec.delta
    assert delta is not None
    qkv, z, b, a = products
    queries = _write_inputs(delta, layer, (qkv, b, a), slots, step)
    blocks = _solve(delta, layer, queries, step)
    if takes_chain(delta, step):
        y = _chain(delta, layer, queries, blocks, step)
    else:
        _advance(delta, layer, blocks, step)
        y = _outputs(delta, layer, queries, blocks, step)
    return gated_norm(delta, y, z, layer.norm, spec.norm_eps, dtype)


class SolvedBlocks(NamedTuple):
    """What jit_recurrent.delta_solve computes for each tile and value head."""

    solved: torch.Tensor  # [tiles, value heads, size, size]
    mixed: torch.Tensor  # the same
    decays: torch.Tensor  # [tiles, value heads, 2, size]


def _write_inputs(
    delta: DeltaSpec,
    layer: DeltaLayer,
    products: tuple[torch.Tensor, ...],
    slots: torch.Tensor,
    step: RecurrentStep,
) -> torch.Tensor:
    """The queries [rows, keys]; keys, values and gates are written to the cache."""
    qkv, b, a = products
    _, keys, values, gates = layer.caches
    queries = qkv.new_empty(len(qkv), delta.keys)
    launch(
        jit_recurrent.delta_inputs,
        (triton.cdiv(len(qkv), LINES), 2 * delta.key_heads + delta.value_heads, 1),
        (
            qkv, qkv.stride(0), b, a, b.stride(0), layer.inputs, layer.kernel, step.inputs,
            step.ages, layer.decay, layer.dt, slots, queries, keys, values, gates, len(qkv),
            float(delta.key_dim**-0.5),
        ),
        (
            delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, keys.shape[2],
            layer.kernel.shape[1], LINES, max(_padded(delta.key_dim), _padded(delta.value_dim)),
        ),
        dependent=dependence(len(qkv)),
    )  # fmt: skip
    return queries


def _padded(dim: int) -> int:
    return max(MIN_DIM, int(triton.next_power_of_2(dim)))


def _solve(
    delta: DeltaSpec, layer: DeltaLayer, queries: torch.Tensor, step: RecurrentStep
) -> SolvedBlocks:
    _, keys, _, gates = layer.caches
    tiles, heads, size = len(step.blocks), delta.value_heads, keys.shape[2]
    square = (tiles, heads, size, size)
    blocks = SolvedBlocks(
        *(queries.new_empty(n) for n in (square, square, (tiles, heads, 2, size)))
    )
    launch(
        jit_recurrent.delta_solve,
        (tiles, heads, 1),
        (
            queries, keys, gates, step.blocks, step.positions, step.starts, step.ends, step.rows,
            *blocks,
        ),
        (delta.key_heads, heads, delta.key_dim, size, delta.tiled, _padded(delta.key_dim)),
        warps=1,
        dependent=dependence(len(queries)),
    )  # fmt: skip
    return blocks


def takes_chain(delta: DeltaSpec, step: RecurrentStep) -> bool:
    """Whether one kernel advances the states and computes the outputs: of prompts or of few
    sequences, with heads that fit into the registers of its warps."""
    sequences = len(step.tiles) - 1
    chained = sequences <= FEW_SEQUENCES or len(step.blocks) > 4 * sequences
    sizes = delta.key_dim in (32, 64, 128) and delta.value_dim % (16 * WARPS) == 0
    return chained and sizes and few_rows.available()


@functools.cache
def _chain_code() -> object:
    """The kernel. An older Triton cannot import it."""
    return import_module("verbatim.backend.cuda.kernels.delta_net.jit_chain").chain


def _chain(
    delta: DeltaSpec,
    layer: DeltaLayer,
    queries: torch.Tensor,
    blocks: SolvedBlocks,
    step: RecurrentStep,
) -> torch.Tensor:
    """_advance and _outputs in one kernel."""
    states, keys, values, _ = layer.caches
    out = queries.new_empty(len(queries), delta.values)
    launch(
        _chain_code(),
        (len(step.tiles) - 1, delta.value_heads, delta.value_dim // (16 * WARPS)),
        (
            queries, keys, values, states, *blocks, step.tiles, step.blocks, step.positions,
            step.starts, step.ends, step.rows, out,
        ),
        (
            delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, delta.tiled, WARPS,
            STAGES,
        ),
        warps=WARPS,
        dependent=dependence(len(queries)),
    )  # fmt: skip
    return out


def _advance(
    delta: DeltaSpec, layer: DeltaLayer, blocks: SolvedBlocks, step: RecurrentStep
) -> None:
    """Write the state before each block that begins in this step."""
    states, keys, values, _ = layer.caches
    part = min(_padded(delta.value_dim), ADVANCE.values)
    launch(
        jit_recurrent.delta_advance,
        (len(step.tiles) - 1, delta.value_heads, triton.cdiv(delta.value_dim, part)),
        (
            keys, values, states, blocks.solved, blocks.decays, step.tiles, step.blocks,
            step.positions,
        ),
        _constants(delta, layer, part),
        warps=ADVANCE.warps,
        stages=ADVANCE.stages,
        dependent=dependence(len(step.ages)),
    )  # fmt: skip


def _outputs(
    delta: DeltaSpec,
    layer: DeltaLayer,
    queries: torch.Tensor,
    blocks: SolvedBlocks,
    step: RecurrentStep,
) -> torch.Tensor:
    """[rows, values], before norm and gate."""
    states, keys, values, _ = layer.caches
    out = queries.new_empty(len(queries), delta.values)
    part = min(_padded(delta.value_dim), OUTPUTS.values)
    launch(
        jit_recurrent.delta_outputs,
        (len(step.blocks), delta.value_heads, triton.cdiv(delta.value_dim, part)),
        (
            queries, keys, values, states, *blocks, step.blocks, step.positions, step.starts,
            step.ends, step.rows, out,
        ),
        (*_constants(delta, layer, part), min(_padded(delta.key_dim), PART)),
        warps=OUTPUTS.warps,
        stages=OUTPUTS.stages,
        dependent=dependence(len(queries)),
    )  # fmt: skip
    return out


def _constants(delta: DeltaSpec, layer: DeltaLayer, part: int) -> tuple[object, ...]:
    size = layer.caches[1].shape[2]
    heads = (delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim)
    return (*heads, size, delta.tiled, _padded(delta.key_dim), part)


def gated_norm(
    delta: DeltaSpec,
    y: torch.Tensor,
    z: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """RMS norm of each value head, times silu(z)."""
    out = torch.empty(y.shape, dtype=dtype, device=y.device)
    lines = len(y) * delta.value_heads
    launch(
        jit_recurrent.gated_norm,
        (triton.cdiv(lines, LINES), 1, 1),
        (y, z, z.stride(0), norm, out, lines, eps),
        (delta.value_heads, delta.value_dim, LINES, triton.next_power_of_2(delta.value_dim)),
        dependent=dependence(len(y)),
    )
    return out
