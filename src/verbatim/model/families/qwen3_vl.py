"""Qwen3-VL: the language model, which is qwen3 without windows."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families.common import gguf_rows, parts, rows
from verbatim.model.families.common.family import Family, Gguf, tiny
from verbatim.model.families.qwen3_5 import ONE_POSITION, RULES, qwen_wrapper
from verbatim.model.keys import Table, no_effect

_GGUF_KEYS: Table = {
    **gguf_rows.GGUF_ROTARY,
    "rope.dimension_sections": ONE_POSITION,
    "n_deepstack_layers": no_effect("images are not read"),
}
FAMILY = Family(
    model_type="qwen3_vl_text",
    name="qwen3vl",
    models="Qwen3-VL (the text part of `qwen3_vl`)",
    keys=rows.rotary_keys(rows.FULL, rows.ATTENTION_BIASES, {"head_dim": rows.HEAD_DIM}),
    spec=lambda c: replace(parts.rotary(c), qk_norm="head"),
    rope=replace(RULES, partial=False),
    gguf=Gguf("qwen3vl", keys=_GGUF_KEYS),
    exported=lambda spec: {"rope.dimension_sections": [24, 20, 20, 0]},
    tiny={"qwen3vl": tiny(head_dim=16)},
)
WRAPPER = qwen_wrapper("qwen3_vl", "qwen3_vl_text")
