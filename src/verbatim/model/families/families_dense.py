"""Dense families with RMS norms that came after llama, qwen and gemma: config.json -> ModelSpec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from verbatim.base.errors import ModelError
from verbatim.model.config_fields import Fields
from verbatim.model.families.family_parts import layer_windows, rotary, window_of, with_windows
from verbatim.model.families.rope_record import (
    Record,
    family_record,
    layer_type_record,
    rope_of,
)
from verbatim.model.spec import LayerSpec, ModelSpec

_OLMO3_THETA = 500000.0


def _smollm3(f: Fields, requested: int | None) -> ModelSpec:
    base = rotary(f, requested, family_record(f, "smollm3"), uniform=False)
    count, interval = len(base.layers), f.integer("no_rope_layer_interval")
    rotated = f.items("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(count)]
    if len(rotated) < count or any(r not in (0, 1) for r in rotated):
        raise f.fail("no_rope_layers", f"{count} entries are needed, one per layer, each 0 or 1")
    sliding = f.boolean("use_sliding_window", False)
    window = window_of(f)
    windows = layer_windows(
        f, count, lambda i: sliding and window is not None and not rotated[i], window
    )
    if any(windows) and not sliding:
        raise f.fail("layer_types", "sliding_attention needs use_sliding_window")
    layers = tuple(
        replace(a, rope=a.rope if r else None)
        for a, r in zip(base.layers, rotated[:count], strict=True)
    )
    return with_windows(replace(base, family="smollm3", layers=layers), windows)


def _granite(f: Fields, requested: int | None) -> ModelSpec:
    return replace(
        rotary(f, requested, family_record(f, "granite")),
        family="granite",
        embed_scale=f.number("embedding_multiplier", 1.0),
        attention_scale=f.number("attention_multiplier", 1.0),
        residual_scale=f.number("residual_multiplier", 1.0),
        logit_scale=1.0 / f.number("logits_scaling", 1.0),
    )


def _granite_hybrid(f: Fields, requested: int | None) -> ModelSpec:
    """The dense models of Granite 4, whose configs are those of hybrids without Mamba layers."""
    mamba = sum(t in ("mamba", "linear_attention") for t in f.items("layer_types"))
    if mamba:
        raise f.fail("layer_types", f"{mamba} Mamba layers, which are not supported")
    if f.integer("num_local_experts", low=0):
        raise f.fail("num_local_experts", "only 0 is supported")
    if not f.has("layer_types"):
        raise f.fail(
            "layer_types", "without it all layers are Mamba layers, which are not supported"
        )
    kind = f.string("position_embedding_type", "nope")
    if kind not in ("rope", "nope"):
        raise f.fail("position_embedding_type", "rope or nope is needed")
    dense = f.with_values(intermediate_size=f.integer("shared_intermediate_size"))
    spec = replace(_granite(dense, requested), family="granitehybrid")
    return spec if kind == "rope" else replace(spec, layers=(LayerSpec(),) * len(spec.layers))


def _olmo2(f: Fields, requested: int | None) -> ModelSpec:
    return _olmo(rotary(f, requested, family_record(f, "olmo2")))


def _olmo(spec: ModelSpec) -> ModelSpec:
    """No norm before attention and MLP, but one after each; queries and keys are normed whole."""
    return replace(spec, family="olmo2", pre_norms=False, post_norms=True, qk_norm="width")


def _olmo3(f: Fields, requested: int | None) -> ModelSpec:
    full, sliding = olmo3_records(f)
    base = rotary(f, requested, full, uniform=False)
    local = rope_of(f, sliding, base.head_dim, base.context)
    windows = layer_windows(f, len(base.layers), lambda i: (i + 1) % 4 != 0, window_of(f))
    layers = tuple(
        replace(a, window=w, rope=a.rope if w is None else local)
        for a, w in zip(base.layers, windows, strict=True)
    )
    return _olmo(replace(base, layers=layers))


def olmo3_records(f: Fields) -> tuple[Record, Record]:
    """transformers gives the config's rope_theta to full_attention only."""
    theta = f.number("rope_theta", _OLMO3_THETA)
    local = f.mapping("rope_parameters").get("sliding_attention") or {}
    own = isinstance(local, dict) and local.get("rope_theta")
    if theta != _OLMO3_THETA and not own:
        raise f.fail(
            "rope_theta",
            f"only {_OLMO3_THETA} is supported, unless rope_parameters.sliding_attention has its "
            "own rope_theta",
        )
    return (
        layer_type_record(f, "full_attention", "rope_theta"),
        layer_type_record(f, "sliding_attention", _OLMO3_THETA),
    )


