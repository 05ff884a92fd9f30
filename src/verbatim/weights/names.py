"""Map internal weight names to the tensor names of safetensors and GGUF files.

In: a family and an internal name (model/spec.py). Out: a Source: the tensors of the file that hold
the weight, and which rows of them. No bytes are read here; model/load.py applies the Source.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

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
HF_LAYER = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "phi3": _PHI3,
    "gpt2": _GPT2,
    "mixtral": _MIXTRAL,
    "qwen3moe": _LLAMA,
}
_HF_TOP = {"embed": "embed_tokens", "final_norm": "norm"}
_HF_TOP_GPT2 = {"embed": "wte", "positions": "wpe", "final_norm": "ln_f"}

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
}
_GGUF_FUSED_QKV = {"attn.q": "attn_qkv", "attn.k": "attn_qkv", "attn.v": "attn_qkv"}
GGUF_LAYER = {
    "llama": _GGUF,
    "mixtral": _GGUF,
    "qwen2": _GGUF,
    "qwen3": _GGUF,
    "qwen3moe": _GGUF,
    "gemma2": _GGUF,
    "gemma3": _GGUF,
    "phi3": _GGUF | _GGUF_FUSED_QKV | {"mlp.gate": "ffn_up"},
    "gpt2": _GGUF | _GGUF_FUSED_QKV,
}
_GGUF_TOP = {
    "embed": "token_embd",
    "positions": "position_embd",
    "final_norm": "output_norm",
    "head": "output",
}

# Tensors in a file that the engine ignores: buffers that it computes itself.
_IGNORABLE = {
    "hf": re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.(bias|masked_bias))$"),
    "gguf": re.compile(
        r"^(rope_freqs|rope_factors_long|rope_factors_short)\.weight$|^blk\.\d+\.attn\.rot_embd$"
    ),
}
_IGNORABLE_VISION = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector|embed_vision)\.")

HF_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "transformer.", "")


@dataclass(frozen=True, slots=True)
class Source:
    """Location of one weight. Several names are the experts of a layer, to be stacked in order."""

    names: tuple[str, ...]
    part: str = ""  # q, k, v, gate, up: those rows of a fused matrix; empty: all
    transpose: bool = False  # gpt2's Conv1D stores [in, out]
    permuted: bool = False  # GGUF's llama interleaves the two halves of each rotated head


def hf_source(family: str, prefix: str, name: str, experts: int) -> Source:
    """Location of a weight in a safetensors directory of this family."""
    stem, suffix = _split(name)
    if stem == "head":
        # inside a multi-modal model, the head is a sibling of the language model
        top = prefix.removesuffix("model.") if prefix.startswith("language_model.") else ""
        return Source((f"{top}lm_head.weight",))
    if not stem.startswith("layers."):
        names = _HF_TOP_GPT2 if family == "gpt2" else _HF_TOP
        return Source((f"{prefix}{names[stem]}.{suffix}",))
    _, index, part = stem.split(".", 2)
    file_part = HF_LAYER[family][part]
    stack = "h" if family == "gpt2" else "layers"
    path = f"{prefix}{stack}.{index}.{file_part}.{suffix}"
    if "{e}" in path:
        return Source(tuple(path.replace("{e}", str(e)) for e in range(experts)))
    return Source(
        (path,),
        part=part.rsplit(".", 1)[-1] if _is_fused(HF_LAYER[family], part) else "",
        transpose=family == "gpt2" and suffix == "weight" and "." in part,
    )


def gguf_source(architecture: str, name: str) -> Source:
    """Location of a weight in a GGUF file of this architecture."""
    stem, suffix = _split(name)
    if not stem.startswith("layers."):
        return Source((f"{_GGUF_TOP[stem]}.{suffix}",))
    _, index, part = stem.split(".", 2)
    names = GGUF_LAYER[architecture]
    return Source(
        (f"blk.{index}.{names[part]}.{suffix}",),
        part=part.rsplit(".", 1)[-1] if _is_fused(names, part) else "",
        permuted=architecture in ("llama", "mixtral") and part in ("attn.q", "attn.k"),
    )


def find_prefix(names: Iterable[str], family: str) -> str | None:
    """Prefix of all names, mostly "model."; None if the file has no embedding."""
    present = set(names)
    embed = (_HF_TOP_GPT2 if family == "gpt2" else _HF_TOP)["embed"]
    return next((p for p in HF_PREFIXES if f"{p}{embed}.weight" in present), None)


def ignorable(kind: str, *, tied: bool, nested: bool) -> Callable[[str], bool]:
    """Predicate: whether a tensor of this name may be in the file although no weight uses it."""
    pattern = _IGNORABLE[kind]
    heads = {"lm_head.weight", "language_model.lm_head.weight", "output.weight"} if tied else set()
    return lambda name: (
        bool(pattern.search(name))
        or name in heads
        or (nested and bool(_IGNORABLE_VISION.search(name)))
    )


def _split(name: str) -> tuple[str, str]:
    return (name.removesuffix(".bias"), "bias") if name.endswith(".bias") else (name, "weight")


def _is_fused(names: dict[str, str], part: str) -> bool:
    return sum(file_part == names[part] for file_part in names.values()) > 1
