"""Families whose norms are layer norms: config.json -> ModelSpec."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verbatim.model.config_fields import Fields
from verbatim.model.families.family_parts import (
    MAX_LAYERS,
    activation,
    check_one_window,
    layer_windows,
    pick_context,
    rotary,
    window_of,
)
from verbatim.model.families.rope_record import family_record
from verbatim.model.spec import LayerSpec, ModelSpec


def _gpt2(f: Fields, requested: int | None) -> ModelSpec:
    hidden, heads = f.integer("n_embd"), f.integer("n_head")
    positions, layers = f.integer("n_positions"), f.integer("n_layer", high=MAX_LAYERS)
    if hidden % heads:
        raise f.fail("n_embd", f"a multiple of n_head ({heads}) is needed")
    check_one_window(f, layers, None)
    return ModelSpec(
        family="gpt2",
        vocab=f.integer("vocab_size"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        mlp=f.integer("n_inner", 4 * hidden),
        context=pick_context(requested, positions, positions),
        layers=(LayerSpec(),) * layers,
        norm="layer",
        norm_eps=f.number("layer_norm_epsilon"),
        activation=activation(f, "activation_function"),
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        learned_positions=True,
        tied=f.boolean("tie_word_embeddings", True),
        attention_scale=0.0 if f.boolean("scale_attn_weights", True) else 1.0,
        trained_positions=positions,
    )


def _layer_norm(f: Fields, requested: int | None, kind: str, eps: str, **options: Any) -> ModelSpec:
    """A rotary family with layer norms. `eps`: key of the norms' epsilon."""
    base = rotary(
        f.with_values(rms_norm_eps=f.number(eps)), requested, family_record(f, kind), **options
    )
    return replace(base, norm="layer")


def _cohere(f: Fields, requested: int | None) -> ModelSpec:
    base = _layer_norm(f, requested, "cohere", "layer_norm_eps")
    return _parallel_cohere(f, replace(base, family="command-r"))


def _cohere2(f: Fields, requested: int | None) -> ModelSpec:
    """Three sliding layers with rotary positions, then a full layer without."""
    base = _layer_norm(f, requested, "cohere2", "layer_norm_eps", uniform=False)
    pattern = f.integer("sliding_window_pattern")
    windows = layer_windows(f, len(base.layers), lambda i: (i + 1) % pattern != 0, window_of(f))
    layers = tuple(
        replace(a, window=w, rope=None if w is None else a.rope)
        for a, w in zip(base.layers, windows, strict=True)
    )
    return _parallel_cohere(f, replace(base, family="cohere2", layers=layers))


def _parallel_cohere(f: Fields, spec: ModelSpec) -> ModelSpec:
    return replace(
        spec,
        norm_bias=False,
        parallel=True,
        shared_norm=True,
        logit_scale=f.number("logit_scale"),
    )


def _gpt_neox(f: Fields, requested: int | None) -> ModelSpec:
    base = _layer_norm(f, requested, "gpt_neox", "layer_norm_eps")
    return replace(
        _whole_heads(f, base),
        family="gptneox",
        gated=False,
        mlp_bias=True,
        parallel=f.boolean("use_parallel_residual", True),
    )


def _whole_heads(f: Fields, spec: ModelSpec) -> ModelSpec:
    if spec.hidden % spec.heads:
        raise f.fail("hidden_size", f"a multiple of num_attention_heads ({spec.heads}) is needed")
    return spec


def _starcoder2(f: Fields, requested: int | None) -> ModelSpec:
    base = _layer_norm(f, requested, "starcoder2", "norm_epsilon", window=window_of(f))
    bias = f.boolean("use_bias", True)
    return replace(
        base, family="starcoder2", gated=False, qkv_bias=bias, out_bias=bias, mlp_bias=bias
    )


def _stablelm(f: Fields, requested: int | None) -> ModelSpec:
    base = _layer_norm(f, requested, "stablelm", "layer_norm_eps")
    parallel = f.boolean("use_parallel_residual", False)
    return replace(
        _whole_heads(f, base),
        family="stablelm",
        qkv_bias=f.boolean("use_qkv_bias", False),
        parallel=parallel,
        shared_norm=parallel,
    )


def _falcon(f: Fields, requested: int | None) -> ModelSpec:
    new, parallel = f.boolean("new_decoder_architecture", False), f.boolean("parallel_attn", False)
    if new and not parallel:
        raise f.fail("parallel_attn", "new_decoder_architecture needs true")
    norms = f.integer("num_ln_in_parallel_attn", 2 if new else 1, low=1, high=2)
    if norms == 2 and not new:
        raise f.fail("num_ln_in_parallel_attn", "2 needs new_decoder_architecture")
    heads = f.integer("num_attention_heads")
    own = new or not f.boolean("multi_query", False)
    kv_heads = f.integer("num_kv_heads", heads) if own else 1
    if not new and kv_heads not in (1, heads):
        raise f.fail("num_kv_heads", f"{heads} is needed without new_decoder_architecture")
    activation(f, "activation")  # an error names this key, not hidden_act
    sizes = f.with_values(
        num_key_value_heads=kv_heads,
        intermediate_size=f.integer("ffn_hidden_size", 4 * f.integer("hidden_size")),
        hidden_act=f.string("activation"),
    )
    base = _layer_norm(sizes, requested, "falcon", "layer_norm_epsilon")
    bias = f.boolean("bias", False)
    return replace(
        _whole_heads(f, base),
        family="falcon",
        gated=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        parallel=parallel,
        shared_norm=parallel and norms == 1,
    )


LAYER_NORM_FAMILIES = {
    "gpt2": _gpt2,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "gpt_neox": _gpt_neox,
    "starcoder2": _starcoder2,
    "stablelm": _stablelm,
    "falcon": _falcon,
}
