"""AFM 4.5B: llama whose MLP has no gate and a squared ReLU."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families.common import gguf_rows, parts, rows, tensors
from verbatim.model.families.common.family import Family, Gguf
from verbatim.model.families.common.tiny import tiny

FAMILY = Family(
    model_type="arcee",
    models="AFM 4.5B",
    keys=rows.rotary_keys(rows.BIASES, rows.FULL),
    spec=lambda c: replace(parts.rotary(c), gated=False),
    names=tensors.LLAMA_NAMES,
    gguf=Gguf("arcee", keys=gguf_rows.GGUF_ROTARY, names=tensors.GGUF_PAIRS),
    tiny={"arcee": tiny()},
)
