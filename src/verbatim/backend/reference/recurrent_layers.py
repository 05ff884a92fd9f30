"""Recurrent layers in NumPy: causal convolutions and gated delta nets over paged caches.

In: one row per token, and the block tables of the step. Out: one row per token. Invariant: a row
depends on the tokens of its own sequence alone, not on the cut of the sequence into steps: every
position is computed by the same operations from the same stored values.

A state is never updated in place. A block holds the state before its first position and the
updates of its positions, so the state at any position is a replay of at most one block. Rejected
drafts, forks and prefix hits therefore need no restore: docs/adr/0023-recurrent-state.md.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from verbatim.backend.step_rows import Batch
from verbatim.model.spec import DeltaSpec

F32 = np.float32
Array: TypeAlias = Any  # a float32 array


def convolve(x: Array, kernel: Array, inputs: Array, batch: Batch, group: int) -> Array:
    """[rows, channels]: write x into the cache, then convolve each row with the ones before it.

    `kernel` [channels, taps]; `inputs` [blocks, block_size, channels], of one layer."""
    size, taps = inputs.shape[1], kernel.shape[1]
    result = np.zeros_like(x)
    for s, table in enumerate(batch.tables[group]):
        rows = slice(batch.first[s], batch.first[s + 1])
        positions = batch.positions[rows]
        inputs[table[positions // size], positions % size] = x[rows]
        for tap in range(taps):  # the oldest position first
            at = positions - (taps - 1 - tap)
            seen = np.maximum(at, 0)
            found = inputs[table[seen // size], seen % size]
            result[rows] += np.where((at >= 0)[:, None], found, F32(0)) * kernel[:, tap]
    return result


def delta_states(
    queries: Array,
    updates: Array,
    cache: tuple[Array, Array],
    delta: DeltaSpec,
    batch: Batch,
    group: int,
) -> Array:
    """[rows, value_heads, value_dim]: the outputs q·S of each position.

    `queries` [rows, key_heads, key_dim]; `updates` [rows, update_values]; `cache`: the states and
    the updates of one layer (cache.StateCache)."""
    states, stored = cache
    size = stored.shape[1]
    key_heads = [delta.key_head(j) for j in range(delta.value_heads)]
    result = np.empty((len(queries), delta.value_heads, delta.value_dim), F32)
    for s, table in enumerate(batch.tables[group]):
        first, last = int(batch.first[s]), int(batch.first[s + 1])
        start = int(batch.positions[first])
        state = _state_before(start, table, states, stored, delta, key_heads)
        for row in range(first, last):
            position = start + row - first
            block, slot = table[position // size], position % size
            if slot == 0:
                states[block] = state
            stored[block, slot] = updates[row]
            state = _updated(state, updates[row], delta, key_heads)
            q = queries[row][key_heads]
            result[row] = (state * q[:, :, None]).sum(axis=1, dtype=F32)
    return result


def _state_before(
    position: int,
    table: Array,
    states: Array,
    stored: Array,
    delta: DeltaSpec,
    key_heads: list[int],
) -> Array:
    """The state before a position: that of its block, advanced by the positions before it. At the
    first position of a block, that of the whole block before."""
    if position == 0:
        return np.zeros(states.shape[1:], F32)
    index, size = (position - 1) // stored.shape[1], stored.shape[1]
    block = table[index]
    assert block >= 0, "the block before a position is in the table"
    state = states[block].copy()
    for slot in range(position - index * size):
        state = _updated(state, stored[block, slot], delta, key_heads)
    return state


def _updated(state: Array, update: Array, delta: DeltaSpec, key_heads: list[int]) -> Array:
    """The state [value_heads, key_dim, value_dim] after one position."""
    k, v, decay, beta = np.split(
        update, [delta.keys, delta.keys + delta.values, delta.keys + delta.values + len(key_heads)]
    )
    k = k.reshape(delta.key_heads, delta.key_dim)[key_heads][:, :, None]
    state = state * decay[:, None, None]
    error = v.reshape(delta.value_heads, delta.value_dim) - (state * k).sum(axis=1, dtype=F32)
    return state + k * (error * beta[:, None])[:, None, :]


def l2_normed(x: Array) -> Array:
    """x divided by the root of its sum of squares + 1e-6, over the last axis."""
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True, dtype=F32) + F32(1e-6))


def softplus(x: Array) -> Array:
    """ln(1 + exp(x)), without overflow."""
    return np.maximum(x, F32(0)) + np.log1p(np.exp(-np.abs(x)))
