"""Qwen 3: qwen2 without biases, and with an RMS norm of each query and key head."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families.common import header, parts, rows
from verbatim.model.families.common.family import Family, Gguf, tiny
from verbatim.model.families.qwen2 import windowed

FAMILY = Family(
    model_type="qwen3",
    models="Qwen 3",
    keys=rows.rotary_keys(rows.QWEN_WINDOWS, rows.ATTENTION_BIASES, {"head_dim": rows.HEAD_DIM}),
    spec=lambda c: replace(windowed(c, parts.rotary(c, uniform=False)), qk_norm="head"),
    gguf=Gguf("qwen3", implied=header.every_layer_window),
    tiny={"qwen3": tiny(head_dim=16)},
)
