"""What GGUF stores in a form of its own for gemma4 and for gated delta nets (qwen3_next, qwen3_5).

In: a ModelSpec and its weights. Out: tensors in GGUF's layout. Each function is the inverse of what
the GGUF loader does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.formats.registry import BLOCKS
from verbatim.formats.tensor import Tensor
from verbatim.model.loading.names import Source
from verbatim.model.spec import DeltaSpec, ModelSpec

TILED = ("qwen35", "qwen35moe")  # architectures whose files order value heads as DeltaSpec.tiled


def unscaled(tensor: Tensor, width: int) -> Tensor:
    """A vector that the loader divides by the root of the model's width, multiplied by it. Values
    that the division would round differently are moved to the neighbour that gives their bits."""
    factor, wanted = np.float32(width**-0.5), tensor.to_f32()
    best = wanted / factor
    for limit in (np.float32(-np.inf), np.float32(np.inf)):
        other = np.nextafter(best, limit)
        best = np.where((best * factor != wanted) & (other * factor == wanted), other, best)
    return Tensor(tensor.name, "f32", tensor.shape, best.astype(np.float32).view(np.uint8))


# --------------------------------------------------------------------------- gated delta nets


def tiled(part: str, tensor: Tensor, delta: DeltaSpec, file: str) -> Tensor:
    """A weight of a delta net with its value heads in the order of TILED files: the first value
    head of each key head, then the second of each."""
    if part in ("z", "b", "a", "decay", "dt"):
        return _with(tensor, _head_order(_rows(tensor), delta))
    if part in ("qkv", "kernel"):
        rows, first = _rows(tensor), 2 * delta.keys
        return _with(tensor, np.concatenate([rows[:first], _head_order(rows[first:], delta)]))
    if part == "out":
        if delta.value_dim % BLOCKS[tensor.type][0]:
            raise ModelError(
                f"{tensor.name} is {tensor.type}, whose blocks span value heads of "
                f"{delta.value_dim}; GGUF orders the value heads differently",
                file=file,
            )
        columns = _rows(tensor).reshape(tensor.shape[0], delta.value_heads, -1)
        return _with(tensor, _head_order(columns.swapaxes(0, 1), delta).swapaxes(0, 1))
    return tensor


def _rows(tensor: Tensor) -> np.ndarray:
    return tensor.data.reshape(tensor.shape[0], -1)


def _with(tensor: Tensor, rows: np.ndarray) -> Tensor:
    return Tensor(tensor.name, tensor.type, tensor.shape, np.ascontiguousarray(rows).reshape(-1))


def _head_order(rows: np.ndarray, delta: DeltaSpec) -> np.ndarray:
    share = delta.value_heads // delta.key_heads
    heads = rows.reshape(delta.key_heads, share, -1)
    return heads.swapaxes(0, 1).reshape(rows.shape)


# ---------------------------------------------------------------------------------- fused tensors


def fused(parts: Sequence[Tensor], source: Source, spec: ModelSpec) -> np.ndarray:
    """The bytes of a tensor that holds several weights: their rows one after the other, expert by
    expert, or head by head."""
    groups = 1
    if source.halves:
        groups = parts[0].shape[0]
    elif source.interleaved == "q_gate":
        groups = spec.heads
    elif source.interleaved:
        assert spec.delta is not None, "only delta nets have such matrices"
        groups = spec.delta.key_heads
    return np.concatenate([p.data.reshape(groups, -1) for p in parts], axis=1).reshape(-1)
