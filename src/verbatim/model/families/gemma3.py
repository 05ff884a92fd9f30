"""Gemma 3: five sliding layers per full layer, each kind with a rope record; the text part of the
multi-modal gemma3."""

from __future__ import annotations

from dataclasses import replace

from verbatim.base.errors import ModelError
from verbatim.model.config_fields import Fields, short
from verbatim.model.families.common import gguf_rows, header, parts, rope_record, rows
from verbatim.model.families.common.family import Config, Family, Gguf, Wrapper, tiny
from verbatim.model.families.common.gguf_fields import GgufFields, Record, Values
from verbatim.model.families.gemma2 import KEYS, LOGIT_CAP, NAMES, TINY, gemma_2_and_3, query_scalar
from verbatim.model.keys import Table, followed, must_equal, renamed
from verbatim.model.spec import ModelSpec

_LAYERS_OF_27B = 62  # see gemma2.py


def _records(c: Config) -> tuple[Record, Record]:
    return (
        rope_record.layer_type_record(c, "full_attention", "rope_theta"),
        rope_record.layer_type_record(c, "sliding_attention", "rope_local_base_freq"),
    )


def _spec(c: Config) -> ModelSpec:
    _check_pattern(c)
    full, sliding = _records(c)
    base = gemma_2_and_3(c, full)
    windows = parts.period_windows(c, base, c.integer("sliding_window_pattern"))
    return replace(parts.with_local_rope(c, base, sliding, windows), qk_norm="head")


def _check_pattern(c: Config) -> None:
    """Reject a `_sliding_window_pattern` that transformers writes but does not read back."""
    alone = not c.has("layer_types") and c.given.get("sliding_window_pattern") is None
    if alone and c.raw("_sliding_window_pattern", 6) != 6:
        raise c.fail(
            "_sliding_window_pattern", "it is not read; give layer_types or sliding_window_pattern"
        )


def _refused(text: Fields) -> None:
    cap = text.raw("final_logit_softcapping", None)
    if cap is not None:
        raise ModelError(
            f"text_config.final_logit_softcapping is {short(cap)}: only null is supported for "
            "gemma3 with a text_config, where transformers ignores it",
            file=text.file,
        )


def _implied(h: GgufFields) -> Values:
    return {**query_scalar(h, _LAYERS_OF_27B), **header.local_rope(h)}


def _exported(spec: ModelSpec) -> Values:
    caps = {
        "attn_logit_softcapping": spec.attention_softcap,
        "final_logit_softcapping": spec.logit_softcap,
    }
    return header.pattern_flags(spec) | {key: float(cap) for key, cap in caps.items() if cap}


_GGUF_KEYS: Table = {
    **gguf_rows.GGUF_ROTARY,
    "final_logit_softcapping": gguf_rows.LOGIT_CAP,
    "attn_logit_softcapping": must_equal(0, note="llama.cpp and transformers ignore it in gemma3"),
    "attention.sliding_window": renamed("sliding_window", default=1024),
    "attention.sliding_window_pattern": renamed("layer_types", gguf_rows.LAYER_PERIOD, 6),
    "rope.freq_base": followed("base of the frequencies of full layers", 1e6),
    "rope.freq_base_swa": followed("base of the frequencies of sliding layers", 10000.0),
}
_OWN_KEYS: Table = {
    "rope_theta": rows.theta_key("theta of full_attention"),
    "rope_local_base_freq": rows.theta_key("theta of sliding_attention"),
    "sliding_window_pattern": followed(rows.PERIOD, 6),
    "_sliding_window_pattern": followed(
        "checked: 6 where neither layer_types nor sliding_window_pattern is present"
    ),
    "attn_logit_softcapping": must_equal(note="transformers ignores it in gemma3"),
    "final_logit_softcapping": LOGIT_CAP,
}
FAMILY = Family(
    model_type="gemma3_text",
    name="gemma3",
    models="Gemma 3 (the text part of `gemma3`)",
    keys=rows.rotary_keys(KEYS, rows.NESTED_ROPE, _OWN_KEYS),
    spec=_spec,
    records=_records,
    names=NAMES,
    gguf=Gguf("gemma3", keys=_GGUF_KEYS, implied=_implied),
    exported=_exported,
    tiny={"gemma3": tiny(**TINY, num_hidden_layers=6, rope_theta=1e6)},
)
WRAPPER = Wrapper(
    model_type="gemma3",
    text=("gemma3_text",),
    keys=rows.wrapper_keys(
        "gemma3_text; its final_logit_softcapping must be null",
        *("mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"),
        *("boi_token_id", "eoi_token_id", "image_token_id"),
    ),
    refused=_refused,
)
