"""What GGUF stores in a form of its own for gemma4 and for gated delta nets (qwen3_next, qwen3_5).

In: a ModelSpec and its weights. Out: metadata keys without the architecture's prefix, and tensors
in GGUF's layout. Each function is the inverse of what the GGUF loader does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.formats.registry import BLOCKS
from verbatim.formats.tensor import Tensor
from verbatim.model.loading.names import Source
from verbatim.model.spec import DeltaSpec, ModelSpec

TILED = ("qwen35", "qwen35moe")  # architectures whose files order value heads as DeltaSpec.tiled
_SECTIONS = [11, 11, 10, 0]  # rotary pairs of time, height, width; text has one position for all


def gemma4_keys(spec: ModelSpec) -> dict[str, Any]:
    """Keys that end in _swa are those of the sliding layers. The last layer is a full one."""
    shapes = [spec.kv_shape(i) for i in range(len(spec.layers))]
    sliding = [i for i, layer in enumerate(spec.layers) if layer.window is not None]
    short = shapes[sliding[0]][1] if sliding else spec.head_dim
    return {
        "attention.head_count_kv": [kv for kv, _ in shapes],
        "feed_forward_length": [spec.mlp_width(i) for i in range(len(spec.layers))],
        "attention.key_length": shapes[-1][1],
        "attention.value_length": shapes[-1][1],
        "attention.key_length_swa": short,
        "attention.value_length_swa": short,
        "attention.shared_kv_layers": sum(a.kv_layer is not None for a in spec.layers),
        "embedding_length_per_layer_input": spec.layer_input,
        "rope.dimension_count_swa": short,
    }


def delta_keys(spec: ModelSpec, delta: DeltaSpec) -> dict[str, Any]:
    attention = [layer.mixer == "attention" for layer in spec.layers]
    keys: dict[str, Any] = {
        "ssm.conv_kernel": spec.conv_kernel,
        "ssm.state_size": delta.key_dim,
        "ssm.group_count": delta.key_heads,
        "ssm.time_step_rank": delta.value_heads,
        "ssm.inner_size": delta.values,
        "full_attention_interval": attention.index(True) + 1,
    }
    if spec.family in TILED:
        keys["rope.dimension_sections"] = _SECTIONS
    if spec.shared_mlp:
        keys["expert_shared_feed_forward_length"] = spec.shared_mlp
    return keys


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
