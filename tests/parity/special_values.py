"""Values for the random config mutations that a key's kind does not give: lists, names, other
names of a key, and numbers where the default is null."""

from __future__ import annotations

from typing import Any

from parity_case import ABSENT

Values = dict[str, tuple[Any, ...]]

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_CONV = ([_FULL, "conv"], ["conv", "conv"], ["conv"], ABSENT)
SPECIAL: dict[str, Values] = {
    "smollm3": {"no_rope_layers": ([1, 0], [0, 0], [1, 1, 0], [1], None)},
    "granitemoehybrid": {
        "num_local_experts": (0, 4),
        "position_embedding_type": ("rope", "nope", None, ABSENT),
        "mamba_d_state": (16,),
    },
    "seed_oss": {"residual_dropout": (0.3,)},
    "hunyuan_v1_dense": {"eod_token_id": (5, None)},
    "exaone4": {"sliding_window_pattern": (1, 2, 3, None, "LG", ABSENT)},
    "cohere2": {"layer_switch": (4,)},
    "starcoder2": {"residual_dropout": (0.5,)},
    "falcon": {
        "num_kv_heads": (1, 2, 4, 3, None, ABSENT),
        "num_ln_in_parallel_attn": (1, 2, None),
        "ffn_hidden_size": (40, None, ABSENT),
        "activation": ("gelu", "silu", "relu2", "relu", ABSENT),
    },
    "glm4_moe": {"num_local_experts": (4, 3)},
    "gpt_oss": {"num_experts": (4, 3), "initial_context_length": (4096,)},
    "lfm2": {"layer_types": _CONV, "full_attn_idxs": ([0], [1], None), "block_ff_dim": (48, 64)},
    "lfm2_moe": {"layer_types": _CONV},
    "qwen3_next": {
        "layer_types": ([_FULL, _LINEAR], [_LINEAR], ABSENT),
        "mlp_only_layers": ([0], [1], []),
    },
    "qwen3_5_text": {"full_attention_interval": (1, 2, None)},
    "qwen3_5_moe_text": {"full_attention_interval": (1, 2, None)},
    "gemma4_text": {
        "per_layer_config": ({"1": {"head_dim": 12}, "3": {"head_dim": 12}}, {"1": {"rms": 1}}),
        "num_global_key_value_heads": (1, 4, None),
        "final_logit_softcapping": (None, 2.0),
        "use_bidirectional_attention": (None, "vision", "all"),
        "layer_types": ([_FULL] * 4, [_SLIDING] * 4, ABSENT),
        "rope_theta": (100.0,),
        "rope_parameters": ({_FULL: {"rope_type": "proportional"}, _SLIDING: {}},),
    },
}
