"""Granite 3: llama with factors of embeddings, scores, residuals and logits."""

from __future__ import annotations

import math
from dataclasses import replace

from verbatim.model.families.common import gguf_rows, parts, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, GgufFields, Values, tiny
from verbatim.model.keys import Table, followed, must_equal, renamed
from verbatim.model.spec import ModelSpec

SCALES = {
    "embedding_multiplier": "multiplies the embeddings",
    "attention_multiplier": "multiplies the scores of attention",
    "residual_multiplier": "multiplies the outputs of attention and MLP",
    "logits_scaling": "divides the logits",
}
_SCORES = f"{SCALES['attention_multiplier']}; 0: 1 / root of a head"


def granite(c: Config) -> ModelSpec:
    return replace(
        parts.rotary(c),
        embed_scale=c.number("embedding_multiplier", 1.0),
        attention_scale=c.number("attention_multiplier", 1.0),
        residual_scale=c.number("residual_multiplier", 1.0),
        logit_scale=1.0 / c.number("logits_scaling", 1.0),
    )


def _implied(h: GgufFields) -> Values:
    """Without a factor, scores are divided by the root of a head's size."""
    wide = max(1, h.integer("embedding_length") // h.integer("attention.head_count"))
    head_dim = h.integer("attention.key_length", wide)
    h.number("logit_scale")
    return {"attention_multiplier": h.scale("attention.scale", 1.0 / math.sqrt(head_dim))}


def exported_scales(spec: ModelSpec) -> Values:
    return {
        "embedding_scale": float(spec.embed_scale),
        "attention.scale": float(spec.scale),
        "residual_scale": float(spec.residual_scale),
        "logit_scale": 1.0 / spec.logit_scale,  # GGUF stores the divisor
    }


_GGUF_KEYS: Table = {
    **gguf_rows.GGUF_ROTARY,
    "attention.scale": renamed("attention_multiplier", _SCORES, zero=True),
    "embedding_scale": renamed("embedding_multiplier", zero=True),
    "residual_scale": renamed("residual_multiplier", zero=True),
    "logit_scale": renamed("logits_scaling"),
    "rope.scaling.finetuned": must_equal(True, note="positions are rotary"),
}
_TINY = tiny(
    embedding_multiplier=2.0, attention_multiplier=0.4, residual_multiplier=0.7, logits_scaling=0.8
)
FAMILY = Family(
    model_type="granite",
    models="Granite 3",
    keys=rows.rotary_keys(
        rows.BIASES, rows.FULL, {key: followed(note) for key, note in SCALES.items()}
    ),
    spec=granite,
    gguf=Gguf("granite", keys=_GGUF_KEYS, names=tensors.GGUF_PAIRS, implied=_implied),
    exported=exported_scales,
    tiny={"granite": _TINY},
)
