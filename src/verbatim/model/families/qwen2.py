"""Qwen 2 and 2.5: biases on q, k and v; windows from layer max_window_layers on."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families.common import header, parts, rows
from verbatim.model.families.common.family import Config, Family, Gguf, tiny
from verbatim.model.keys import Table, no_effect
from verbatim.model.spec import ModelSpec


def windowed(c: Config, spec: ModelSpec) -> ModelSpec:
    """The windows of qwen2 and qwen3."""
    start = c.integer("max_window_layers", low=0)
    window = parts.window_of(c) if c.boolean("use_sliding_window", False) else None
    windows = parts.layer_windows(
        c, len(spec.layers), lambda i: window is not None and i >= start, window
    )
    return parts.with_windows(spec, windows)


def _spec(c: Config) -> ModelSpec:
    base = windowed(c, parts.rotary(c, uniform=False))
    return replace(base, qkv_bias=True, out_bias=c.fact("out_bias", False))


_KEYS: Table = {
    "attention_bias": no_effect("q, k, v have biases always, o never, as in transformers"),
    "mlp_bias": rows.NO_BIAS,
}
FAMILY = Family(
    model_type="qwen2",
    models="Qwen 2, 2.5",
    keys=rows.rotary_keys(rows.QWEN_WINDOWS, _KEYS),
    spec=_spec,
    gguf=Gguf("qwen2", implied=header.every_layer_window),
    tiny={"qwen2": tiny(tie_word_embeddings=True)},
)
