"""Mixtures of experts: config.json -> ModelSpec."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.config_fields import Fields
from verbatim.model.families.family_parts import layer_windows, rotary, window_of, with_windows
from verbatim.model.families.rope_record import family_record, flat_record
from verbatim.model.spec import ModelSpec


def _mixtral(f: Fields, requested: int | None) -> ModelSpec:
    base = rotary(f, requested, flat_record(f), window_of(f))
    experts = f.integer("num_local_experts", high=4096)
    return replace(
        base,
        family="mixtral",
        mlp=0,
        layers=tuple(replace(layer, experts=experts) for layer in base.layers),
        experts_used=f.integer("num_experts_per_tok"),
        expert_mlp=base.mlp,
    )


def _qwen3_moe(f: Fields, requested: int | None) -> ModelSpec:
    window = window_of(f) if f.boolean("use_sliding_window", False) else None
    if window is not None and f.integer("max_window_layers", 0, low=0):
        raise f.fail(
            "max_window_layers",
            "only 0 is supported with use_sliding_window: every layer has the window",
        )
    base = replace(rotary(f, requested, flat_record(f), window), family="qwen3moe", qk_norm="head")
    experts = f.integer("num_experts", high=4096)
    step = f.integer("decoder_sparse_step")
    dense = f.layer_numbers("mlp_only_layers", len(base.layers))
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(len(base.layers))]
    return replace(
        base,
        mlp=0 if all(sparse) else base.mlp,
        layers=tuple(
            replace(a, experts=experts if s else 0)
            for a, s in zip(base.layers, sparse, strict=True)
        ),
        experts_used=f.integer("num_experts_per_tok"),
        expert_mlp=f.integer("moe_intermediate_size"),
        experts_renormalised=f.boolean("norm_topk_prob", False),
    )


def _glm4_moe(f: Fields, requested: int | None) -> ModelSpec:
    """Sigmoid router, a shared MLP beside the experts, and dense first layers."""
    base = rotary(f, requested, family_record(f, "glm4_moe"))
    experts, dense = (
        f.integer("n_routed_experts", high=4096),
        f.integer("first_k_dense_replace", low=0),
    )
    inner = f.integer("moe_intermediate_size")
    return replace(
        base,
        family="glm4moe",
        out_bias=False,
        qk_norm="head" if f.boolean("use_qk_norm", False) else "",
        mlp=base.mlp if dense else 0,
        layers=tuple(
            replace(a, experts=experts if i >= dense else 0) for i, a in enumerate(base.layers)
        ),
        experts_used=f.integer("num_experts_per_tok"),
        expert_mlp=inner,
        experts_renormalised=f.boolean("norm_topk_prob", True),
        experts_scale=f.number("routed_scaling_factor"),
        router="sigmoid",
        choice_bias=True,
        shared_mlp=inner * f.integer("n_shared_experts", low=0),
    )


def _gpt_oss(f: Fields, requested: int | None) -> ModelSpec:
    """Attention sinks, a clamped activation, biases everywhere."""
    base = rotary(
        f.with_values(hidden_act=None), requested, family_record(f, "gpt_oss"), uniform=False
    )
    windows = layer_windows(f, len(base.layers), lambda i: i % 2 == 0, window_of(f))
    experts = f.integer("num_local_experts", high=4096)
    return with_windows(
        replace(
            base,
            family="gpt-oss",
            mlp=0,
            mlp_bias=False,
            layers=tuple(replace(layer, experts=experts) for layer in base.layers),
            activation="swiglu_oai",
            sinks=True,
            experts_used=f.integer("num_experts_per_tok"),
            expert_mlp=base.mlp,
            router_bias=True,
            expert_bias=True,
        ),
        windows,
    )


MOE_FAMILIES = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
}
