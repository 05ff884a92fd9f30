"""Mistral: llama with a window in every layer."""

from __future__ import annotations

from verbatim.model.families.common import parts, rows
from verbatim.model.families.common.family import Family, tiny

FAMILY = Family(
    model_type="mistral",
    name="llama",
    models="Mistral 7B, Nemo, Small",
    keys=rows.rotary_keys(rows.NO_BIASES, rows.ONE_WINDOW),
    spec=parts.rotary,
    architecture="llama",
    tiny={"mistral": tiny(sliding_window=12)},
)
