"""Map internal weight names to the tensor names of safetensors and GGUF files.

In: a family and an internal name (model/spec.py). Out: a Source: the tensors of the file that hold
the weight, and which rows of them. No bytes are read here; model/load.py applies the Source.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

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
_HF_TOP = {"embed": "embed_tokens", "final_norm": "norm", "head": "lm_head", "stack": "layers"}
_HF_TOPS = {
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
_HF_INTERLEAVED = ("command-r", "cohere2", "glm4", "ernie4_5")
_LFM2_FAMILIES = ("lfm2", "lfm2moe")
_RECURRENT = (*_LFM2_FAMILIES, "qwen3next", "qwen35", "qwen35moe")
# Names without ".weight": parameters that are no module.
_BARE = (
    *("moe.choice_bias", "attn.sinks", "delta.decay", "delta.dt"),
    *("router_norm", "moe.scales", "scale"),
)

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
FUSED_EXPERTS, FUSED_EXPERTS_GGUF = "gate_up_proj", "ffn_gate_up_exps"  # gate and up in one stack
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
_GGUF_INTERLEAVED = (
    *("llama", "mixtral", "smollm3", "granite", "granitehybrid", "mistral3", "command-r"),
    *("cohere2", "glm4", "ernie4_5", "arcee"),
)
_GGUF_TOP = {
    "embed": "token_embd",
    "positions": "position_embd",
    "final_norm": "output_norm",
    "head": "output",
    "layer_inputs.embed": "per_layer_token_embd",
    "layer_inputs.project": "per_layer_model_proj",
    "layer_inputs.norm": "per_layer_proj_norm",
}

# Tensors in a file that the engine ignores: buffers that it computes itself.
_IGNORABLE = {
    "hf": re.compile(r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.(bias|masked_bias))$"),
    "gguf": re.compile(
        r"^(rope_freqs|rope_factors_long|rope_factors_short)\.weight$|^blk\.\d+\.attn\.rot_embd$"
    ),
}
_LAYER = re.compile(r"^(model\.layers|blk)\.(\d{1,5})\.")
_TIED_HEADS = (
    *("lm_head.weight", "language_model.lm_head.weight", "embed_out.weight", "output.weight"),
)
_IGNORABLE_VISION = re.compile(
    r"^(model\.)?(vision_tower|multi_modal_projector|embed_vision|visual|audio_tower|embed_audio)\."
)
_KEYS_AND_VALUES = re.compile(
    r"(?:layers|^blk)\.(\d{1,5})\.(?:self_attn\.[kv]_(?:proj|norm)|attn_[kv](?:_norm)?)\."
)
_DRAFTS = re.compile(r"^mtp\.")  # layers that draft tokens, beside the model's own

HF_PREFIXES = (
    *("model.", "model.language_model.", "language_model.model.", "transformer.", "gpt_neox."),
    "",
)


@dataclass(frozen=True, slots=True)
class Source:
    """Location of one weight. Several names are the experts of a layer, to be stacked in order."""

    names: tuple[str, ...]
    part: str = ""  # q, k, v, gate, up: those rows of a fused matrix; empty: all
    transpose: bool = False  # gpt2's Conv1D and gpt_oss's experts store [in, out]
    permuted: bool = False  # the file interleaves the two halves of each rotated head
    grouped: bool = False  # a fused matrix holds, KV head by KV head, the rows of its q, k and v
    alternating: bool = False  # gate and up are alternating rows of a fused matrix
    halves: bool = False  # gate and up are the halves of each expert's rows in a fused stack
    # The rows of one part of a recurrent family's fused matrix: q and gate alternate head by head
    # ("q_gate"); q, k, v, z ("qkvz") or b, a ("ba") alternate key head by key head.
    interleaved: Literal["", "q_gate", "qkvz", "ba"] = ""
    squeeze: bool = False  # a convolution's kernel: drop the dimension of size 1
    negative_exp: bool = False  # the weight is -exp(the file's values)
    by_width: bool = False  # the weight is the file's values / root of the model's width


def hf_source(
    family: str,
    prefix: str,
    name: str,
    experts: int,
    *,
    two_norms: bool = False,
    fused_experts: bool = False,
) -> Source:
    """Location of a weight in a safetensors directory of this family.

    `two_norms`: attention and MLP of a parallel block have a norm each, which falcon names so.
    `fused_experts`: the experts of a layer are two stacks, FUSED_EXPERTS and down_proj."""
    stem, suffix = _split(name)
    top = _HF_TOP | _HF_TOPS.get(family, {})
    if stem == "head":
        # inside a multi-modal model, the head is a sibling of the language model
        outer = prefix.removesuffix("model.") if prefix.startswith("language_model.") else ""
        return Source((f"{outer}{top['head']}.weight",))
    if not stem.startswith("layers."):
        return Source((f"{prefix}{top[stem]}.{suffix}",))
    _, index, part = stem.split(".", 2)
    names = HF_LAYER.get(family, _LLAMA)
    if family == "falcon" and two_norms:
        names = names | {"attn_norm": "ln_attn", "mlp_norm": "ln_mlp"}
    path = f"{prefix}{top['stack']}.{index}.{names[part]}"
    if family == "gpt-oss" and part in ("moe.gate", "moe.up", "moe.down"):
        return _gpt_oss_experts(path, part, suffix)
    if part not in _BARE:
        path = f"{path}.{suffix}"
    if part == "router_norm":
        return Source((path,), by_width=True)
    if "{e}" in path and fused_experts:
        stack = path.split(".{e}.")[0]
        return _expert_stack(part, f"{stack}.{FUSED_EXPERTS}", f"{stack}.down_proj")
    if "{e}" in path:
        return Source(tuple(path.replace("{e}", str(e)) for e in range(experts)))
    if family in _RECURRENT and (source := _recurrent(family, names, path, part)):
        return replace(source, negative_exp=part == "delta.decay")
    return Source(
        (path,),
        part=part.rsplit(".", 1)[-1] if _is_fused(names, part) else "",
        transpose=family == "gpt2" and suffix == "weight" and "." in part,
        permuted=family in _HF_INTERLEAVED and part in ("attn.q", "attn.k"),
        grouped=family in ("gptneox", "falcon"),
    )


def _recurrent(family: str, names: dict[str, str], path: str, part: str) -> Source | None:
    """Location of a weight that only recurrent families have; None for all other weights."""
    if part.endswith(".kernel"):
        return Source((path,), squeeze=True)
    if part in ("attn.q", "attn.gate") and family not in _LFM2_FAMILIES:
        return Source((path,), part=part.removeprefix("attn."), interleaved="q_gate")
    if part.startswith("delta."):
        kind: Literal["", "qkvz", "ba"] = ""
        if names[part].endswith("qkvz"):
            kind = "qkvz"
        elif names[part].endswith("ba"):
            kind = "ba"
        return Source((path,), part=part.removeprefix("delta.") if kind else "", interleaved=kind)
    return None


def _gpt_oss_experts(path: str, part: str, suffix: str) -> Source:
    """Stacked experts: [experts, in, out], gate and up alternating; biases end in _bias."""
    fused = part.removeprefix("moe.") if part != "moe.down" else ""
    name = path if suffix == "weight" else f"{path}_bias"
    return Source((name,), part=fused, transpose=suffix == "weight", alternating=bool(fused))


def _expert_stack(part: str, fused: str, down: str) -> Source:
    """Stacked experts: [experts, out, in], the rows of gate before those of up."""
    if part == "moe.down":
        return Source((down,))
    return Source((fused,), part=part.removeprefix("moe."), halves=True)


def gguf_source(
    architecture: str, name: str, *, two_norms: bool = False, fused_experts: bool = False
) -> Source:
    """Location of a weight in a GGUF file of this architecture (options: see hf_source)."""
    stem, suffix = _split(name)
    if not stem.startswith("layers."):
        top = _GGUF_TOP[stem]
        if architecture in _LFM2_FAMILIES and stem == "final_norm":
            top = "token_embd_norm"  # llama.cpp's name of the norm before the head
        return Source((f"{top}.{suffix}",))
    _, index, part = stem.split(".", 2)
    names = GGUF_LAYER[architecture]
    if architecture == "falcon" and two_norms:
        names = names | {"attn_norm": "attn_norm_2", "mlp_norm": "attn_norm"}
    if part in ("moe.choice_bias", "delta.dt"):
        suffix = "bias"
    if part in ("router_norm", "moe.scales"):
        return Source((f"blk.{index}.{names[part]}",), by_width=part == "router_norm")
    if fused_experts and part in ("moe.gate", "moe.up"):
        return _expert_stack(part, f"blk.{index}.{FUSED_EXPERTS_GGUF}.weight", "")
    path = f"blk.{index}.{names[part]}" + ("" if part == "delta.decay" else f".{suffix}")
    if architecture in _RECURRENT and (source := _recurrent(architecture, names, path, part)):
        return source
    return Source(
        (path,),
        part=part.rsplit(".", 1)[-1] if _is_fused(names, part) else "",
        permuted=architecture in _GGUF_INTERLEAVED and part in ("attn.q", "attn.k"),
    )


def find_prefix(names: Iterable[str], family: str) -> str | None:
    """Prefix of all names, mostly "model."; None if the file has no embedding."""
    present = set(names)
    embed = (_HF_TOP | _HF_TOPS.get(family, {}))["embed"]
    return next((p for p in HF_PREFIXES if f"{p}{embed}.weight" in present), None)


def ignorable(
    kind: str,
    *,
    tied: bool,
    nested: bool,
    draft_layers_from: int | None = None,
    shared_kv: frozenset[int] = frozenset(),
) -> Callable[[str], bool]:
    """Predicate: whether a tensor of this name may be in the file although no weight uses it.

    `draft_layers_from`: layers from this one on draft tokens, and are not used. `shared_kv`: layers
    that read the keys and values of another; files may hold tensors for their own."""
    pattern = _IGNORABLE[kind]
    heads = set(_TIED_HEADS) if tied else set()

    def drafts(name: str) -> bool:
        layer = _LAYER.match(name)
        return (
            draft_layers_from is not None
            and layer is not None
            and int(layer[2]) >= draft_layers_from
        )

    def unread(name: str) -> bool:
        found = _KEYS_AND_VALUES.search(name)
        return found is not None and int(found[1]) in shared_kv

    return lambda name: (
        bool(pattern.search(name))
        or unread(name)
        or name in heads
        or drafts(name)
        or (draft_layers_from is not None and bool(_DRAFTS.search(name)))
        or (nested and bool(_IGNORABLE_VISION.search(name)))
    )


def _split(name: str) -> tuple[str, str]:
    return (name.removesuffix(".bias"), "bias") if name.endswith(".bias") else (name, "weight")


def _is_fused(names: dict[str, str], part: str) -> bool:
    """Whether several matrices have one name in the file. (Norms have no dot in their names.)"""
    matrices = [
        file_part
        for name, file_part in names.items()
        if "." in name and not name.startswith(("delta.", "attn.gate"))
    ]
    return "." in part and matrices.count(names[part]) > 1
