"""GGUF metadata -> ModelSpec: Gemma 4."""

from __future__ import annotations

import math
from dataclasses import replace

from verbatim.model.config_fields import MAX_COUNT, Fields
from verbatim.model.families.families_gemma4 import kv_layer
from verbatim.model.families.family_parts import MAX_LAYERS
from verbatim.model.families.gguf_parts import Tensors, cap, rope_of, rotary, sliding_layers
from verbatim.model.rope import make_rope
from verbatim.model.spec import LayerSpec, ModelSpec, RopeSpec

_KV, _MLP, _SHARED = "attention.head_count_kv", "feed_forward_length", "attention.shared_kv_layers"


def gemma4(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    """Keys that end in _swa are those of the sliding layers. Values are keys where a full layer has
    no tensor for values."""
    count = f.integer("block_count", high=MAX_LAYERS)
    slides, kv, mlp = (
        sliding_layers(f, count),
        _per_layer(f, _KV, count),
        _per_layer(f, _MLP, count),
    )
    full, short = f.integer("attention.key_length"), f.integer("attention.key_length_swa")
    if f.integer("attention.value_length_swa", short) != short:
        raise f.fail("attention.value_length_swa", f"values must be as long as keys ({short})")
    first = slides.index(True) if True in slides else 0
    plain = f.with_values(**{f"{f.prefix}{_KV}": kv[first], f"{f.prefix}{_MLP}": mlp[0]})
    base = rotary(plain, tensors, requested)
    ropes = _ropes(f, tensors, full, short, base.context)
    own = count - f.integer(_SHARED, 0, low=0, high=count - 1)
    window, experts = f.integer("attention.sliding_window"), base.layers[0].experts
    layers = tuple(
        LayerSpec(
            window=window if s else None,
            rope=ropes[0 if s else 1],
            experts=experts,
            head_dim=short if s else full,
            kv_heads=kv[i],
            kv_layer=kv_layer(f, _SHARED, slides, i, own),
            value_is_key=not s and i < own and f"blk.{i}.attn_v.weight" not in tensors,
            mlp=mlp[i] if mlp[i] != mlp[0] else 0,
        )
        for i, s in enumerate(slides)
    )
    return replace(
        base,
        family="gemma4",
        head_dim=short,
        mlp=mlp[0],
        layers=layers,
        activation="gelu_tanh",
        qk_norm="head",
        value_norm=True,
        post_norms=True,
        embed_scale=math.sqrt(base.hidden),
        attention_scale=1.0,
        logit_softcap=cap(f, "final_logit_softcapping"),
        layer_scale="blk.0.layer_output_scale.weight" in tensors,
        layer_input=f.integer("embedding_length_per_layer_input", 0, low=0),
        experts_beside=experts > 0,
    )


def _per_layer(f: Fields, key: str, count: int) -> list[int]:
    """One number for all layers, or one per layer."""
    raw = f.raw(key)
    numbers = [raw] * count if isinstance(raw, int) else f.items(key)
    valid = all(
        isinstance(n, int) and not isinstance(n, bool) and 0 < n <= MAX_COUNT for n in numbers
    )
    if len(numbers) != count or not valid:
        raise f.fail(key, f"a positive number, or {count} of them, is needed")
    return [int(n) for n in numbers]


def _ropes(f: Fields, tensors: Tensors, full: int, short: int, context: int) -> list[RopeSpec]:
    """Of sliding and of full layers. The divisors in rope_freqs are those of the full layers; huge
    ones stop the pairs that do not rotate."""
    local = make_rope(
        {},
        theta=f.number("rope.freq_base_swa"),
        dim=f.integer("rope.dimension_count_swa", short),
        context=context,
        trained=context,
        file=f.file,
    )
    return [local, rope_of(f, tensors, f.integer("rope.dimension_count", full), context)]
