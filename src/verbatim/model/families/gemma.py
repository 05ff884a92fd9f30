"""Gemma 1: llama with scaled embeddings and norms whose weights are offsets of 1."""

from __future__ import annotations

import math
from dataclasses import replace

from verbatim.model.families.common import parts, rows
from verbatim.model.families.common.family import Config, Family, Gguf, tiny
from verbatim.model.keys import no_effect
from verbatim.model.spec import ModelSpec


def _spec(c: Config) -> ModelSpec:
    base = parts.rotary(c)
    return replace(base, norm_offset=1.0, embed_scale=math.sqrt(base.hidden))


FAMILY = Family(
    model_type="gemma",
    models="Gemma 1",
    keys=rows.rotary_keys(
        rows.FULL,
        rows.ATTENTION_BIASES,
        {
            "head_dim": rows.HEAD_DIM,
            "hidden_activation": no_effect("`hidden_act` decides, as in transformers"),
        },
    ),
    spec=_spec,
    gguf=Gguf("gemma"),
    tiny={"gemma": tiny(head_dim=16)},
)
