"""OLMo 2: no norms before attention and MLP, but one after each; queries and keys are normed
whole."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families.common import gguf_rows, header, parts, rows, tensors
from verbatim.model.families.common.family import Family, Gguf, GgufFields, Values
from verbatim.model.keys import followed
from verbatim.model.spec import ModelSpec

NAMES = tensors.hf_names(tensors.POST_NORMS)


def olmo(spec: ModelSpec) -> ModelSpec:
    return replace(spec, pre_norms=False, post_norms=True, qk_norm="width")


def _windowed(h: GgufFields) -> bool:
    return bool(h.raw("attention.sliding_window", 0))


def _implied(h: GgufFields) -> Values:
    """The sliding layers of olmo3 have no rope scaling."""
    theta = "rope.freq_base_swa" if h.has("rope.freq_base_swa") else "rope.freq_base"
    return header.local_rope(h, theta) if _windowed(h) else {}


FAMILY = Family(
    model_type="olmo2",
    models="OLMo 2",
    keys=rows.rotary_keys(rows.FULL, rows.ATTENTION_BIASES),
    spec=lambda c: olmo(parts.rotary(c)),
    names=NAMES,
    gguf=Gguf(
        "olmo2",
        keys={
            **gguf_rows.GGUF_ROTARY,
            **gguf_rows.pattern(4, "; rope scaling applies to full layers only"),
            "rope.freq_base_swa": followed("base of the frequencies of sliding layers"),
        },
        implied=_implied,
        model_type=lambda h: "olmo3" if _windowed(h) else "olmo2",
    ),
)
