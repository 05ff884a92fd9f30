"""Llama 2, 3, 3.x and SmolLM2: RMS norms, rotary positions, a gated MLP."""

from __future__ import annotations

from verbatim.model.families.common import gguf_rows, header, parts, rows, tensors
from verbatim.model.families.common.family import Family, Gguf, GgufFields, Values


def _experts(h: GgufFields) -> int:
    return h.integer("expert_count", 0, low=0, high=4096)


def _implied(h: GgufFields) -> Values:
    return {"intermediate_size": header.expert_width(h)} if _experts(h) else {}


FAMILY = Family(
    model_type="llama",
    models="Llama 2, 3, SmolLM2, Falcon 3",
    keys=rows.rotary_keys(rows.BIASES, rows.FULL),
    spec=parts.rotary,
    gguf=Gguf(
        "llama",
        keys=gguf_rows.rotary(gguf_rows.gguf_experts("num_local_experts")),
        names=tensors.GGUF_PAIRS,
        implied=_implied,
        # llama.cpp writes mistral and mixtral as llama. A mistral may have a window.
        model_type=lambda h: "mixtral" if _experts(h) else "mistral",
    ),
)
