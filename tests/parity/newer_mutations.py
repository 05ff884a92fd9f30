"""Base configs and values for the random config mutations of the newer families."""

from __future__ import annotations

from typing import Any

ABSENT: Any = object()  # remove the key
Values = dict[str, tuple[Any, ...]]

_DELTA = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}
_DELTA_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4,
    "llama_4_scaling_beta": 0.3,
}
# What a family's base config adds to the common one; None removes a key.
_BASES: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layer_interval": 2},
    "granite": {"residual_multiplier": 0.5, "logits_scaling": 2.0},
    "granitemoehybrid": {
        "shared_intermediate_size": 40,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "layer_types": ["attention"] * 2,
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
    },
    "olmo3": {"sliding_window": 5},
    "seed_oss": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "ministral3": {"head_dim": 16, "rope_parameters": _YARN},
    "exaone4": {"sliding_window": 5, "sliding_window_pattern": 2},
    "cohere2": {"sliding_window": 5, "sliding_window_pattern": 2, "rms_norm_eps": None},
    "cohere": {"rms_norm_eps": None},
    "glm4": {"head_dim": 16},
    "ernie4_5": {"head_dim": 16},
    "gpt_neox": {"rms_norm_eps": None, "num_key_value_heads": None},
    "starcoder2": {"rms_norm_eps": None},
    "stablelm": {"rms_norm_eps": None},
    "falcon": {
        "rms_norm_eps": None,
        "num_key_value_heads": None,
        "intermediate_size": None,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
    },
    "glm4_moe": {
        **_EXPERTS,
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "num_mtp_layers": 0,
    },
    "gpt_oss": {
        **_EXPERTS,
        "num_local_experts": 4,
        "sliding_window": 5,
        "rope_parameters": {k: v for k, v in _YARN.items() if "llama" not in k},
    },
    "lfm2": {
        "rms_norm_eps": None,
        "layer_types": ["conv", "full_attention"],
        "block_multiple_of": 16,
    },
    "lfm2_moe": {
        "rms_norm_eps": None,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "qwen3_next": {**_DELTA, **_DELTA_EXPERTS},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_DELTA_EXPERTS, "intermediate_size": None},
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 5,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
    },
}


def bases(common: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        family: {
            "model_type": family,
            **{
                key: value
                for key, value in {**common, **_BASES.get(family, {})}.items()
                if value is not None
            },
        }
        for family in {**_BASES, **_VALUES}
    }


