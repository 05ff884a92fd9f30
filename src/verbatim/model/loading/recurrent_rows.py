"""Rearrange tensors of recurrent families: rows of fused matrices, kernels, decays.

In: a tensor of the file and its Source. Out: the tensor of one internal weight.
"""

from __future__ import annotations

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.formats.tensor import Tensor
from verbatim.model.loading.names import Source
from verbatim.model.spec import ModelSpec


def rearranged(tensor: Tensor, source: Source, spec: ModelSpec, file: str) -> Tensor:
    if source.squeeze and 1 in tensor.shape[:2] and len(tensor.shape) > 1:
        one = tensor.shape.index(1)
        shape = (*tensor.shape[:one], *tensor.shape[one + 1 :])
        return Tensor(tensor.name, tensor.type, shape, tensor.data)
    if source.negative_exp:
        values = -np.exp(tensor.to_f32().astype(np.float32))
        return Tensor(tensor.name, "f32", tensor.shape, values.reshape(-1).view(np.uint8))
    if source.by_width:
        scaled = tensor.to_f32().astype(np.float32) * np.float32(spec.hidden**-0.5)
        return Tensor(tensor.name, "f32", tensor.shape, scaled.reshape(-1).view(np.uint8))
    if source.interleaved:
        return _part_rows(tensor, source, spec, file)
    return tensor


def _part_rows(tensor: Tensor, source: Source, spec: ModelSpec, file: str) -> Tensor:
    """The rows of source.part. They alternate with those of other parts, head by head."""
    heads, sizes = _parts(source, spec)
    needed = heads * sum(sizes.values())
    if tensor.shape[0] != needed:
        raise ModelError(
            f"tensor {tensor.name} has {tensor.shape[0]} rows, {needed} are needed for "
            f"{', '.join(sizes)}",
            file=file,
        )
    rows = tensor.data.reshape(heads, needed // heads, -1)
    starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
    chosen = ("q", "k", "v") if source.part == "qkv" else (source.part,)
    parts = [rows[:, starts[p] : starts[p] + sizes[p]].reshape(-1) for p in chosen]
    count = heads * sum(sizes[p] for p in chosen)
    return Tensor(
        tensor.name,
        tensor.type,
        (count, *tensor.shape[1:]),
        np.ascontiguousarray(np.concatenate(parts)),
    )


def _parts(source: Source, spec: ModelSpec) -> tuple[int, dict[str, int]]:
    """The number of heads, and the rows of each part of a head, in the file's order."""
    if source.interleaved == "q_gate":
        return spec.heads, {"q": spec.head_dim, "gate": spec.head_dim}
    delta = spec.delta
    assert delta is not None, "only delta nets have such matrices"
    share = delta.value_heads // delta.key_heads
    if source.interleaved == "ba":
        return delta.key_heads, {"b": share, "a": share}
    values = share * delta.value_dim
    return delta.key_heads, {"q": delta.key_dim, "k": delta.key_dim, "v": values, "z": values}
