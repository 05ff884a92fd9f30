"""Gemma 4 (text): config.json -> ModelSpec.

Full and sliding layers differ in head size, key heads and rope. The last layers read the keys and
values of an earlier layer, and every layer may have an input of its own per token.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from verbatim.model.config_fields import MAX_COUNT, Fields, short
from verbatim.model.families.family_parts import activation, layer_types, rotary
from verbatim.model.families.rope_record import Record, layer_type_record, rope_of
from verbatim.model.spec import LayerSpec, ModelSpec

_PERIOD = 6  # every sixth layer is full attention, where layer_types is absent
_THETA = 10000.0  # of a rope record without one
_HEADS = ("head_dim", "num_key_value_heads")  # what per_layer_config may change


def gemma4_records(f: Fields) -> tuple[Record, Record]:
    """The rope records of full and of sliding layers."""
    if not f.has("rope_parameters"):
        f = f.with_values(
            rope_parameters={
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1e6,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        )
    full = layer_type_record(f, "full_attention", _THETA)
    return full, layer_type_record(f, "sliding_attention", _THETA)


def gemma4(f: Fields, requested: int | None) -> ModelSpec:
    full, sliding = gemma4_records(f)
    inner = f.with_values(hidden_act=None, hidden_activation=None)
    plain: Record = {"rope_type": "default", "rope_theta": full["rope_theta"]}
    base = rotary(inner, requested, plain, uniform=False)
    count = len(base.layers)
    slides = _sliding(f, count)
    heads = _layer_heads(f, slides)
    shared = f.integer("num_kv_shared_layers", low=0, high=count - 1)
    ropes = {
        s: rope_of(f, sliding if s else full, heads[slides.index(s)][0], base.context)
        for s in set(slides)
    }
    window, same = f.integer("sliding_window"), f.boolean("attention_k_eq_v", False)
    wide = shared and f.boolean("use_double_wide_mlp", False)
    layers = tuple(
        LayerSpec(
            window=window if s else None,
            rope=ropes[s],
            head_dim=heads[i][0],
            kv_heads=heads[i][1],
            kv_layer=kv_layer(f, "num_kv_shared_layers", slides, i, count - shared),
            value_is_key=same and not s and i < count - shared,
            mlp=2 * base.mlp if wide and i >= count - shared else 0,
        )
        for i, s in enumerate(slides)
    )
    spec = replace(
        base,
        family="gemma4",
        layers=layers,
        activation=activation(f, "hidden_activation"),
        qk_norm="head",
        value_norm=True,
        post_norms=True,
        embed_scale=math.sqrt(base.hidden),
        attention_scale=1.0,
        logit_softcap=f.cap("final_logit_softcapping"),
        layer_scale=True,
    )
    spec = replace(spec, layer_input=_layer_input(f, spec))
    return _with_experts(f, spec) if f.boolean("enable_moe_block", False) else spec


def _with_experts(f: Fields, spec: ModelSpec) -> ModelSpec:
    """Experts beside the MLP of every layer."""
    experts = f.integer("num_experts", high=4096)
    return replace(
        spec,
        layers=tuple(replace(a, experts=experts) for a in spec.layers),
        experts_beside=True,
        experts_used=f.integer("top_k_experts"),
        expert_mlp=f.integer("moe_intermediate_size"),
    )


def _sliding(f: Fields, count: int) -> list[bool]:
    """Which layers are sliding. The last layer is full attention, as in transformers."""
    sliding = layer_types(f, count) or [(i + 1) % _PERIOD != 0 for i in range(count)]
    if sliding[-1] and f.has("layer_types"):
        f.warn("layer_types: the last layer is computed as full_attention, as in transformers")
    return [*sliding[:-1], False]


def _layer_heads(f: Fields, slides: list[bool]) -> list[tuple[int, int]]:
    """Head size and key heads of each layer. They are equal in all layers of one type."""
    plain = (
        f.integer("head_dim"),
        f.integer("num_key_value_heads", f.integer("num_attention_heads")),
    )
    if f.values.get("per_layer_config", plain) is None:
        raise f.fail("per_layer_config", "remove the key for the heads of the layer types")
    if f.has("per_layer_config"):
        entries = f.by_layer("per_layer_config", len(slides))
        found = [_own_heads(f, i, entries.get(i, {}), plain) for i in range(len(slides))]
        for kind in (True, False):
            if len({h for h, s in zip(found, slides, strict=True) if s is kind}) > 1:
                raise f.fail("per_layer_config", "layers of one type need equal heads")
    else:
        kv = plain[1]
        if f.boolean("attention_k_eq_v", False) and f.has("num_global_key_value_heads"):
            kv = f.integer("num_global_key_value_heads")
        found = [plain if s else (f.integer("global_head_dim"), kv) for s in slides]
    queries = f.integer("num_attention_heads")
    if any(queries % kv for _, kv in found):
        raise f.fail("num_attention_heads", "a multiple of every layer's key heads is needed")
    return found


def _own_heads(f: Fields, layer: int, entry: Any, plain: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(entry, dict) or any(key not in _HEADS for key in entry):
        raise f.fail("per_layer_config", f"only {' and '.join(_HEADS)} of a layer may differ")
    values = [entry.get(key, default) for key, default in zip(_HEADS, plain, strict=True)]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_COUNT:
            raise f.fail("per_layer_config", f"layer {layer}: {short(value)} is not a count")
    return values[0], values[1]


def kv_layer(f: Fields, key: str, slides: list[bool], layer: int, own: int) -> int | None:
    """The layer whose keys and values this layer reads: the last of its type among the first `own`;
    None: its own. `key`: the file's name of the number of layers that share."""
    if layer < own:
        return None
    sources = [i for i in range(own) if slides[i] is slides[layer]]
    if not sources:
        raise f.fail(key, f"layer {layer} has no earlier layer of its type")
    return sources[-1]


def _layer_input(f: Fields, spec: ModelSpec) -> int:
    width = f.integer("hidden_size_per_layer_input", low=0)
    if width and f.integer("vocab_size_per_layer_input") != spec.vocab:
        raise f.fail("vocab_size_per_layer_input", f"it must be vocab_size ({spec.vocab})")
    return width
