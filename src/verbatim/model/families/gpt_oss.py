"""gpt-oss: mixtures with a clamped activation, attention sinks, biases everywhere."""

from __future__ import annotations

from verbatim.model.families.common import gguf_rows, header, parts, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, RopeRules, tiny
from verbatim.model.families.common.gguf_fields import GgufFields, Values, facts
from verbatim.model.keys import Table, alias, followed, must_equal, no_effect
from verbatim.model.spec import ModelSpec


def _spec(c: Config) -> ModelSpec:
    base = parts.rotary(c.with_values(hidden_act=None), uniform=False)
    return parts.with_experts(
        c,
        parts.with_windows(base, parts.period_windows(c, base, 2)),
        "num_local_experts",
        inner="intermediate_size",
        mlp_bias=c.fact("mlp_bias", False),
        activation="swiglu_oai",
        sinks=True,
        router_bias=True,
        expert_bias=True,
    )


def _implied(h: GgufFields) -> Values:
    """The model does not round yarn's band to whole pairs; no key of the header says so."""
    record = header.rope_record(h, truncate=False)
    return {"intermediate_size": header.expert_width(h), **facts(rope=record)}


_KEYS: Table = {
    "head_dim": rows.HEAD_DIM,
    "rope_parameters": followed(
        "rotary positions; see the rope table. Absent: yarn, factor 32, trained length 4096, "
        "truncate false"
    ),
    "hidden_act": no_effect("the activation is a clamped SwiGLU, as in transformers"),
    "attention_bias": rows.ATTENTION_BIAS,
    "mlp_bias": no_effect("router and experts always have biases, as in transformers"),
    "intermediate_size": followed("inner width of an expert"),
    "sliding_window": rows.SLIDING,
    "layer_types": followed(
        "window or none, layer by layer; absent: every other layer, from the first on"
    ),
    "num_local_experts": rows.EXPERTS,
    "num_experts": alias("num_local_experts"),
    "num_experts_per_tok": rows.EXPERTS_USED,
    "experts_per_token": no_effect("older name; `num_experts_per_tok` decides"),
    "swiglu_limit": must_equal(7.0, 7, note="the activation clamps at 7"),
    "swiglu_alpha": must_equal(1.702, note="the sigmoid's factor is 1.702"),
    "initial_context_length": no_effect("the rope record decides"),
}
_LAYER = {
    "attn.sinks": "self_attn.sinks",
    "moe.router": "mlp.router",
    **tensors.each("moe.*", "mlp.experts.gate_up_proj", "gate up"),
    "moe.down": "mlp.experts.down_proj",
}
_TINY = tiny(
    num_experts_per_tok=2,
    num_hidden_layers=2,
    intermediate_size=32,
    head_dim=16,
    num_local_experts=4,
    sliding_window=12,
)
_ABSENT = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
FAMILY = Family(
    model_type="gpt_oss",
    name="gpt-oss",
    models="gpt-oss (float weights)",
    keys=rows.rotary_keys(rows.ROUTER, _KEYS),
    spec=_spec,
    rope=RopeRules(absent=_ABSENT),
    names=tensors.hf_names(_LAYER, stacked=True),
    gguf=Gguf(
        "gpt-oss",
        keys={
            **gguf_rows.GGUF_ROTARY,
            **gguf_rows.gguf_experts("num_local_experts"),
            **gguf_rows.pattern(2, zero=False),
            "expert_gating_func": must_equal(0, 1, 3, note="softmax"),
        },
        names=tensors.gguf_names(tensors.GGUF_MLP_NORM),
        implied=_implied,
    ),
    tiny={"gpt_oss": _TINY},
)
