"""AFM 4.5B: llama whose MLP has no gate and a squared ReLU."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families.common import parts, rows, tensors
from verbatim.model.families.common.family import Family, Gguf

FAMILY = Family(
    model_type="arcee",
    models="AFM 4.5B",
    keys=rows.rotary_keys(rows.BIASES, rows.FULL),
    spec=lambda c: replace(parts.rotary(c), gated=False),
    gguf=Gguf("arcee", names=tensors.GGUF_PAIRS),
)
