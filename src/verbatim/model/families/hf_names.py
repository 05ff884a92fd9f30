"""Tensor names of safetensors files: tables from internal weight names, one per family.

A family is given as its difference from llama. names.py finds a weight with these tables.
"""

from __future__ import annotations

# Names of one layer in Hugging Face's llama. Other families are given as differences.
_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "moe.router": "mlp.gate",
    "moe.gate": "mlp.experts.{e}.gate_proj",
    "moe.up": "mlp.experts.{e}.up_proj",
    "moe.down": "mlp.experts.{e}.down_proj",
}

_GEMMA = _LLAMA | {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}

_MIXTRAL = _LLAMA | {
    "moe.router": "block_sparse_moe.gate",
    "moe.gate": "block_sparse_moe.experts.{e}.w1",
    "moe.up": "block_sparse_moe.experts.{e}.w3",
    "moe.down": "block_sparse_moe.experts.{e}.w2",
}

_PHI3 = _LLAMA | {
    "attn.q": "self_attn.qkv_proj",
    "attn.k": "self_attn.qkv_proj",
    "attn.v": "self_attn.qkv_proj",
    "mlp.gate": "mlp.gate_up_proj",
    "mlp.up": "mlp.gate_up_proj",
}

_GPT2 = {
    "attn_norm": "ln_1",
    "attn.q": "attn.c_attn",
    "attn.k": "attn.c_attn",
    "attn.v": "attn.c_attn",
    "attn.o": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}

