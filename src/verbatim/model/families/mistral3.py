"""Ministral 3: mistral whose queries grow with their position; the text part of mistral3."""

from __future__ import annotations

from dataclasses import replace

from verbatim.base.errors import ModelError
from verbatim.model.config_fields import Fields
from verbatim.model.families.common import gguf_rows, header, parts, rope_record, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, RopeRules, Wrapper, tiny
from verbatim.model.families.common.gguf_fields import GgufFields, Record, Values, facts
from verbatim.model.keys import Table, alias, followed, no_effect, renamed
from verbatim.model.spec import ModelSpec

_BETA, _LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"
_ABSENT: Record = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _spec(c: Config) -> ModelSpec:
    record = rope_record.family_record(c)
    beta, length = c.fact("query_scale") or _query_scale(c, record)
    return replace(parts.rotary(c, record), query_scale_beta=beta, query_scale_length=length)


def _query_scale(c: Config, record: Record) -> tuple[float, int]:
    for key in (_BETA, _LENGTH):
        if not isinstance(record.get(key), int | float) or isinstance(record[key], bool):
            raise ModelError(
                f"rope_parameters.{key} is {record.get(key)!r} with rope_type "
                f"{record['rope_type']}: ministral3 needs the number",
                file=c.file,
            )
    return float(record[_BETA]), Fields(record, c.file).integer(_LENGTH)


def _implied(h: GgufFields) -> Values:
    more: Values = {}
    if h.raw("rope.scaling.yarn_log_multiplier", 0):
        magnitude = h.number("rope.scaling.yarn_log_multiplier")
        more = {"mscale": 1.0, "mscale_all_dim": magnitude}
    beta = h.scale("attention.temperature_scale", 0.0)
    length = h.integer("rope.scaling.original_context_length") if beta else 0
    return facts(rope=header.rope_record(h, **more), query_scale=(beta, length))


def _exported(spec: ModelSpec) -> Values:
    beta = float(spec.query_scale_beta)
    return {"attention.temperature_scale": beta} if beta else {}


_GGUF_KEYS: Table = {
    **gguf_rows.GGUF_ROTARY,
    "attention.temperature_scale": renamed(_BETA, "llama_4_scaling_beta of a rope record"),
    "rope.scaling.yarn_log_multiplier": followed(
        "cosines and sines are divided by 0.1 this ln(factor) + 1"
    ),
}
_KEYS: Table = {
    "head_dim": rows.HEAD_DIM,
    "rope_parameters": followed(
        "rotary positions; see the rope table. Absent: yarn, factor 16, trained length "
        "16384, theta 1e6, llama_4_scaling_beta 0.1"
    ),
}
_TINY = tiny(
    head_dim=16,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.2,
    },
)
FAMILY = Family(
    model_type="ministral3",
    name="mistral3",
    models="Ministral 3 (the text part of `mistral3`)",
    keys=rows.rotary_keys(rows.NO_BIASES, rows.ONE_WINDOW, _KEYS),
    spec=_spec,
    rope=RopeRules(
        absent=_ABSENT,
        keys={
            "llama_4_scaling_beta": followed(
                "queries at position p are multiplied by 1 + beta ln(1 + floor(p / trained length))"
            ),
            "max_position_embeddings": no_effect("the config's own value decides"),
        },
    ),
    gguf=Gguf("mistral3", keys=_GGUF_KEYS, names=tensors.GGUF_PAIRS, implied=_implied),
    exported=_exported,
    tiny={"ministral3": _TINY},
)
WRAPPER = Wrapper(
    model_type="mistral3",
    text=("mistral", "ministral3"),
    keys=rows.wrapper_keys(
        "mistral and ministral3",
        *("image_token_index", "projector_hidden_act", "vision_feature_layer"),
        *("multimodal_projector_bias", "spatial_merge_size"),
        more={"image_token_id": alias("image_token_index")},
    ),
)
