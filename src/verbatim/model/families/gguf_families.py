"""GGUF metadata -> ModelSpec, one function per architecture.

In: the metadata of a GGUF file and its tensors, which alone tell the vocabulary size, whether the
head is tied, and the frequency divisors of llama3 and longrope. Out: the architecture as data, the
pooling of embeddings, and warnings to show at load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from verbatim.model.config_fields import Fields
from verbatim.model.families.family_parts import (
    MAX_LAYERS,
    check_spec,
    pick_context,
    unknown_family,
)
from verbatim.model.families.gguf_families_gemma4 import gemma4
from verbatim.model.families.gguf_families_newer import NEWER_ARCHITECTURES
from verbatim.model.families.gguf_families_recurrent import RECURRENT_ARCHITECTURES
from verbatim.model.families.gguf_keys import GENERAL_KEYS, GGUF_KEYS, POOLING, is_metadata
from verbatim.model.families.gguf_parts import (
    Tensors,
    cap,
    rope_of,
    rotary,
    sliding_layers,
    vocab_of,
)
from verbatim.model.keys import check_keys, printable
from verbatim.model.layout import GGUF_KEY_NAMES
from verbatim.model.rope import make_rope
from verbatim.model.spec import LayerSpec, ModelSpec

# Gemma's 27B models scale queries by hidden / heads instead of by head_dim. No key in the file says
# so, so the model is recognised by its number of layers.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


@dataclass(frozen=True, slots=True)
class Header:
    """The model that a GGUF header describes."""

    spec: ModelSpec
    warnings: tuple[str, ...] = ()  # shown to the user at load
    pooling: str = ""  # how `embed` pools a sequence into one vector; empty: not stated


def spec_from_gguf(
    metadata: Mapping[str, Any], tensors: Tensors, *, context: int | None = None, file: str
) -> ModelSpec:
    return read_header(metadata, tensors, context=context, file=file).spec


def read_header(
    metadata: Mapping[str, Any], tensors: Tensors, *, context: int | None = None, file: str
) -> Header:
    """Check every metadata key and build the Header."""
    architecture = Fields(metadata, file).string("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise unknown_family("architecture", architecture, _ARCHITECTURES, metadata, file)
    prefix = f"{architecture}."
    warnings: list[str] = []
    others = {name: value for name, value in metadata.items() if not name.startswith(prefix)}
    general = {name: value for name, value in others.items() if name in GENERAL_KEYS}
    check_keys(general, GENERAL_KEYS, what="GGUF files", file=file)
    warnings += [
        f"{printable(name)} is not known and is not a key of {architecture}; ignored"
        for name in others
        if name not in GENERAL_KEYS and not is_metadata(name)
    ]
    checked = check_keys(
        metadata, GGUF_KEYS[architecture], what=architecture, file=file, prefix=prefix
    )
    warnings += checked.warnings
    fields = Fields(checked.values, file, prefix, warnings)
    spec = check_spec(_ARCHITECTURES[architecture](fields, tensors, context), file, GGUF_KEY_NAMES)
    stated = fields.has("pooling_type")
    kind = fields.integer("pooling_type", 0, low=0, high=max(POOLING))
    return Header(spec, tuple(warnings), POOLING[kind] if stated else "")


def _qwen2(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    return replace(rotary(f, tensors, requested), family="qwen2", qkv_bias=True)


def _qwen3(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    return replace(rotary(f, tensors, requested), family="qwen3", qk_norm="head")


def _qwen3moe(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    f.integer("expert_count")
    return replace(rotary(f, tensors, requested), family="qwen3moe", qk_norm="head")


def _gemma(f: Fields, tensors: Tensors, requested: int | None, family: str) -> ModelSpec:
    base = rotary(f, tensors, requested)
    wide = len(base.layers) == _GEMMA_27B_LAYERS[family]
    return replace(
        base,
        family=family,
        activation="gelu_tanh",
        post_norms=True,
        embed_scale=math.sqrt(base.hidden),
        attention_scale=1.0 / math.sqrt(base.hidden // base.heads if wide else base.head_dim),
        attention_softcap=cap(f, "attn_logit_softcapping"),
        logit_softcap=cap(f, "final_logit_softcapping"),
    )


def _gemma2(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    base = _gemma(f, tensors, requested, "gemma2")
    window = f.integer("attention.sliding_window")
    layers = tuple(
        replace(a, window=window if i % 2 == 0 else None) for i, a in enumerate(base.layers)
    )
    return replace(base, layers=layers)


def _gemma3(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    base = _gemma(f, tensors, requested, "gemma3")
    window, sliding = f.integer("attention.sliding_window"), sliding_layers(f, len(base.layers))
    dim = f.integer("rope.dimension_count", base.head_dim)
    theta = f.number("rope.freq_base_swa")
    local = make_rope(
        {}, theta=theta, dim=dim, context=base.context, trained=base.context, file=f.file
    )
    whole = rope_of(f, tensors, dim, base.context)
    layers = tuple(
        LayerSpec(window=window if s else None, rope=local if s else whole) for s in sliding
    )
    return replace(base, qk_norm="head", layers=layers)


def _phi3(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    return replace(rotary(f, tensors, requested), family="phi3")


def _gpt2(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    hidden, heads, positions = (
        f.integer("embedding_length"),
        f.integer("attention.head_count"),
        f.integer("context_length"),
    )
    if hidden % heads:
        raise f.fail("embedding_length", f"a multiple of the {heads} heads is needed")
    if f.integer("attention.head_count_kv", heads) != heads:
        raise f.fail(
            "attention.head_count_kv", f"gpt2 has as many key heads as query heads ({heads})"
        )
    return ModelSpec(
        family="gpt2",
        vocab=vocab_of(f, tensors),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        mlp=f.integer("feed_forward_length"),
        context=pick_context(requested, positions, positions),
        layers=(LayerSpec(),) * f.integer("block_count", high=MAX_LAYERS),
        norm="layer",
        norm_eps=f.number("attention.layer_norm_epsilon"),
        activation="gelu_tanh",
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        learned_positions=True,
        tied="output.weight" not in tensors,
        trained_positions=positions,
    )


_ARCHITECTURES: dict[str, Callable[[Fields, Tensors, int | None], ModelSpec]] = {
    "llama": rotary,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": gemma4,
    "phi3": _phi3,
    "gpt2": _gpt2,
    **NEWER_ARCHITECTURES,
    **RECURRENT_ARCHITECTURES,
}
