"""Tensors and keys of recurrent families in GGUF, as llama.cpp's converter writes them."""

from __future__ import annotations

from typing import Any

import numpy as np


def lfm2_metadata(config: dict[str, Any], a: str) -> dict[str, Any]:
    inner = config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim"):
        step = config["block_multiple_of"]
        inner = int(config["block_ffn_dim_multiplier"] * int(2 * inner / 3))
        inner = step * ((inner + step - 1) // step)
    kv = config["num_key_value_heads"]
    return {
        f"{a}.attention.head_count_kv": [
            kv if kind == "full_attention" else 0 for kind in config["layer_types"]
        ],
        f"{a}.feed_forward_length": inner,
        f"{a}.shortconv.l_cache": config["conv_L_cache"],
    }


def delta_metadata(config: dict[str, Any], a: str) -> dict[str, Any]:
    types = config["layer_types"]
    period = types.index("full_attention") + 1
    values = config["linear_num_value_heads"]
    keys = {
        f"{a}.ssm.conv_kernel": config["linear_conv_kernel_dim"],
        f"{a}.ssm.state_size": config["linear_key_head_dim"],
        f"{a}.ssm.group_count": config["linear_num_key_heads"],
        f"{a}.ssm.time_step_rank": values,
        f"{a}.ssm.inner_size": config["linear_value_head_dim"] * values,
        f"{a}.full_attention_interval": period,
    }
    if a != "qwen3next":
        keys[f"{a}.rope.dimension_sections"] = [11, 11, 10, 0]
    if "shared_expert_intermediate_size" in config:
        keys[f"{a}.expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    return keys


def delta_state(
    state: dict[str, np.ndarray], config: dict[str, Any], a: str
) -> dict[str, np.ndarray]:
    """qwen3next: q, k, v and z apart. The others: value heads of one key head apart."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    share, result = values // keys, {}
    for name, tensor in state.items():
        if name.endswith("norm.weight") and "linear_attn" not in name:
            tensor = tensor + np.float32(1)
        if name.endswith("A_log"):
            tensor = -np.exp(tensor)
        if "conv1d" in name:
            tensor = tensor.squeeze(1)
        if "in_proj_qkvz" in name:
            cuts = np.cumsum([key_dim, key_dim, share * value_dim])
            parts = np.split(tensor.reshape(keys, -1, tensor.shape[1]), cuts, axis=1)
            q, k, v, z = (part.reshape(-1, tensor.shape[1]) for part in parts)
            result[name.replace("qkvz", "qkv")] = np.concatenate([q, k, v])
            result[name.replace("qkvz", "z")] = z
            continue
        result[name] = _tiled(name, tensor, keys, share, key_dim, value_dim, a)
    return result


def _tiled(
    name: str, tensor: np.ndarray, keys: int, share: int, key_dim: int, value_dim: int, a: str
) -> np.ndarray:
    """The value heads of qwen35 and qwen35moe in the order 0 of each key head, then 1 of each, …"""
    if a == "qwen3next" or "linear_attn" not in name or name.endswith("norm.weight"):
        return tensor

    def tile(rows: np.ndarray, dim: int) -> np.ndarray:
        grouped = rows.reshape(keys, share, dim, -1)
        return grouped.swapaxes(0, 1).reshape(rows.shape)

    if "out_proj" in name:
        return np.ascontiguousarray(tile(np.ascontiguousarray(tensor.T), value_dim).T)
    if "in_proj_qkv" in name or "conv1d" in name:
        cut = 2 * keys * key_dim
        return np.concatenate([tensor[:cut], tile(tensor[cut:], value_dim)])
    return tile(tensor, value_dim if "in_proj_z" in name else 1)
