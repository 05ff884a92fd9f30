"""Gemma 2: norms before and after attention and MLP, softcaps, a window in every other layer."""

from __future__ import annotations

import math
from dataclasses import replace

from verbatim.model.families.common import gguf_rows, parts, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, tiny
from verbatim.model.families.common.gguf_fields import GgufFields, Record, Values
from verbatim.model.keys import Table, followed, must_equal, no_effect, renamed
from verbatim.model.spec import ModelSpec

# Gemma's 27B models scale queries by hidden / heads instead of by head_dim. No key of a GGUF header
# says so, so the model is recognised by its number of layers.
_LAYERS_OF_27B = 46
HIDDEN_ACT = no_effect("`hidden_activation` decides, also where it is absent, as in transformers")
ACTIVATION = followed("activation of the MLP")
LOGIT_CAP = followed("cap of logits; null: none", nullable=True)

KEYS: Table = {
    **rows.ATTENTION_BIASES,
    "hidden_activation": ACTIVATION,
    "hidden_act": HIDDEN_ACT,
    "head_dim": rows.HEAD_DIM,
    "query_pre_attn_scalar": followed("queries are divided by its square root"),
    "sliding_window": rows.SLIDING,
    "layer_types": rows.LAYER_WINDOWS,
    "sliding_window_size": no_effect("older name; `sliding_window` decides"),
}
NAMES = tensors.hf_names(
    {
        "attn_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
)
TINY: Values = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 12}


def gemma(c: Config, record: Record | None = None) -> ModelSpec:
    """What all Gemmas have: scaled embeddings, and an activation under a key of its own."""
    base = parts.rotary(c.with_values(hidden_act=None), record, uniform=False)
    return replace(
        base,
        activation=parts.activation(c, "hidden_activation"),
        embed_scale=math.sqrt(base.hidden),
    )


def gemma_2_and_3(c: Config, record: Record | None = None) -> ModelSpec:
    return replace(
        gemma(c, record),
        norm_offset=1.0,
        post_norms=True,
        attention_scale=1.0 / math.sqrt(c.number("query_pre_attn_scalar")),
        logit_softcap=c.cap("final_logit_softcapping"),
    )


def query_scalar(h: GgufFields, layers_of_27b: int) -> Values:
    wide = h.integer("embedding_length") // h.integer("attention.head_count")
    head = wide if h.layers == layers_of_27b else h.integer("attention.key_length", wide)
    return {"query_pre_attn_scalar": head}


def _spec(c: Config) -> ModelSpec:
    base = gemma_2_and_3(c)
    windows = parts.period_windows(c, base, 2)
    cap = c.cap("attn_logit_softcapping")
    return replace(parts.with_windows(base, windows), attention_softcap=cap)


def _exported(spec: ModelSpec) -> Values:
    return {
        "attn_logit_softcapping": float(spec.attention_softcap),
        "final_logit_softcapping": float(spec.logit_softcap),
    }


_GGUF_KEYS: Table = {
    **gguf_rows.GGUF_ROTARY,
    "attn_logit_softcapping": renamed("attn_logit_softcapping", default=50.0, zero=True),
    "final_logit_softcapping": renamed("final_logit_softcapping", default=30.0, zero=True),
    "attention.sliding_window": renamed(
        "sliding_window", "window of every other layer, from the first on", 4096
    ),
    "attention.sliding_window_pattern": must_equal(2, note="every other layer has a window"),
}
_OWN_KEYS: Table = {
    "attn_logit_softcapping": followed("cap of attention scores; null: none"),
    "final_logit_softcapping": LOGIT_CAP,
}
FAMILY = Family(
    model_type="gemma2",
    models="Gemma 2",
    keys=rows.rotary_keys(KEYS, _OWN_KEYS),
    spec=_spec,
    names=NAMES,
    gguf=Gguf("gemma2", keys=_GGUF_KEYS, implied=lambda h: query_scalar(h, _LAYERS_OF_27B)),
    exported=_exported,
    tiny={"gemma2": tiny(**TINY)},
)
