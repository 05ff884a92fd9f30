"""The integers of a step's recurrent layers: inputs of the convolutions, blocks of the delta nets.

In: a Batch. Out: RecurrentArrays of exactly its rows (`step_arrays`), or written into arrays of a
fixed size that a CUDA graph needs (RecurrentInputs).
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np
import torch

from verbatim.backend.cuda.kernels.recurrent import RecurrentStep
from verbatim.backend.cuda.runtime.device_step import aligned
from verbatim.backend.step_rows import Batch
from verbatim.base.config import BLOCK_SIZE
from verbatim.model.spec import ModelSpec


class RecurrentArrays(NamedTuple):
    """The fields of a RecurrentStep, on the host."""

    inputs: np.ndarray
    ages: np.ndarray
    tiles: np.ndarray
    blocks: np.ndarray
    positions: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    rows: np.ndarray


def step_arrays(spec: ModelSpec, batch: Batch) -> RecurrentArrays:
    groups = [group.kind for group in spec.groups]
    conv = batch.tables[groups.index("conv")]
    state = batch.tables[groups.index("state")] if "state" in groups else conv
    rows, first = np.diff(batch.first), batch.first[:-1]
    owner = np.repeat(np.arange(len(rows)), rows)
    at = batch.positions[:, None] - np.arange(spec.conv_kernel - 1, -1, -1)  # the oldest first
    seen = np.maximum(at, 0)
    slots = conv[owner[:, None], seen // BLOCK_SIZE] * BLOCK_SIZE + seen % BLOCK_SIZE
    ages = np.arange(batch.rows) - np.repeat(first, rows)
    starts = batch.positions[first]
    before = np.maximum(starts - 1, 0) // BLOCK_SIZE  # block of the position before the first row
    counts = (starts + rows - 1) // BLOCK_SIZE - before + 1
    tiles = np.concatenate([[0], np.cumsum(counts)])
    owners = np.repeat(np.arange(len(rows)), counts)
    block = np.arange(tiles[-1]) - np.repeat(tiles[:-1] - before, counts)
    parts = (
        np.where(at >= 0, slots, -1), ages, tiles, state[owners, block], block * BLOCK_SIZE,
        starts[owners], (starts + rows)[owners], first[owners],
    )  # fmt: skip
    return RecurrentArrays(*(part.astype(np.int32) for part in parts))


class RecurrentInputs:
    """Arrays for every step of at most so many rows and sequences. `size`: integers that they
    take in the buffer of a graph's inputs; 0 for a model without recurrent layers."""

    def __init__(self, spec: ModelSpec, rows: int, sequences: int) -> None:
        self._spec = spec
        # a sequence has at most one block more than its rows fill, and one before its first row
        tiles = min(2 * rows, rows // BLOCK_SIZE + 2 * sequences)
        self._shapes = [(rows, spec.conv_kernel), (rows,), (sequences + 1,), *[(tiles,)] * 5]
        self._sizes = [aligned(prod(shape)) for shape in self._shapes]
        self.size = sum(self._sizes) if spec.recurrent else 0

    def bind(self, host: np.ndarray, sent: torch.Tensor) -> RecurrentStep | None:
        """Place the arrays in this part of the buffer, on the host and on the device."""
        if not self.size:
            return None
        ends = np.cumsum(self._sizes)[:-1]
        self._host = RecurrentArrays(
            *[
                part[: prod(shape)].reshape(shape)
                for part, shape in zip(np.split(host, ends), self._shapes, strict=True)
            ]
        )
        return RecurrentStep(
            *[
                part[: prod(shape)].view(shape)
                for part, shape in zip(sent.split(self._sizes), self._shapes, strict=True)
            ]
        )

    def fill(self, batch: Batch | None) -> None:
        """Write a step's integers; without a batch, those of padding alone."""
        if not self.size:
            return
        for target in self._host:
            target[:] = 0
        self._host.inputs[:] = -1
        if batch is not None:
            for target, source in zip(self._host, step_arrays(self._spec, batch), strict=True):
                target[: len(source)] = source
