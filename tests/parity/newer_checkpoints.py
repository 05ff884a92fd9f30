"""Tiny checkpoints of the families that came after llama, qwen and gemma."""

from __future__ import annotations

from typing import Any

from parity_case import ABSENT, Case, rope

_FULL, _SLIDING = "full_attention", "sliding_attention"
_YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
_HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_MOE = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
    "head_dim": 16,
}
_OSS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": 9,
}
_HYBRID = {
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 40,
    "intermediate_size": 40,
    "layer_types": ["attention"] * 2,
    "position_embedding_type": "rope",
    "mamba_n_heads": 4,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.7,
}
_FALCON = {
    "num_key_value_heads": ABSENT,
    "intermediate_size": ABSENT,
    "num_kv_heads": 2,
    "num_attention_heads": 4,
    "new_decoder_architecture": True,
}

NEWER_CASES = [
    Case("smollm3", "SmolLM3", {"num_hidden_layers": 5, **_YARN}, gguf="smollm3"),
    Case(
        "smollm3-windows",
        "SmolLM3",
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 7,
            "tie_word_embeddings": False,
        },
        refused="layer_types",
    ),
    Case("granitehybrid", "GraniteMoeHybrid", _HYBRID, gguf="granite"),
    Case(
        "granitehybrid-nope",
        "GraniteMoeHybrid",
        {**_HYBRID, "position_embedding_type": None},
        refused="position_embedding_type",
    ),
    Case("olmo2-bias", "Olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    Case(
        "olmo3",
        "Olmo3",
        {
            "num_hidden_layers": 5,
            "sliding_window": 9,
            "rope_parameters": {
                _FULL: {**_YARN["rope_parameters"], "rope_theta": 500000.0},
                _SLIDING: {"rope_type": "default", "rope_theta": 500000.0},
            },
        },
        gguf="olmo2",
    ),
    Case("seed_oss-out-bias", "SeedOss", {"head_dim": 8, "attention_out_bias": True}),
    Case(
        "hunyuan-alpha",
        "HunYuanDenseV1",
        {"head_dim": 16, **rope("dynamic", factor=1.0, alpha=50.0), "attention_bias": True},
        gguf="hunyuan-dense",
    ),
    Case(
        "exaone4-full",
        "Exaone4",
        {"sliding_window": None, "layer_types": [_FULL] * 2},
        gguf="exaone4",
    ),
    Case(
        "cohere-bias",
        "Cohere",
        {"attention_bias": True, "tie_word_embeddings": False, "logit_scale": 0.5},
    ),
    Case(
        "glm-no-bias", "Glm", {"head_dim": 8, "attention_bias": False, "rope_parameters": {**_HALF}}
    ),
    Case("ernie4_5-bias", "Ernie4_5", {"head_dim": 8, "use_bias": True}),
    Case(
        "phi4-mini",
        "Phi3",
        {"rope_parameters": {**_HALF, "partial_rotary_factor": 0.75}},
        gguf="phi3",
    ),
    Case(
        "gpt_neox-sequential",
        "GPTNeoX",
        {"num_key_value_heads": ABSENT, "use_parallel_residual": False, "attention_bias": False},
    ),
    Case("starcoder2-window", "Starcoder2", {"sliding_window": 9, "use_bias": False}),
    Case("stablelm-parallel", "StableLm", {"use_parallel_residual": True}, gguf="stablelm"),
    Case("falcon-new", "Falcon", {**_FALCON, "bias": True}),
    Case("falcon-7b", "Falcon", {**_FALCON, "new_decoder_architecture": False}, gguf="falcon"),
    Case(
        "falcon-sequential",
        "Falcon",
        {
            **_FALCON,
            "new_decoder_architecture": False,
            "parallel_attn": False,
            "multi_query": False,
            "num_kv_heads": 4,
        },
        refused="parallel_attn",
    ),
    Case(
        "glm4_moe",
        "Glm4Moe",
        {**_MOE, "use_qk_norm": True, "routed_scaling_factor": 1.5, "attention_bias": True},
        gguf="glm4moe",
    ),
    Case(
        "glm4_moe-plain", "Glm4Moe", {**_MOE, "norm_topk_prob": False, "first_k_dense_replace": 0}
    ),
    Case(
        "gpt_oss",
        "GptOss",
        {**_OSS, **rope("yarn", factor=4.0, truncate=False, original_max_position_embeddings=32)},
        gguf="gpt-oss",
    ),
    Case("gpt_oss-plain", "GptOss", {**_OSS, **rope("default"), "attention_bias": False}),
]
