"""Load a model's weights to the device, in the kernels' layout.

In: tensors as their file stores them. Out: tensors by name, and BlockWeights for quantised matrices
that stay in their blocks (quant.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch

from verbatim.backend.cuda.kernels import quant
from verbatim.backend.cuda.kernels.launch import unpacks_in_order
from verbatim.backend.gpu_weights import BlockMode, block_mode, is_half, keeps_blocks
from verbatim.formats.checkpoint_blocks import CHECKPOINT_TYPES
from verbatim.formats.requantise import requantise
from verbatim.formats.tensor import Tensor
from verbatim.model.layout import is_expert, is_read_by_row
from verbatim.model.loading.load import Model
from verbatim.model.rope import query_scales
from verbatim.model.spec import ModelSpec

Weight: TypeAlias = Any  # a tensor, or a quant.BlockWeight


def load_model(model: Model, device: torch.device, memory: int) -> dict[str, Weight]:
    """The weights of a model, in the layout for which `memory` bytes suffice."""
    return load(model.weights, model.spec, device, block_mode(model.weights, memory))


def sizes(weights: Mapping[str, Weight], *, tied: bool) -> tuple[int, int]:
    """Bytes that a token reads if it reads all experts, and bytes of the experts."""
    read = sum(w.nbytes for name, w in weights.items() if not is_read_by_row(name, tied=tied))
    return read, sum(w.nbytes for name, w in weights.items() if is_expert(name))


def load(
    source: Mapping[str, Tensor],
    spec: ModelSpec,
    device: torch.device,
    blocks: BlockMode = "unpacked",
) -> dict[str, Weight]:
    """Copy weights to the device in the kernels' layout: matrices in half precision, all others in
    float32; q, k, v and gate, up are concatenated, because one matmul reads them.

    `blocks`: whether quantised matrices are unpacked to half precision, also stay in their blocks,
    which is faster for few rows, or only stay in their blocks. Bits of results are the same."""
    out: dict[str, Weight] = {}
    for name, tensor in source.items():
        if blocks != "unpacked" and keeps_blocks(name, tensor):
            out[name] = quant.to_blocks(tensor, device)
        elif is_half(name, tensor):
            out[name] = _half(tensor, device)
        else:
            out[name] = torch.from_numpy(tensor.to_f32().copy()).to(device)
    if spec.norm == "layer" and not spec.norm_bias:
        for name in [n for n in out if n.endswith("norm")]:
            out[f"{name}.bias"] = torch.zeros_like(out[name])
    if spec.query_scale_beta:
        positions = np.arange(spec.context)
        out["query_scales"] = torch.from_numpy(query_scales(spec, positions)).to(device)
    for i in range(len(spec.layers)):
        join_layer(out, spec, i)
    unpack_blocks(out, blocks)
    return out


def join_layer(weights: dict[str, Weight], spec: ModelSpec, i: int) -> None:
    """Concatenate the matrices of a layer that one product reads."""
    layer, prefix = spec.layers[i], f"layers.{i}"
    if layer.mixer == "attention":
        parts = tuple(part for part in "qkv" if f"{prefix}.attn.{part}" in weights)
        _join(weights, f"{prefix}.attn", parts, spec.qkv_bias)
    if layer.mixer == "delta":
        _join_delta(weights, f"{prefix}.delta")
    if layer.experts:
        _join(weights, f"{prefix}.moe", ("gate", "up"), spec.expert_bias)
        if spec.shared_mlp:
            _join(weights, f"{prefix}.shared", ("gate", "up"), spec.mlp_bias)
    if spec.gated and f"{prefix}.mlp.gate" in weights:
        _join(weights, f"{prefix}.mlp", ("gate", "up"), spec.mlp_bias)


def unpack_blocks(weights: dict[str, Weight], blocks: BlockMode) -> None:
    """Add unpacked copies for many rows ("both"), or the buffer for such copies ("only"). Experts
    need neither."""
    held = {
        name: w for name, w in weights.items() if isinstance(w, quant.BlockWeight) and w.ndim == 2
    }
    if blocks == "both":
        for name, weight in held.items():
            plain = quant.unpack(weight)
            weights[name] = replace(weight, unpacked=plain) if unpacks_in_order() else plain
    elif held:
        size = quant.buffer_values(held)
        device = next(iter(held.values())).codes.device
        buffer = torch.empty(size, dtype=torch.float16, device=device)
        for name, weight in held.items():
            if weight.shape[0] * weight.shape[1] <= size:
                weights[name] = replace(weight, buffer=buffer)


def _half(tensor: Tensor, device: torch.device) -> torch.Tensor:
    """bfloat16 stays as it is, and mxfp4 becomes bfloat16, which holds its powers of two. All other
    types become float16: it has three more mantissa bits. Blocks of a quantised checkpoint become
    what their unpacked weight would."""
    if tensor.type in CHECKPOINT_TYPES:
        return quant.unpack_tensor(tensor, device)
    if tensor.type == "mxfp4":
        tensor = requantise(tensor, "bf16")
    if tensor.type == "bf16":
        raw = np.ascontiguousarray(tensor.data).view(np.int16).reshape(tensor.shape)
        return torch.from_numpy(raw.copy()).to(device).view(torch.bfloat16)
    # a value beyond float16 becomes infinite; the sampler reports the logits it leads to
    with np.errstate(over="ignore"):
        return torch.from_numpy(tensor.to_f32().astype(np.float16)).to(device)


def _join_delta(weights: dict[str, Weight], prefix: str) -> None:
    """One product for the four matrices of a delta net, or two: b and a may be float32 or other
    weights be in blocks."""
    parts = ("qkv", "z", "b", "a")
    found = [weights[f"{prefix}.{part}"] for part in parts]
    plain = all(isinstance(weight, torch.Tensor) for weight in found)
    if plain and len({weight.dtype for weight in found}) == 1:
        _join(weights, prefix, parts, bias=False)
    else:
        _join(weights, prefix, parts[:2], bias=False)
        _join(weights, prefix, parts[2:], bias=False)


def _join(weights: dict[str, Weight], prefix: str, parts: tuple[str, ...], bias: bool) -> None:
    for tail in ("", ".bias") if bias else ("",):
        tensors = [weights.pop(f"{prefix}.{part}{tail}") for part in parts]
        if all(isinstance(tensor, quant.BlockWeight) for tensor in tensors):
            joined = quant.join(tensors)
            if joined is not None:
                weights[f"{prefix}.{'+'.join(parts)}{tail}"] = joined
                continue
        tensors = [quant.unpack(t) if isinstance(t, quant.BlockWeight) else t for t in tensors]
        types = {tensor.dtype for tensor in tensors}
        if len(types) > 1:  # a file that mixes bfloat16 with other types
            tensors = [tensor.to(torch.float32).to(torch.float16) for tensor in tensors]
        # concatenate the output dimension; a mixture has its experts dimension before it
        dim = -1 if tail else -2
        weights[f"{prefix}.{'+'.join(parts)}{tail}"] = torch.cat(tensors, dim)
