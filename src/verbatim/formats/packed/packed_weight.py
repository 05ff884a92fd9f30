"""One quantised weight of a safetensors checkpoint: codes, and scales per group of columns.

In: what packed_checkpoint.py reads for a module, in a form that all formats share. Out: a Tensor of
floats, or one whose blocks keep the codes: GGUF's (packed_blocks.py) or those of
checkpoint_blocks.py. Invariant: a block of the latter has the bits of the floats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.formats.checkpoint_blocks import (
    CHECKPOINT_TYPES,
    GROUPS,
    CheckpointType,
    code_values,
    to_type,
)
from verbatim.formats.conversion import dequantise
from verbatim.formats.packed.packed_blocks import to_blocks
from verbatim.formats.tensor import Tensor

CHUNK_VALUES = 1 << 18  # converted at a time: temporaries stay in the CPU cache
# Zero points are whole numbers in float16; a GPU multiplies FP8 scales by 2 ** 8.
MAX_ZERO, MAX_FP8_SCALE = 255.0, 2.0**100
E4M3_NAN = 127


def without_checkpoint_blocks(tensor: Tensor) -> Tensor:
    """The weight unpacked to floats, if it has a type of checkpoint_blocks.py."""
    if tensor.type not in CHECKPOINT_TYPES:
        return tensor
    type, rows = CHECKPOINT_TYPES[tensor.type].result, tensor.row_view()
    step = max(1, CHUNK_VALUES // tensor.shape[-1])
    chunks = [rows[start : start + step] for start in range(0, len(rows), step)]
    parts = [
        to_type(dequantise(tensor.type, chunk, (len(chunk), tensor.shape[-1])), type)
        for chunk in chunks
    ]
    return Tensor(tensor.name, type, tensor.shape, np.concatenate(parts))


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    name: str
    code: str  # e4m3, i4 or i8, see checkpoint_blocks.py
    shape: tuple[int, ...]
    data: np.ndarray  # uint8 [rows, bytes] of codes; the last bytes of a row may hold no value
    scale: np.ndarray  # float32 [rows or 1, groups]
    type: str  # to which the product is rounded: f32, f16 or bf16
    zero: np.ndarray | None = None  # whole numbers of the scale's shape, in the unit of the codes
    groups: np.ndarray | None = None  # group of each column; None: there is one

    def __post_init__(self) -> None:
        fits = len(self.scale) in (1, self.rows) and (len(self.shape) == 2 or self.scale.size == 1)
        if not fits or (self.zero is not None and self.zero.shape != self.scale.shape):
            raise ModelError(f"scales {self.scale.shape} do not fit a weight {self.shape}")

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    def to_floats(self) -> Tensor:
        """values × scale, rounded once."""
        parts = [to_type(values * scale, self.type) for values, scale in self._chunks()]
        data = np.concatenate(parts) if parts else np.empty(0, np.uint8)
        return Tensor(self.name, self.type, self.shape, data)

    def to_gguf_blocks(self) -> Tensor | None:
        """GGUF blocks of the product without its last rounding; None if no type can hold it."""
        if len(self.shape) != 2 or not (chunks := list(self._chunks())):
            return None
        values, scales = (np.concatenate([pair[i] for pair in chunks]) for i in (0, 1))
        whole = bool((values == np.rint(values)).all())
        return to_blocks(self.name, values, scales) if whole else None

    def to_checkpoint_blocks(self) -> Tensor | None:
        """Blocks of checkpoint_blocks.py; None if none can hold the weight."""
        columns = self.shape[-1]
        group = next((size for size in GROUPS if self._has_groups_of(size)), None)
        zero = self.zero if self.zero is not None and self.zero.any() else None
        if group is None or not self.data.size or not self._has_limits(zero):
            return None
        kind = CheckpointType(self.code, zero is not None, group, self.type)
        count = columns // group
        at = np.zeros(count, np.int64) if self.groups is None else self.groups[::group]
        out = np.empty((self.rows, count, kind.block_bytes), np.uint8)
        size = kind.scale_bytes
        out[:, :, :size] = to_type(self.scale[:, at], kind.scale_type).reshape(-1, count, size)
        if zero is not None:
            out[:, :, size : kind.codes_at] = to_type(zero[:, at], "f16").reshape(-1, count, 2)
        out[:, :, kind.codes_at :] = self.data.reshape(self.rows, count, -1)
        return Tensor(self.name, kind.name, self.shape, out.reshape(-1))

    def _has_groups_of(self, size: int) -> bool:
        """Whether each `size` columns have one scale."""
        if self.shape[-1] % size:
            return False
        if self.groups is None:
            return True
        return bool((self.groups.reshape(-1, size) == self.groups[::size, None]).all())

    def _has_limits(self, zero: np.ndarray | None) -> bool:
        if self.code != "e4m3":
            return zero is None or bool((np.abs(zero) <= MAX_ZERO).all())
        step = max(1, CHUNK_VALUES // self.shape[-1])
        return (
            zero is None
            and bool((np.abs(self.scale) <= MAX_FP8_SCALE).all())
            and not any(
                (self.data[start : start + step] & E4M3_NAN == E4M3_NAN).any()
                for start in range(0, self.rows, step)
            )
        )

    def _chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """float32 (codes - zero, scale) of a few rows at a time, both [rows, columns]."""
        columns = self.shape[-1]
        step = max(1, CHUNK_VALUES // max(columns, 1))
        every = np.zeros(columns, np.int64) if self.groups is None else self.groups
        for start in range(0, self.rows, step):
            part = slice(start, start + step)
            values = code_values(self.code, self.data[part])[:, :columns].astype(np.float32)
            of = part if len(self.scale) == self.rows else slice(None)
            if self.zero is not None:
                values -= self.zero[of][:, every]
            yield values, np.broadcast_to(self.scale[of][:, every], values.shape)