_POST_NORMS = {  # olmo2, exaone4: no norms before attention and MLP
    "attn_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}

_FUSED_MLP = {"mlp.gate": "mlp.gate_up_proj", "mlp.up": "mlp.gate_up_proj"}

_GPT_NEOX = {
    "attn_norm": "input_layernorm",
    "attn.q": "attention.query_key_value",
    "attn.k": "attention.query_key_value",
    "attn.v": "attention.query_key_value",
    "attn.o": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}

_FALCON = _GPT_NEOX | {
    "attn.q": "self_attention.query_key_value",
    "attn.k": "self_attention.query_key_value",
    "attn.v": "self_attention.query_key_value",
    "attn.o": "self_attention.dense",
}

_SHARED = {f"shared.{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}

_QWEN35 = _LLAMA | {
    "attn.gate": "self_attn.q_proj",
    **{f"delta.{part}": f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")},
    "delta.kernel": "linear_attn.conv1d",
    "delta.decay": "linear_attn.A_log",
    "delta.dt": "linear_attn.dt_bias",
    "delta.norm": "linear_attn.norm",
    "delta.out": "linear_attn.out_proj",
    **{f"shared.{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "shared.scale": "mlp.shared_expert_gate",
}

_QWEN3_NEXT = _QWEN35 | {
    "delta.qkv": "linear_attn.in_proj_qkvz",
    "delta.z": "linear_attn.in_proj_qkvz",
    "delta.b": "linear_attn.in_proj_ba",
    "delta.a": "linear_attn.in_proj_ba",
}

_LFM2 = {
    "attn_norm": "operator_norm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.out_proj",
    "attn.q_norm": "self_attn.q_layernorm",
    "attn.k_norm": "self_attn.k_layernorm",
    "conv.in": "conv.in_proj",
    "conv.kernel": "conv.conv",
    "conv.out": "conv.out_proj",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "feed_forward.w1",
    "mlp.up": "feed_forward.w3",
    "mlp.down": "feed_forward.w2",
    "moe.router": "feed_forward.gate",
    "moe.choice_bias": "feed_forward.expert_bias",
    "moe.gate": "feed_forward.experts.{e}.w1",
    "moe.up": "feed_forward.experts.{e}.w3",
    "moe.down": "feed_forward.experts.{e}.w2",
}

_GEMMA4 = _GEMMA | {
    "mlp_own_norm": "post_feedforward_layernorm_1",
    "moe_norm": "pre_feedforward_layernorm_2",
    "moe_post_norm": "post_feedforward_layernorm_2",
    "router_norm": "router.scale",
    "moe.router": "router.proj",
    "moe.scales": "router.per_expert_scale",
    "moe.gate": "experts.{e}.gate_proj",
    "moe.up": "experts.{e}.up_proj",
    "moe.down": "experts.{e}.down_proj",
    "input.gate": "per_layer_input_gate",
    "input.project": "per_layer_projection",
    "input_norm": "post_per_layer_input_norm",
    "scale": "layer_scalar",
}

HF_LAYER = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma4": _GEMMA4,
    "phi3": _PHI3,
    "gpt2": _GPT2,
    "mixtral": _MIXTRAL,
    "qwen3moe": _LLAMA,
    "smollm3": _LLAMA,
    "granite": _LLAMA,
    "granitehybrid": _LLAMA
    | {
        "mlp.gate": "shared_mlp.input_linear",
        "mlp.up": "shared_mlp.input_linear",
        "mlp.down": "shared_mlp.output_linear",
    },
    "olmo2": _LLAMA | _POST_NORMS,
    "seed_oss": _LLAMA,
    "hunyuan-dense": _LLAMA
    | {"attn.q_norm": "self_attn.query_layernorm", "attn.k_norm": "self_attn.key_layernorm"},
    "mistral3": _LLAMA,
    "exaone4": _LLAMA | _POST_NORMS,
    "command-r": _LLAMA,
    "cohere2": _LLAMA,
    "glm4": _LLAMA
    | _FUSED_MLP
    | {"attn_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"},
    "ernie4_5": _LLAMA,
    "arcee": _LLAMA,
    "gptneox": _GPT_NEOX,
    "starcoder2": _LLAMA | {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
    "stablelm": _LLAMA,
    "falcon": _FALCON,
    "glm4moe": _LLAMA | _SHARED | {"moe.choice_bias": "mlp.gate.e_score_correction_bias"},
    "gpt-oss": _LLAMA
    | {
        "attn.sinks": "self_attn.sinks",
        "moe.router": "mlp.router",
        "moe.gate": "mlp.experts.gate_up_proj",
        "moe.up": "mlp.experts.gate_up_proj",
        "moe.down": "mlp.experts.down_proj",
    },
    "lfm2": _LFM2,
    "lfm2moe": _LFM2,
    "qwen3next": _QWEN3_NEXT,
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35,
}

HF_TOP = {"embed": "embed_tokens", "final_norm": "norm", "head": "lm_head", "stack": "layers"}

HF_TOPS = {
    "gpt2": {"embed": "wte", "positions": "wpe", "final_norm": "ln_f", "stack": "h"},
    "gptneox": {"embed": "embed_in", "final_norm": "final_layer_norm", "head": "embed_out"},
    "falcon": {"embed": "word_embeddings", "final_norm": "ln_f", "stack": "h"},
    "gemma4": {
        "layer_inputs.embed": "embed_tokens_per_layer",
        "layer_inputs.project": "per_layer_model_projection",
        "layer_inputs.norm": "per_layer_projection_norm",
    },
    "lfm2": {"final_norm": "embedding_norm"},
    "lfm2moe": {"final_norm": "embedding_norm"},
}

# Families whose safetensors files rotate interleaved pairs: the loader reorders rows of q and k.
HF_INTERLEAVED = ("command-r", "cohere2", "glm4", "ernie4_5")

LFM2_FAMILIES = ("lfm2", "lfm2moe")

RECURRENT = (*LFM2_FAMILIES, "qwen3next", "qwen35", "qwen35moe")

# Names without ".weight": parameters that are no module.
BARE = (
    *("moe.choice_bias", "attn.sinks", "delta.decay", "delta.dt"),
    *("router_norm", "moe.scales", "scale"),
)

HF_PREFIXES = (
    *("model.", "model.language_model.", "language_model.model.", "transformer.", "gpt_neox."),
    "",
)
