"""Families with recurrent layers: config.json -> ModelSpec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from verbatim.model.config_fields import MAX_COUNT, Fields
from verbatim.model.families.family_parts import check_types, rotary
from verbatim.model.families.rope_record import family_record
from verbatim.model.spec import DeltaSpec, LayerSpec, ModelSpec

MAX_TAPS = 64  # of a convolution: far above any real model


def _mixers(f: Fields, layers: int, other: str, default: Callable[[int], bool]) -> list[bool]:
    """Whether each layer is attention: by `layer_types` if present, else by the family's rule."""
    types = f.items("layer_types")
    if types:
        check_types(f, types, layers, "full_attention", other)
    attention = [t == "full_attention" for t in types] or [default(i) for i in range(layers)]
    if not any(attention):
        key = "layer_types" if types else "full_attn_idxs or full_attention_interval"
        raise f.fail(
            key, f"one of num_hidden_layers {layers} must have full attention (layer_types)"
        )
    return attention


def with_mixers(
    spec: ModelSpec, attention: list[bool], mixer: Literal["conv", "delta"]
) -> ModelSpec:
    """The spec with `mixer` in every layer that is not attention."""
    layers = tuple(
        a if is_attention else LayerSpec(experts=a.experts, mixer=mixer)
        for a, is_attention in zip(spec.layers, attention, strict=True)
    )
    return replace(spec, layers=layers)


def _lfm2(f: Fields, requested: int | None, family: str = "lfm2") -> ModelSpec:
    mlp = _lfm2_mlp(f) if family == "lfm2" else f.integer("intermediate_size")
    inner = f.with_values(rms_norm_eps=f.number("norm_eps"), intermediate_size=mlp)
    base = rotary(inner, requested, family_record(f, "lfm2"), uniform=False)
    everywhere = not f.has("full_attn_idxs")
    indices = f.layer_numbers("full_attn_idxs", len(base.layers))
    attention = _mixers(f, len(base.layers), "conv", lambda i: everywhere or i in indices)
    return with_mixers(
        replace(
            base,
            family=family,
            qk_norm="head",
            conv_kernel=f.integer("conv_L_cache", high=MAX_TAPS),
            conv_bias=f.boolean("conv_bias", False),
        ),
        attention,
        "conv",
    )


def _lfm2_mlp(f: Fields) -> int:
    """The inner width of the MLP: two thirds of the config's number, rounded up."""
    inner = f.integer("intermediate_size")
    if not f.boolean("block_auto_adjust_ff_dim", True):
        return inner
    inner = int(2 * inner / 3)
    step = f.integer("block_multiple_of")
    inner = step * -(-int(f.number("block_ffn_dim_multiplier") * inner) // step)
    if not 0 < inner <= MAX_COUNT:
        raise f.fail("block_ffn_dim_multiplier", f"the inner width of the MLP would be {inner}")
    return inner


def _lfm2_moe(f: Fields, requested: int | None) -> ModelSpec:
    """lfm2 with a sigmoid router, and dense first layers."""
    if not f.has("layer_types"):
        raise f.fail("layer_types", "it is needed: full_attention or conv, layer by layer")
    base, dense = _lfm2(f, requested, "lfm2moe"), f.integer("num_dense_layers", low=0)
    experts = f.integer("num_experts", high=4096)
    return replace(
        base,
        mlp=base.mlp if dense else 0,
        layers=tuple(
            replace(a, experts=experts if i >= dense else 0) for i, a in enumerate(base.layers)
        ),
        experts_used=f.integer("num_experts_per_tok"),
        expert_mlp=f.integer("moe_intermediate_size"),
        experts_renormalised=f.boolean("norm_topk_prob", True),
        experts_scale=f.number("routed_scaling_factor"),
        router="sigmoid",
        choice_bias=f.boolean("use_expert_bias", True),
    )


def _qwen3_next(f: Fields, requested: int | None) -> ModelSpec:
    """Gated delta nets, gated attention, and mixtures with a gated shared MLP."""
    base = _qwen3_5(f, requested, "qwen3next")
    experts = f.integer("num_experts", low=0, high=4096)
    step = f.integer("decoder_sparse_step")
    dense = f.layer_numbers("mlp_only_layers", len(base.layers))
    sparse = [
        experts > 0 and i not in dense and (i + 1) % step == 0 for i in range(len(base.layers))
    ]
    return _with_experts(f, base, experts, sparse)


def _qwen3_5_moe(f: Fields, requested: int | None) -> ModelSpec:
    """qwen3_5 with the mixtures of qwen3_next in every layer."""
    inner = f.with_values(intermediate_size=f.integer("moe_intermediate_size"))
    base = _qwen3_5(inner, requested, "qwen35moe")
    experts = f.integer("num_experts", high=4096)
    return _with_experts(inner, base, experts, [True] * len(base.layers))


def _with_experts(f: Fields, base: ModelSpec, experts: int, sparse: list[bool]) -> ModelSpec:
    if not any(sparse):
        return base
    return replace(
        base,
        mlp=0 if all(sparse) else base.mlp,
        layers=tuple(
            replace(a, experts=experts if s else 0)
            for a, s in zip(base.layers, sparse, strict=True)
        ),
        experts_used=f.integer("num_experts_per_tok"),
        expert_mlp=f.integer("moe_intermediate_size"),
        experts_renormalised=f.boolean("norm_topk_prob", True),
        shared_mlp=f.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _qwen3_5(f: Fields, requested: int | None, family: str = "qwen35") -> ModelSpec:
    kind = "qwen3_next" if family == "qwen3next" else "qwen3_5_text"
    base = rotary(f, requested, family_record(f, kind), uniform=False)
    if base.activation != "silu":  # the convolution of a delta net uses the same activation
        raise f.fail("hidden_act", "silu is needed: delta nets are implemented with silu only")
    interval = f.integer("full_attention_interval", 4)
    attention = _mixers(f, len(base.layers), "linear_attention", lambda i: (i + 1) % interval == 0)
    base = replace(
        base,
        family=family,
        norm_offset=1.0,
        qk_norm="head",
        attention_gate=True,
        conv_kernel=f.integer("linear_conv_kernel_dim", high=MAX_TAPS),
        delta=_delta(f),
    )
    return with_mixers(base, attention, "delta")


def _delta(f: Fields) -> DeltaSpec:
    heads, keys = f.integer("linear_num_value_heads"), f.integer("linear_num_key_heads")
    if heads % keys:
        raise f.fail("linear_num_value_heads", f"a multiple of the {keys} key heads is needed")
    dims = f.integer("linear_key_head_dim"), f.integer("linear_value_head_dim")
    return DeltaSpec(keys, heads, *dims)


RECURRENT_FAMILIES = {
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5_moe,
}
