"""Map internal weight names to the tensor names of safetensors and GGUF files.

In: a family and an internal name (model/spec.py). Out: a Source: the tensors of the file that hold
the weight, and which rows of them. No bytes are read here; model/loading/load.py applies it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from verbatim.model.families import config_names, gguf_names
from verbatim.model.families.common.tensors import BARE, GGUF_TOP, HF_PREFIXES, HF_TOP, Names

FUSED_EXPERTS, FUSED_EXPERTS_GGUF = "gate_up_proj", "ffn_gate_up_exps"  # gate and up in one stack

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
    squeeze: bool = False  # drop the dimension of size 1 of a convolution's kernel or a bias
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
    names = config_names(family)
    top = {**HF_TOP, **names.top}
    if stem == "head":
        # inside a multi-modal model, the head is a sibling of the language model
        outer = prefix.removesuffix("model.") if prefix.startswith("language_model.") else ""
        return Source((f"{outer}{top['head']}.weight",))
    if not stem.startswith("layers."):
        return Source((f"{prefix}{top[stem]}.{suffix}",))
    _, index, part = stem.split(".", 2)
    layer = {**names.layer, **(names.two_norms if two_norms else {})}
    path = f"{prefix}{top['stack']}.{index}.{layer[part]}"
    if names.stacked and part in ("moe.gate", "moe.up", "moe.down"):
        return _stacked_experts(path, part, suffix)
    if part not in BARE:
        path = f"{path}.{suffix}"
    if part == "router_norm":
        return Source((path,), by_width=True)
    if "{e}" in path and fused_experts:
        stack = path.split(".{e}.")[0]
        return _expert_stack(part, f"{stack}.{FUSED_EXPERTS}", f"{stack}.down_proj")
    if "{e}" in path:
        return Source(tuple(path.replace("{e}", str(e)) for e in range(experts)))
    if source := _recurrent(layer, path, part):
        return replace(source, negative_exp=part == "delta.decay")
    return replace(
        _plain(names, layer, path, part),
        transpose=names.transposed and suffix == "weight" and "." in part,
        grouped=names.grouped,
    )


def _plain(names: Names, layer: Mapping[str, str], path: str, part: str) -> Source:
    return Source(
        (path,),
        part=part.rsplit(".", 1)[-1] if _is_fused(layer, part) else "",
        permuted=names.interleaved and part in ("attn.q", "attn.k"),
        squeeze=part == "moe.choice_bias",  # [1, experts] in some families
    )


def _recurrent(names: Mapping[str, str], path: str, part: str) -> Source | None:
    """Location of a weight that only recurrent families have; None for all other weights."""
    if part.endswith(".kernel"):
        return Source((path,), squeeze=True)
    if part in ("attn.q", "attn.gate") and "attn.gate" in names:
        return Source((path,), part=part.removeprefix("attn."), interleaved="q_gate")
    if part.startswith("delta."):
        kind: Literal["", "qkvz", "ba"] = ""
        if names[part].endswith("qkvz"):
            kind = "qkvz"
        elif names[part].endswith("ba"):
            kind = "ba"
        return Source((path,), part=part.removeprefix("delta.") if kind else "", interleaved=kind)
    return None


def _stacked_experts(path: str, part: str, suffix: str) -> Source:
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
    names = gguf_names(architecture)
    if not stem.startswith("layers."):
        top = {**GGUF_TOP, **names.top}
        return Source((f"{top[stem]}.{suffix}",))
    _, index, part = stem.split(".", 2)
    layer = {**names.layer, **(names.two_norms if two_norms else {})}
    if part in ("moe.choice_bias", "delta.dt"):
        suffix = "bias"
    if part in ("router_norm", "moe.scales"):
        return Source((f"blk.{index}.{layer[part]}",), by_width=part == "router_norm")
    if fused_experts and part in ("moe.gate", "moe.up"):
        return _expert_stack(part, f"blk.{index}.{FUSED_EXPERTS_GGUF}.weight", "")
    path = f"blk.{index}.{layer[part]}" + ("" if part == "delta.decay" else f".{suffix}")
    return _recurrent(layer, path, part) or _plain(names, layer, path, part)


def find_prefix(names: Iterable[str], family: str) -> str | None:
    """Prefix of all names, mostly "model."; None if the file has no embedding."""
    present = set(names)
    embed = {**HF_TOP, **config_names(family).top}["embed"]
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


def _is_fused(names: Mapping[str, str], part: str) -> bool:
    """Whether several matrices have one name in the file. (Norms have no dot in their names.)"""
    matrices = [
        file_part
        for name, file_part in names.items()
        if "." in name and not name.startswith(("delta.", "attn.gate"))
    ]
    return "." in part and matrices.count(names[part]) > 1
