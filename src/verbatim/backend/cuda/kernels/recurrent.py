"""Recurrent layers on the GPU: their caches, the integers of a step, and the launch of the kernel.

Caches are float32. A block of a delta net holds, per value head, the state before the block and the
update of each position: key, value, decay, beta (docs/adr/0023-recurrent-state.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton

from verbatim.backend.cuda.kernels import jit_recurrent
from verbatim.backend.cuda.kernels.launch import launch
from verbatim.backend.step_rows import Batch
from verbatim.base.records import CacheGroup
from verbatim.model.spec import ModelSpec

Caches = tuple[torch.Tensor, ...]  # one group's: [layers, blocks, …]


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentStep:
    """Integers (int32, on the device) of a step of a model with recurrent layers."""

    history: torch.Tensor  # [rows, taps]: cache slot of each input of the convolution; -1: none
    first: torch.Tensor  # [sequences + 1]: rows of each sequence
    starts: torch.Tensor  # [sequences]: position of its first row
    table: torch.Tensor  # [sequences, blocks] of the state group, or of the convolutions


def block_floats(spec: ModelSpec, group: CacheGroup, size: int) -> int:
    """Floats in a block of one layer of a recurrent group."""
    if group.kind == "conv":
        return size * spec.conv_channels
    delta = spec.delta
    assert delta is not None
    updates = size * (delta.key_dim + delta.value_dim + 2)
    return delta.value_heads * (delta.key_dim * delta.value_dim + updates)


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
    heads, width = delta.value_heads, delta.key_dim + delta.value_dim + 2
    return zeros(heads, delta.key_dim, delta.value_dim), zeros(heads, size, width)


def step_arrays(spec: ModelSpec, batch: Batch, size: int) -> list[np.ndarray]:
    """The arrays of a RecurrentStep on the host, in the order of its fields."""
    groups = [group.kind for group in spec.groups]
    conv = batch.tables[groups.index("conv")]
    taps = spec.conv_kernel
    owner = np.repeat(np.arange(len(batch.first) - 1), np.diff(batch.first))
    at = batch.positions[:, None] - np.arange(taps - 1, -1, -1)  # the oldest first
    seen = np.maximum(at, 0)
    slots = conv[owner[:, None], seen // size] * size + seen % size
    state = batch.tables[groups.index("state")] if "state" in groups else conv
    starts = batch.positions[batch.first[:-1]]
    return [np.where(at >= 0, slots, -1), batch.first, starts, state]


def convolve(
    x: torch.Tensor, kernel: torch.Tensor, inputs: torch.Tensor, slots: torch.Tensor,
    history: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Write x [rows, channels] into `inputs` [blocks, size, channels]; convolve each row with the
    inputs at `history`. Element by element, so the bits of a row depend on its own inputs."""
    flat = inputs.view(-1, inputs.shape[-1])
    flat.index_copy_(0, slots.long(), x)
    total = torch.zeros_like(x)
    for tap in range(kernel.shape[1]):
        at = history[:, tap]
        found = flat.index_select(0, at.clamp_min(0))
        found = torch.where((at >= 0)[:, None], found, 0.0)
        total = total + found * kernel[:, tap]
    return total


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1.0 + torch.exp(-x))


def delta_net(
    spec: ModelSpec,
    inputs: tuple[torch.Tensor, ...],
    vectors: tuple[torch.Tensor, ...],
    caches: tuple[torch.Tensor, ...],
    step: RecurrentStep,
) -> torch.Tensor:
    """[rows, values]. `inputs`: q, k, v after the convolution, z, b, a; `vectors`: decay, dt, norm;
    `caches`: states and updates of one layer."""
    delta = spec.delta
    assert delta is not None
    z = inputs[1]
    out = torch.empty_like(z)
    bk, bv = (triton.next_power_of_2(n) for n in (delta.key_dim, delta.value_dim))
    launch(
        jit_recurrent.delta_net,
        (len(step.starts), delta.value_heads, 1),
        (
            *inputs, *vectors, *caches, step.table, step.first, step.starts, out,
            step.table.shape[1], spec.norm_eps, float(delta.key_dim**-0.5),
        ),
        (
            delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim,
            caches[1].shape[2], delta.tiled, bk, bv,
        ),
        warps=8 if bk * bv > 4096 else 4,
    )  # fmt: skip
    return out
