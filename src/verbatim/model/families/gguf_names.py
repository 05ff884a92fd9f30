"""Tensor names of GGUF files: tables from internal weight names, one per architecture.

names.py finds a weight with these tables.
"""

from __future__ import annotations

_GGUF = {
    "attn_norm": "attn_norm",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.o": "attn_output",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "moe.router": "ffn_gate_inp",
    "moe.gate": "ffn_gate_exps",
    "moe.up": "ffn_up_exps",
    "moe.down": "ffn_down_exps",
    "moe.choice_bias": "exp_probs_b",
    "attn.sinks": "attn_sinks",
    "shared.gate": "ffn_gate_shexp",
    "shared.up": "ffn_up_shexp",
    "shared.down": "ffn_down_shexp",
    "shared.scale": "ffn_gate_inp_shexp",
    "attn.gate": "attn_q",
    "conv.in": "shortconv.in_proj",
    "conv.kernel": "shortconv.conv",
    "conv.out": "shortconv.out_proj",
    "delta.qkv": "attn_qkv",
    "delta.z": "attn_gate",
    "delta.b": "ssm_beta",
    "delta.a": "ssm_alpha",
    "delta.kernel": "ssm_conv1d",
    "delta.decay": "ssm_a",
    "delta.dt": "ssm_dt",
    "delta.norm": "ssm_norm",
    "delta.out": "ssm_out",
    "mlp_own_norm": "post_ffw_norm_1",
    "moe_norm": "pre_ffw_norm_2",
    "moe_post_norm": "post_ffw_norm_2",
    "router_norm": "ffn_gate_inp.scale",
    "moe.scales": "ffn_down_exps.scale",
    "input.gate": "inp_gate",
    "input.project": "proj",
    "input_norm": "post_norm",
    "scale": "layer_output_scale",
}

_GGUF_MLP_NORM = {"mlp_norm": "post_attention_norm"}

_GGUF_FUSED_QKV = {"attn.q": "attn_qkv", "attn.k": "attn_qkv", "attn.v": "attn_qkv"}

GGUF_LAYER = {
    "llama": _GGUF,
    "mixtral": _GGUF,
    "qwen2": _GGUF,
    "qwen3": _GGUF,
    "qwen3moe": _GGUF,
    "gemma2": _GGUF,
    "gemma3": _GGUF,
    "gemma4": _GGUF,
    "phi3": _GGUF | _GGUF_FUSED_QKV | {"mlp.gate": "ffn_up"},
    "gpt2": _GGUF | _GGUF_FUSED_QKV,
    "smollm3": _GGUF,
    "granite": _GGUF,
    "granitehybrid": _GGUF,
    "olmo2": _GGUF,
    "seed_oss": _GGUF | _GGUF_MLP_NORM,
    "hunyuan-dense": _GGUF,
    "mistral3": _GGUF,
    "exaone4": _GGUF,
    "command-r": _GGUF,
    "cohere2": _GGUF,
    "glm4": _GGUF | {"mlp.gate": "ffn_up"},
    "ernie4_5": _GGUF,
    "arcee": _GGUF,
    "gptneox": _GGUF | _GGUF_FUSED_QKV,
    "starcoder2": _GGUF,
    "stablelm": _GGUF,
    "falcon": _GGUF | _GGUF_FUSED_QKV,
    "glm4moe": _GGUF | _GGUF_MLP_NORM,
    "gpt-oss": _GGUF | _GGUF_MLP_NORM,
    "lfm2": _GGUF,
    "lfm2moe": _GGUF,
    "qwen3next": _GGUF | _GGUF_MLP_NORM | {"delta.b": "ssm_ba", "delta.a": "ssm_ba"},
    "qwen35": _GGUF | _GGUF_MLP_NORM,
    "qwen35moe": _GGUF | _GGUF_MLP_NORM,
}

# Architectures whose GGUF files rotate interleaved pairs.
GGUF_INTERLEAVED = (
    *("llama", "mixtral", "smollm3", "granite", "granitehybrid", "mistral3", "command-r"),
    *("cohere2", "glm4", "ernie4_5", "arcee"),
)

GGUF_TOP = {
    "embed": "token_embd",
    "positions": "position_embd",
    "final_norm": "output_norm",
    "head": "output",
    "layer_inputs.embed": "per_layer_token_embd",
    "layer_inputs.project": "per_layer_model_proj",
    "layer_inputs.norm": "per_layer_proj_norm",
}
