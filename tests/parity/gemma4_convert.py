"""Keys of Gemma 4 in GGUF, as llama.cpp's converter writes them."""

from __future__ import annotations

from typing import Any

import numpy as np


def gemma4_metadata(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The keys that differ from other families, and the divisors of the full layers' rope."""
    types, own = config["layer_types"], config["per_layer_config"]
    full = own[str(types.index("full_attention"))]
    heads, dim = config["head_dim"], full["head_dim"]
    kv = config["num_key_value_heads"]
    ropes = config["rope_parameters"]
    sliding, whole = ropes["sliding_attention"], ropes["full_attention"]
    count, shared = len(types), config["num_kv_shared_layers"]
    mlp, wide = config["intermediate_size"], config["use_double_wide_mlp"]
    rotated = int(whole["partial_rotary_factor"] * dim // 2)
    divisors = np.array([1.0] * rotated + [1e30] * (dim // 2 - rotated), np.float32)
    keys = {
        "attention.head_count_kv": [
            full.get("num_key_value_heads", kv) if t == "full_attention" else kv for t in types
        ],
        "feed_forward_length": [mlp * (1 + (wide and i >= count - shared)) for i in range(count)],
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.key_length_swa": heads,
        "attention.value_length_swa": heads,
        "attention.shared_kv_layers": shared,
        "attention.sliding_window_pattern": [t == "sliding_attention" for t in types],
        "rope.dimension_count": dim,
        "rope.dimension_count_swa": heads,
        "rope.freq_base": whole["rope_theta"],
        "rope.freq_base_swa": sliding["rope_theta"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
    }
    if config["enable_moe_block"]:
        keys["expert_used_count"] = config["top_k_experts"]
    return {f"gemma4.{key}": value for key, value in keys.items()}, {"rope_freqs.weight": divisors}
