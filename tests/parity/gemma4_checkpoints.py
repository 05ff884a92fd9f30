"""Tiny checkpoints of Gemma 4."""

from __future__ import annotations

from typing import Any

from parity_case import Case

_FULL, _SLIDING = "full_attention", "sliding_attention"
_BASE: dict[str, Any] = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 9,
    "num_hidden_layers": 6,
    "layer_types": [_SLIDING, _SLIDING, _FULL] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "final_logit_softcapping": 30.0,
}
_PLAIN = {**_BASE, "hidden_size_per_layer_input": 0}
_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}

GEMMA4_CASES = [
    Case("gemma4", "Gemma4Text", {**_BASE, "num_kv_shared_layers": 3}, gguf="gemma4"),
    Case(
        "gemma4-wide",
        "Gemma4Text",
        {**_BASE, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
        gguf="gemma4",
    ),
    Case(
        "gemma4-k-eq-v",
        "Gemma4Text",
        {
            **_PLAIN,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "use_bidirectional_attention": "vision",
            "final_logit_softcapping": None,
        },
        gguf="gemma4",
    ),
    Case(
        "gemma4-moe", "Gemma4Text", {**_PLAIN, **_EXPERTS, "attention_k_eq_v": True}, gguf="gemma4"
    ),
    Case(
        "gemma4-biases",
        "Gemma4Text",
        {
            **_PLAIN,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": {
                _FULL: {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 1e4,
                    "factor": 2.0,
                },
                _SLIDING: {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            },
        },
        refused="rope_parameters",
    ),
]