_FLAG = (True, False, None, ABSENT)
_SCALE = (0.5, 2, 3.0, ABSENT)
_VALUES: dict[str, Values] = {
    "smollm3": {
        "no_rope_layers": ([1, 0], [0, 0], [1, 1, 0], [1], None),
        "no_rope_layer_interval": (1, 2, 4, ABSENT),
        "use_sliding_window": (True, False, ABSENT),
    },
    "granite": {
        "embedding_multiplier": _SCALE,
        "attention_multiplier": _SCALE,
        "residual_multiplier": _SCALE,
        "logits_scaling": _SCALE,
    },
    "granitemoehybrid": {
        "shared_intermediate_size": (48, 64),
        "num_local_experts": (0, 4),
        "position_embedding_type": ("rope", "nope", None, ABSENT),
        "embedding_multiplier": _SCALE,
        "attention_multiplier": _SCALE,
        "mamba_d_state": (16,),
    },
    "seed_oss": {"attention_out_bias": (True, False), "residual_dropout": (0.3,)},
    "hunyuan_v1_dense": {"eod_token_id": (5, None), "use_qk_norm": (True, False)},
    "exaone4": {"sliding_window_pattern": (1, 2, 3, None, "LG", ABSENT)},
    "cohere": {
        "logit_scale": _SCALE,
        "layer_norm_eps": (1e-3, ABSENT),
        "use_qk_norm": (False, True, None),
    },
    "cohere2": {
        "logit_scale": _SCALE,
        "layer_norm_eps": (1e-3, ABSENT),
        "sliding_window_pattern": (1, 2, 4, ABSENT),
        "rotary_pct": (1.0, 0.5),
        "layer_switch": (4,),
    },
    "ernie4_5": {"use_bias": _FLAG},
    "gpt_neox": {
        "rotary_pct": (0.5, 1.0, 0.75, ABSENT),
        "rotary_emb_base": (100, 5000.0, ABSENT),
        "layer_norm_eps": (1e-3, ABSENT),
        "use_parallel_residual": (True, False, ABSENT),
    },
    "starcoder2": {
        "use_bias": (True, False, ABSENT),
        "norm_epsilon": (1e-3, ABSENT),
        "residual_dropout": (0.5,),
    },
    "stablelm": {
        "use_qkv_bias": (True, False),
        "use_parallel_residual": (True, False),
        "qk_layernorm": (True, False),
        "layer_norm_eps": (1e-3, ABSENT),
    },
    "falcon": {
        "new_decoder_architecture": (True, False, ABSENT),
        "num_kv_heads": (1, 2, 4, 3, None, ABSENT),
        "multi_query": (True, False, ABSENT),
        "parallel_attn": (True, False, ABSENT),
        "num_ln_in_parallel_attn": (1, 2, None),
        "bias": (True, False, ABSENT),
        "alibi": (False, True),
        "ffn_hidden_size": (40, None, ABSENT),
        "activation": ("gelu", "silu", "relu2", "relu", ABSENT),
        "layer_norm_epsilon": (1e-3, ABSENT),
    },
    "glm4_moe": {
        "n_routed_experts": (2, 6),
        "num_local_experts": (4, 3),
        "num_experts_per_tok": (1, 2, 3),
        "moe_intermediate_size": (16, 40),
        "n_shared_experts": (1, 2),
        "first_k_dense_replace": (0, 1, 2, ABSENT),
        "norm_topk_prob": (True, False, ABSENT),
        "routed_scaling_factor": (0.5, 2.5, ABSENT),
        "use_qk_norm": (True, False),
        "n_group": (1, 2),
        "topk_group": (1,),
    },
    "gpt_oss": {
        "num_local_experts": (2, 3),
        "num_experts": (4, 3),
        "num_experts_per_tok": (1, 2, 3),
        "swiglu_limit": (7.0, 5.0),
        "swiglu_alpha": (1.702, 1.5),
        "initial_context_length": (4096,),
    },
    "lfm2": {
        "norm_eps": (1e-3, ABSENT),
        "conv_bias": (True, False, ABSENT),
        "conv_L_cache": (2, 4, ABSENT),
        "layer_types": (["full_attention", "conv"], ["conv", "conv"], ["conv"], ABSENT),
        "full_attn_idxs": ([0], [1], None),
        "block_auto_adjust_ff_dim": (True, False, ABSENT),
        "block_ffn_dim_multiplier": (1.0, 1.5, ABSENT),
        "block_ff_dim": (48, 64),
    },
    "lfm2_moe": {
        "norm_eps": (1e-3, ABSENT),
        "conv_L_cache": (2, 4, ABSENT),
        "layer_types": (["full_attention", "conv"], ["conv", "conv"], ["conv"], ABSENT),
        "num_dense_layers": (0, 2, ABSENT),
        "num_experts": (3, 5),
        "norm_topk_prob": (True, False, ABSENT),
        "use_expert_bias": (True, False, ABSENT),
        "routed_scaling_factor": (0.5, 2.5, ABSENT),
    },
    "qwen3_next": {
        "linear_num_value_heads": (2, 6, 3),
        "linear_conv_kernel_dim": (2, 3, ABSENT),
        "layer_types": (["full_attention", "linear_attention"], ["linear_attention"], ABSENT),
        "num_experts": (0, 3),
        "mlp_only_layers": ([0], [1], []),
        "norm_topk_prob": (True, False, ABSENT),
        "decoder_sparse_step": (1, 2),
    },
    "qwen3_5_text": {
        "linear_num_value_heads": (2, 6, 3),
        "linear_value_head_dim": (4, 12),
        "linear_conv_kernel_dim": (2, 3, ABSENT),
        "full_attention_interval": (1, 2, None),
        "partial_rotary_factor": (0.25, 0.5, ABSENT),
        "attn_output_gate": (True, False),
    },
    "qwen3_5_moe_text": {
        "linear_num_value_heads": (2, 6, 3),
        "num_experts": (3, 5),
        "num_experts_per_tok": (1, 3),
        "shared_expert_intermediate_size": (16, 40),
        "full_attention_interval": (1, 2, None),
        "norm_topk_prob": (True, False),
    },
    "gemma4_text": {
        "global_head_dim": (8, 24, ABSENT),
        "per_layer_config": ({"1": {"head_dim": 12}, "3": {"head_dim": 12}}, {"1": {"rms": 1}}),
        "num_kv_shared_layers": (1, 2, ABSENT),
        "use_double_wide_mlp": (True, False, ABSENT),
        "attention_k_eq_v": (True, False, ABSENT),
        "num_global_key_value_heads": (1, 4, None),
        "hidden_size_per_layer_input": (0, 4, 16),
        "final_logit_softcapping": (None, 2.0),
        "use_bidirectional_attention": (None, "vision", "all"),
        "layer_types": (["full_attention"] * 4, ["sliding_attention"] * 4, ABSENT),
        "rope_theta": (100.0,),
        "rope_parameters": (
            {"full_attention": {"rope_type": "proportional"}, "sliding_attention": {}},
        ),
    },
}


def values(rotary: Values, common: Values) -> dict[str, Values]:
    """`rotary`: keys of families with rotary positions; `common`: keys of every config."""
    result: dict[str, Values] = {}
    for family, base in bases({}).items():
        removed = {key for key, value in _BASES.get(family, {}).items() if value is None}
        own = {key: value for key, value in rotary.items() if key not in removed}
        result[family] = {**own, **common, **_VALUES.get(family, {})}
        assert base["model_type"] == family
    return result
