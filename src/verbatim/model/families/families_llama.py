"""Families of the first release whose norms are RMS norms: config.json -> ModelSpec."""

from __future__ import annotations

import math
from dataclasses import replace

from verbatim.model.config_fields import Fields
from verbatim.model.families.family_parts import (
    activation,
    layer_windows,
    rotary,
    window_of,
    with_windows,
)
from verbatim.model.families.rope_record import (
    Record,
    flat_record,
    layer_type_record,
    rope_of,
)
from verbatim.model.spec import LayerSpec, ModelSpec


def _llama(f: Fields, requested: int | None) -> ModelSpec:
    """Llama 2, 3, 3.x and SmolLM2."""
    return rotary(f, requested, flat_record(f))


def _mistral(f: Fields, requested: int | None) -> ModelSpec:
    return rotary(f, requested, flat_record(f), window_of(f))


def _qwen2(f: Fields, requested: int | None) -> ModelSpec:
    """Always biases on q, k and v, never on o. Windows from layer max_window_layers on."""
    base = rotary(f, requested, flat_record(f), uniform=False)
    return replace(_windowed_qwen(f, base), family="qwen2", qkv_bias=True, out_bias=False)


def _qwen3(f: Fields, requested: int | None) -> ModelSpec:
    base = rotary(f, requested, flat_record(f), uniform=False)
    return replace(_windowed_qwen(f, base), family="qwen3", qk_norm="head")


def _windowed_qwen(f: Fields, spec: ModelSpec) -> ModelSpec:
    start = f.integer("max_window_layers", low=0)
    window = window_of(f) if f.boolean("use_sliding_window", False) else None
    windows = layer_windows(
        f, len(spec.layers), lambda i: window is not None and i >= start, window
    )
    return with_windows(spec, windows)


def _gemma2(f: Fields, requested: int | None) -> ModelSpec:
    base = _gemma(f, requested, flat_record(f))
    windows = layer_windows(f, len(base.layers), lambda i: i % 2 == 0, window_of(f))
    return replace(
        with_windows(base, windows),
        family="gemma2",
        attention_softcap=f.cap("attn_logit_softcapping"),
        logit_softcap=f.cap("final_logit_softcapping"),
    )


def _gemma3(f: Fields, requested: int | None) -> ModelSpec:
    """Five sliding layers per full layer. Sliding layers have a separate rope record."""
    full, sliding = gemma3_records(f)
    base = _gemma(f, requested, full)
    local = rope_of(f, sliding, base.head_dim, base.context)
    pattern = f.integer("sliding_window_pattern")
    windows = layer_windows(f, len(base.layers), lambda i: (i + 1) % pattern != 0, window_of(f))
    return replace(
        base,
        family="gemma3",
        qk_norm="head",
        layers=tuple(
            LayerSpec(window=w, rope=a.rope if w is None else local)
            for a, w in zip(base.layers, windows, strict=True)
        ),
        logit_softcap=f.cap("final_logit_softcapping"),
    )


def gemma3_records(f: Fields) -> tuple[Record, Record]:
    return (
        layer_type_record(f, "full_attention", "rope_theta"),
        layer_type_record(f, "sliding_attention", "rope_local_base_freq"),
    )


def _gemma(f: Fields, requested: int | None, record: Record) -> ModelSpec:
    base = rotary(f.with_values(hidden_act=None), requested, record, uniform=False)
    return replace(
        base,
        activation=activation(f, "hidden_activation"),
        norm_offset=1.0,
        post_norms=True,
        embed_scale=math.sqrt(base.hidden),
        attention_scale=1.0 / math.sqrt(f.number("query_pre_attn_scalar")),
    )


def _phi3(f: Fields, requested: int | None) -> ModelSpec:
    return replace(rotary(f, requested, flat_record(f, phi3=True), window_of(f)), family="phi3")


LLAMA_FAMILIES = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
}