def _seed_oss(f: Fields, requested: int | None) -> ModelSpec:
    base = rotary(f, requested, family_record(f, "seed_oss"))
    return replace(base, family="seed_oss", out_bias=f.boolean("attention_out_bias", False))


def _hunyuan(f: Fields, requested: int | None) -> ModelSpec:
    base = rotary(f, requested, family_record(f, "hunyuan_v1_dense"))
    return replace(base, family="hunyuan-dense", qk_norm="rotated_head")


def _ministral3(f: Fields, requested: int | None) -> ModelSpec:
    record = family_record(f, "ministral3")
    keys = ("llama_4_scaling_beta", "original_max_position_embeddings")
    for key in keys:
        if not isinstance(record.get(key), (int, float)) or isinstance(record[key], bool):
            raise ModelError(
                f"rope_parameters.{key} is {record.get(key)!r} with rope_type "
                f"{record['rope_type']}: ministral3 needs the number",
                file=f.file,
            )
    length = Fields(record, f.file).integer(keys[1])
    return replace(
        rotary(f, requested, record, window_of(f)),
        family="mistral3",
        query_scale_beta=float(record[keys[0]]),
        query_scale_length=length,
    )


def _exaone4(f: Fields, requested: int | None) -> ModelSpec:
    """Olmo's norms, each head normed; with windows, full layers have no rotary positions."""
    base = rotary(f, requested, family_record(f, "exaone4"), uniform=False)
    window = window_of(f)
    windows = layer_windows(f, len(base.layers), _exaone4_pattern(f), window)
    layers = tuple(
        replace(a, window=w, rope=a.rope if w is not None or window is None else None)
        for a, w in zip(base.layers, windows, strict=True)
    )
    return replace(
        base, family="exaone4", pre_norms=False, post_norms=True, qk_norm="head", layers=layers
    )


def _exaone4_pattern(f: Fields) -> Callable[[int], bool]:
    """Whether layer i is sliding: a period, or a string such as LLLG (local, global)."""
    pattern = f.raw("sliding_window_pattern", None)
    if isinstance(pattern, str) and pattern and set(pattern) <= set("LG"):
        return lambda i: pattern[i % len(pattern)] == "L"
    period = 1 if f.has("layer_types") else f.integer("sliding_window_pattern")
    return lambda i: (i + 1) % period != 0


def _glm4(f: Fields, requested: int | None) -> ModelSpec:
    base = rotary(f, requested, family_record(f, "glm4"))
    return replace(base, family="glm4", out_bias=False, post_norms=True)


def _ernie4_5(f: Fields, requested: int | None) -> ModelSpec:
    base = rotary(f, requested, family_record(f, "ernie4_5"))
    bias = f.boolean("use_bias", False)
    return replace(base, family="ernie4_5", qkv_bias=bias, out_bias=bias, mlp_bias=bias)


def _arcee(f: Fields, requested: int | None) -> ModelSpec:
    base = rotary(f, requested, family_record(f, "arcee"))
    return replace(base, family="arcee", gated=False)


DENSE_FAMILIES = {
    "smollm3": _smollm3,
    "granite": _granite,
    "granitemoehybrid": _granite_hybrid,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "seed_oss": _seed_oss,
    "hunyuan_v1_dense": _hunyuan,
    "ministral3": _ministral3,
    "exaone4": _exaone4,
    "glm4": _glm4,
    "ernie4_5": _ernie4_5,
    "arcee": _arcee,
}
