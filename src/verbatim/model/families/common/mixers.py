"""Parts that families with recurrent layers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from verbatim.model.families.common.family import Config
from verbatim.model.families.common.parts import check_types, window_of, with_windows
from verbatim.model.spec import LayerSpec, ModelSpec

MAX_TAPS = 64  # most taps of a convolution: far above any real model


def with_mixers(
    c: Config, spec: ModelSpec, mixer: Literal["conv", "delta"], default: Callable[[int], bool]
) -> ModelSpec:
    """The spec with `mixer` in every layer that is not attention: by `layer_types` if present, else
    by the family's rule."""
    layers, other = len(spec.layers), "conv" if mixer == "conv" else "linear_attention"
    types = c.items("layer_types")
    if types:
        check_types(c, types, layers, "full_attention", other)
    attention = [t == "full_attention" for t in types] or [default(i) for i in range(layers)]
    if not any(attention):
        key = "layer_types" if types else "full_attn_idxs or full_attention_interval"
        raise c.fail(
            key, f"one of num_hidden_layers {layers} must have full attention (layer_types)"
        )
    windowed = with_windows(spec, [window_of(c)] * layers)
    mixed = (
        a if is_attention else LayerSpec(experts=a.experts, mixer=mixer)
        for a, is_attention in zip(windowed.layers, attention, strict=True)
    )
    return replace(spec, layers=tuple(mixed))
