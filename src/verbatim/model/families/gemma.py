"""Gemma 1: llama with scaled embeddings and norms whose weights are offsets of 1."""

from __future__ import annotations

import math
from dataclasses import replace

from verbatim.model.families.common import parts, rows
from verbatim.model.families.common.family import Family, Gguf, tiny
from verbatim.model.keys import Table, no_effect

_KEYS: Table = {
    "head_dim": rows.HEAD_DIM,
    "hidden_activation": no_effect("`hidden_act` decides, as in transformers"),
}
FAMILY = Family(
    model_type="gemma",
    models="Gemma 1",
    keys=rows.rotary_keys(rows.FULL, rows.ATTENTION_BIASES, _KEYS),
    spec=lambda c: replace(
        base := parts.rotary(c), norm_offset=1.0, embed_scale=math.sqrt(base.hidden)
    ),
    gguf=Gguf("gemma"),
    tiny={"gemma": tiny(head_dim=16)},
)
