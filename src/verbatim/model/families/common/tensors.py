"""Tensor names that families share: tables from internal weight names (model/spec.py).

A family is given as its difference from llama. model/loading/names.py finds a weight with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Names:
    """Tensor names of a family in one file format, by the names of model/spec.py."""

    layer: Mapping[str, str]  # weights of a layer; {e}: the number of an expert
    top: Mapping[str, str] = field(default_factory=dict)  # other weights, where not the usual
    two_norms: Mapping[str, str] = field(default_factory=dict)  # names where a block has two norms
    interleaved: bool = False  # the rows of a rotated pair are 2j and 2j + 1
    transposed: bool = False  # matrices are [in, out] (gpt2)
    grouped: bool = False  # a fused matrix holds, KV head by KV head, the rows of its q, k and v
    stacked: bool = False  # stacks of experts are [experts, in, out] (gpt_oss)


@dataclass(frozen=True, slots=True)
class DraftNames:
    """Tensor names of a draft layer (multi-token prediction), without ".weight". Its other weights
    have the names of any layer. The optional ones (embed, head, final_norm) default to the model's.
    """

    own: Mapping[str, str]
    prefix: str = ""  # of the layer; "": it is a block after the model's own


_DRAFT_PARTS = ("mtp.embed_norm", "mtp.state_norm", "mtp.project", "final_norm", "embed", "head")
_QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "embed_tokens", "shared_head.head")
QWEN_MTP = DraftNames(dict(zip(_DRAFT_PARTS, _QWEN, strict=False)), prefix="mtp.")
NEXTN = DraftNames(dict(zip(_DRAFT_PARTS, _DEEPSEEK, strict=True)))  # and of its descendants
GGUF_NEXTN = DraftNames(
    {part: f"nextn.{name.replace('d.', 'd_')}" for part, name in NEXTN.own.items()}
)


def each(ours: str, theirs: str, parts: str) -> dict[str, str]:
    """Names that differ in one part.

    >>> each("attn.*", "self_attn.*_proj", "q k")
    {'attn.q': 'self_attn.q_proj', 'attn.k': 'self_attn.k_proj'}
    """
    return {ours.replace("*", part): theirs.replace("*", part) for part in parts.split()}


def fused_qkv(name: str) -> dict[str, str]:
    """One matrix with the rows of q, k and v."""
    return each("attn.*", name, "q k v")


# Names of one layer in Hugging Face's llama. Other families are given as differences.
LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    **each("attn.*", "self_attn.*_proj", "q k v o"),
    **each("attn.*", "self_attn.*", "q_norm k_norm"),
    "mlp_norm": "post_attention_layernorm",
    **each("mlp.*", "mlp.*_proj", "gate up down"),
    "moe.router": "mlp.gate",
    **each("moe.*", "mlp.experts.{e}.*_proj", "gate up down"),
}
LLAMA_NAMES = Names(LLAMA_LAYER)


def hf_names(changes: Mapping[str, str], **options: Any) -> Names:
    """Llama's names with changes."""
    return Names(LLAMA_LAYER | dict(changes), **options)


POST_NORMS = {  # olmo2, exaone4: no norms before attention and MLP
    "attn_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}

SHARED = each("shared.*", "mlp.shared_experts.*_proj", "gate up down")
SHARED_EXPERT = {
    **each("shared.*", "mlp.shared_expert.*_proj", "gate up down"),
    "shared.scale": "mlp.shared_expert_gate",
}
FUSED_MLP = {"mlp.gate": "mlp.gate_up_proj", "mlp.up": "mlp.gate_up_proj"}

HF_TOP = {"embed": "embed_tokens", "final_norm": "norm", "head": "lm_head", "stack": "layers"}

# Names without ".weight": parameters that are no module.
BARE = (
    *("moe.choice_bias", "attn.sinks", "delta.decay", "delta.dt"),
    *("router_norm", "moe.scales", "scale"),
)

HF_PREFIXES = (
    *("model.", "model.language_model.", "language_model.model.", "transformer.", "gpt_neox."),
    "",
)

# ---------------------------------------------------------------------------------------- GGUF

GGUF_LAYER = {
    "attn_norm": "attn_norm",
    **each("attn.*", "attn_*", "q k v q_norm k_norm sinks"),
    "attn.o": "attn_output",
    "attn_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
    **each("mlp.*", "ffn_*", "gate up down"),
    "moe.router": "ffn_gate_inp",
    **each("moe.*", "ffn_*_exps", "gate up down"),
    "moe.choice_bias": "exp_probs_b",
    **each("shared.*", "ffn_*_shexp", "gate up down"),
    "shared.scale": "ffn_gate_inp_shexp",
    "conv.in": "shortconv.in_proj",
    "conv.kernel": "shortconv.conv",
    "conv.out": "shortconv.out_proj",
    "delta.qkv": "attn_qkv",
    "delta.z": "attn_gate",
    "delta.b": "ssm_beta",
    "delta.a": "ssm_alpha",
    "delta.kernel": "ssm_conv1d",
    "delta.decay": "ssm_a",
    **each("delta.*", "ssm_*", "dt norm out"),
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

GGUF_NAMES = Names(GGUF_LAYER)
# Architectures whose files rotate interleaved pairs.
GGUF_PAIRS = Names(GGUF_LAYER, interleaved=True)


def gguf_names(changes: Mapping[str, str], **options: Any) -> Names:
    return Names(GGUF_LAYER | dict(changes), **options)


GGUF_MLP_NORM = {"mlp_norm": "post_attention_norm"}

GGUF_FUSED_QKV = fused_qkv("attn_qkv")

GGUF_TOP = {
    "embed": "token_embd",
    "positions": "position_embd",
    "final_norm": "output_norm",
    "head": "output",
    "layer_inputs.embed": "per_layer_token_embd",
    "layer_inputs.project": "per_layer_model_proj",
    "layer_inputs.norm": "per_layer_proj_norm",
}
