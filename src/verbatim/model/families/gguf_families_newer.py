"""GGUF metadata -> ModelSpec: the architectures that came after llama, qwen and gemma."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from verbatim.model.config_fields import Fields
from verbatim.model.families.gguf_parts import Tensors, rope_of, rotary, sliding_layers
from verbatim.model.rope import make_rope
from verbatim.model.spec import LayerSpec, ModelSpec

_LAYER_NORM = "layer_norm_epsilon"
_SMOLLM3_PERIOD = 4  # every 4th layer has no rotary positions; no key in the file says so


def _plain(family: str) -> Callable[[Fields, Tensors, int | None], ModelSpec]:
    def spec(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
        return replace(rotary(f, tensors, requested), family=family)

    return spec


def _smollm3(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    base = rotary(f, tensors, requested)
    layers = tuple(
        replace(a, rope=None if (i + 1) % _SMOLLM3_PERIOD == 0 else a.rope)
        for i, a in enumerate(base.layers)
    )
    return replace(base, family="smollm3", layers=layers)


def _scale(f: Fields, key: str, absent: float) -> float:
    """A factor; in GGUF 0 means that it is absent."""
    return absent if f.raw(key, 0) == 0 else f.number(key)


def _granite(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    return replace(
        rotary(f, tensors, requested),
        family="granite",
        embed_scale=_scale(f, "embedding_scale", 1.0),
        attention_scale=_scale(f, "attention.scale", 0.0),
        residual_scale=_scale(f, "residual_scale", 1.0),
        logit_scale=1.0 / f.number("logit_scale"),
    )


def _olmo2(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    """Olmo 2 and 3: the sliding layers of the latter have no rope scaling."""
    base = rotary(f, tensors, requested)
    window = base.layers[0].window
    if window is not None:
        theta = f.number("rope.freq_base_swa", f.number("rope.freq_base"))
        dim = f.integer("rope.dimension_count", base.head_dim)
        local = make_rope(
            {}, theta=theta, dim=dim, context=base.context, trained=base.context, file=f.file
        )
        layers = tuple(
            replace(a, rope=local) if sliding else replace(a, window=None)
            for a, sliding in zip(base.layers, sliding_layers(f, len(base.layers)), strict=True)
        )
        base = replace(base, layers=layers)
    return replace(base, family="olmo2", pre_norms=False, post_norms=True, qk_norm="width")


def _hunyuan(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    return replace(rotary(f, tensors, requested), family="hunyuan-dense", qk_norm="rotated_head")


def _mistral3(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    base = rotary(f, tensors, requested)
    if f.raw("rope.scaling.yarn_log_multiplier", 0):
        magnitude = f.number("rope.scaling.yarn_log_multiplier")
        dim = f.integer("rope.dimension_count", base.head_dim)
        rope = rope_of(f, tensors, dim, base.context, mscale=1.0, mscale_all_dim=magnitude)
        base = replace(base, layers=tuple(replace(a, rope=rope) for a in base.layers))
    beta = _scale(f, "attention.temperature_scale", 0.0)
    length = f.integer("rope.scaling.original_context_length") if beta else 0
    return replace(base, family="mistral3", query_scale_beta=beta, query_scale_length=length)


def _rotary_only_in_windows(f: Fields, spec: ModelSpec) -> ModelSpec:
    """Full layers have neither a window nor rotary positions."""
    sliding = sliding_layers(f, len(spec.layers))
    layers = tuple(a if s else LayerSpec() for a, s in zip(spec.layers, sliding, strict=True))
    return replace(spec, layers=layers)


def _exaone4(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    base = rotary(f, tensors, requested)
    if base.layers[0].window is not None:
        base = _rotary_only_in_windows(f, base)
    return replace(base, family="exaone4", pre_norms=False, post_norms=True, qk_norm="head")


def _layer_norm(f: Fields, tensors: Tensors, requested: int | None, family: str) -> ModelSpec:
    return replace(rotary(f, tensors, requested, eps=_LAYER_NORM), family=family, norm="layer")


def _command_r(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    return replace(
        _layer_norm(f, tensors, requested, "command-r"),
        norm_bias=False,
        parallel=True,
        shared_norm=True,
        logit_scale=f.number("logit_scale"),
    )


def _cohere2(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    f.integer("attention.sliding_window")
    return replace(_rotary_only_in_windows(f, _command_r(f, tensors, requested)), family="cohere2")


def _glm4(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    return replace(rotary(f, tensors, requested), family="glm4", post_norms=True)


def _arcee(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    base = rotary(f, tensors, requested)
    return replace(base, family="arcee", gated=False, activation="relu2")


def _gptneox(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    return replace(
        _layer_norm(f, tensors, requested, "gptneox"),
        gated=False,
        activation="gelu",
        qkv_bias="blk.0.attn_qkv.bias" in tensors,
        parallel=f.boolean("use_parallel_residual", True),
    )


def _starcoder2(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    base = _layer_norm(f, tensors, requested, "starcoder2")
    return replace(base, gated=False, activation="gelu_tanh")


def _stablelm(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    parallel = "blk.0.ffn_norm.weight" not in tensors
    base = _layer_norm(f, tensors, requested, "stablelm")
    return replace(base, parallel=parallel, shared_norm=parallel)


def _falcon(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    return replace(
        _layer_norm(f, tensors, requested, "falcon"),
        qkv_bias="blk.0.attn_qkv.bias" in tensors,
        gated=False,
        activation="gelu",
        parallel=True,
        shared_norm="blk.0.attn_norm_2.weight" not in tensors,
    )


def _glm4moe(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    base = rotary(f, tensors, requested)
    drafts = f.integer("nextn_predict_layers", low=0, high=len(base.layers) - 1)
    dense = f.integer("leading_dense_block_count", low=0)
    layers = base.layers[: len(base.layers) - drafts]
    experts = f.integer("expert_count", high=4096)
    return replace(
        base,
        family="glm4moe",
        qk_norm="head" if "blk.0.attn_q_norm.weight" in tensors else "",
        mlp=f.integer("feed_forward_length") if dense else 0,
        layers=tuple(
            replace(a, experts=experts if i >= dense else 0) for i, a in enumerate(layers)
        ),
        experts_renormalised=f.boolean("expert_weights_norm", False),
        experts_scale=_scale(f, "expert_weights_scale", 1.0),
        router="sigmoid",
        choice_bias=True,
        shared_mlp=base.expert_mlp * f.integer("expert_shared_count", 0, low=0),
    )


def _gpt_oss(f: Fields, tensors: Tensors, requested: int | None) -> ModelSpec:
    base = rotary(f, tensors, requested)
    f.integer("expert_count")
    dim = f.integer("rope.dimension_count", base.head_dim)
    # The model does not round yarn's band to whole pairs; no key in the file says so.
    rope = rope_of(f, tensors, dim, base.context, truncate=False)
    window = f.integer("attention.sliding_window")
    layers = tuple(
        replace(a, window=window if sliding else None, rope=rope)
        for a, sliding in zip(base.layers, sliding_layers(f, len(base.layers)), strict=True)
    )
    return replace(
        base,
        family="gpt-oss",
        layers=layers,
        activation="swiglu_oai",
        sinks=True,
        router_bias=True,
        expert_bias=True,
    )


NEWER_ARCHITECTURES: dict[str, Callable[[Fields, Tensors, int | None], ModelSpec]] = {
    "smollm3": _smollm3,
    "granite": _granite,
    "olmo2": _olmo2,
    "seed_oss": _plain("seed_oss"),
    "hunyuan-dense": _hunyuan,
    "mistral3": _mistral3,
    "exaone4": _exaone4,
    "command-r": _command_r,
    "cohere2": _cohere2,
    "glm4": _glm4,
    "ernie4_5": _plain("ernie4_5"),
    "arcee": _arcee,
    "gptneox": _gptneox,
    "starcoder2": _starcoder2,
    "stablelm": _stablelm,
    "falcon": _falcon,
    "glm4moe": _glm4moe,
    "gpt-oss": _gpt_oss,
}
