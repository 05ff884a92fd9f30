"""Tiny checkpoints of the families with recurrent layers."""

from __future__ import annotations

from typing import Any

from parity_case import Case, rope

_FULL, _LINEAR = "full_attention", "linear_attention"
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_MOE: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_LFM2_MOE: dict[str, Any] = {
    "num_dense_layers": 1,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}

RECURRENT_CASES = [
    Case(
        "lfm2-bias",
        "Lfm2",
        {
            "num_hidden_layers": 3,
            "full_attn_idxs": [1],
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    Case(
        "lfm2_moe-no-bias",
        "Lfm2Moe",
        {
            **_LFM2_MOE,
            "num_dense_layers": 0,
            "layer_types": [_FULL, "conv"],
            "use_expert_bias": False,
            "conv_bias": True,
            "tie_word_embeddings": False,
        },
        gguf="lfm2moe",
    ),
    Case(
        "qwen3_next-mixed",
        "Qwen3Next",
        {
            **_DELTA,
            **_MOE,
            "linear_num_value_heads": 2,
            "num_hidden_layers": 3,
            "layer_types": [_LINEAR, _FULL, _LINEAR],
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "attention_bias": True,
        },
        refused="mlp_only_layers",
    ),
    Case(
        "qwen3_5-tied",
        "Qwen3_5Text",
        {
            **_DELTA,
            "linear_num_value_heads": 6,
            "linear_conv_kernel_dim": 3,
            "num_hidden_layers": 3,
            "layer_types": [_LINEAR, _FULL, _LINEAR],
            "tie_word_embeddings": True,
            **rope("default", partial_rotary_factor=0.5, mrope_section=[2, 1, 1]),
        },
        gguf="qwen35",
    ),
]
