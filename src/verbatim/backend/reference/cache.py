"""Cache memory of the reference backend: one float32 cache per CacheGroup.

In: a ModelSpec, a group and a number of blocks. Out: arrays whose second index is the block. The
scheduler decides which sequence owns which block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from verbatim.base.records import CacheGroup
from verbatim.model.spec import ModelSpec

F32 = np.float32
Array: TypeAlias = Any  # a float32 array


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCache:
    """Keys and values: [layers, blocks, kv_heads, block_size, head_dim]."""

    keys: Array
    values: Array

    def copy(self, source: int, target: int) -> None:
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]


@dataclass(frozen=True, slots=True, eq=False)
class ConvCache:
    """Inputs of causal convolutions: [layers, blocks, block_size, channels]."""

    inputs: Array

    def copy(self, source: int, target: int) -> None:
        self.inputs[:, target] = self.inputs[:, source]


@dataclass(frozen=True, slots=True, eq=False)
class StateCache:
    """Recurrent states: `states` [layers, blocks, value_heads, key_dim, value_dim] before the first
    position of each block, and `updates` [layers, blocks, block_size, update_values] of each
    position (key, value, decay, beta)."""

    states: Array
    updates: Array

    def copy(self, source: int, target: int) -> None:
        self.states[:, target] = self.states[:, source]
        self.updates[:, target] = self.updates[:, source]

    def layer(self, index: int) -> tuple[Array, Array]:
        return self.states[index], self.updates[index]


GroupCache: TypeAlias = AttentionCache | ConvCache | StateCache


def empty_cache(spec: ModelSpec, group: CacheGroup, blocks: int, block_size: int) -> GroupCache:
    layers = len(group.layers)
    if group.kind == "conv":
        return ConvCache(np.zeros((layers, blocks, block_size, spec.conv_channels), F32))
    if group.kind == "state":
        delta = spec.delta
        assert delta is not None, "a state group has delta layers"
        state = (layers, blocks, delta.value_heads, delta.key_dim, delta.value_dim)
        return StateCache(
            np.zeros(state, F32), np.zeros((layers, blocks, block_size, spec.update_values), F32)
        )
    kv_heads, head_dim = spec.kv_shape(group.layers[0])
    shape = (layers, blocks, kv_heads, block_size, head_dim)
    return AttentionCache(np.zeros(shape, F32), np.zeros(shape, F32))
