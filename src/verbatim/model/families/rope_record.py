"""Resolve the rope record of a config.json as transformers 5 does.

In: a config with its defaults filled in. Out: a checked rope record (rope_type and that type's
numbers), and its RopeSpec.

Precedence: a non-empty `rope_scaling` (older name) replaces `rope_parameters` (transformers 5).
Theta and partial_rotary_factor come from the record, else from the config.
`original_max_position_embeddings` comes from the config, else from the record, else it is
`max_position_embeddings`. gemma3 and olmo3 have one record per layer type; their
`rope_scaling` changes the record of full_attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verbatim.base.errors import ModelError
from verbatim.model.config_fields import Fields, short
from verbatim.model.families.config_keys import ROPE_EXTRA, ROPE_KEYS, all_rope_keys
from verbatim.model.keys import Table, check_keys
from verbatim.model.rope import length_warning, make_rope
from verbatim.model.spec import RopeSpec

Record = dict[str, Any]
# The rope types that read original_max_position_embeddings.
_SCALED_BY_LENGTH = ("llama3", "yarn", "longrope")
LAYER_TYPES = ("full_attention", "sliding_attention")


# model_type -> arguments of flat_record, where its rope record differs from llama's.
_OPTIONS: dict[str, dict[str, Any]] = {
    "phi3": {"phi3": True},
    "glm4": {"partial": True},
    "glm4_moe": {"partial": True},
    "stablelm": {"partial": True},
    "gpt_neox": {"partial": True, "keys": ("rotary_emb_base", "rotary_pct")},
    "qwen3_next": {"partial": True},
    "qwen3_5_text": {"partial": True, "extra": ROPE_EXTRA["qwen3_5_text"]},
    "qwen3_5_moe_text": {"partial": True, "extra": ROPE_EXTRA["qwen3_5_text"]},
    "ministral3": {"extra": ROPE_EXTRA["ministral3"]},
    "hunyuan_v1_dense": {"extra": ROPE_EXTRA["hunyuan_v1_dense"]},
}
# model_type -> rope record of a config that has none, where it is not llama's.
_DEFAULTS: dict[str, Record] = {
    "ministral3": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
    "gpt_oss": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}


def family_record(f: Fields, kind: str) -> Record:
    """The rope record of a family (its model_type) with one record for all layers."""
    if kind in _DEFAULTS and not f.has("rope_parameters"):
        f = f.with_values(rope_parameters=f.mapping("rope_scaling") or _DEFAULTS[kind])
    record = flat_record(f, **_OPTIONS.get(kind, {}))
    if kind == "hunyuan_v1_dense" and record["rope_type"] == "dynamic" and record.get("alpha"):
        record["rope_type"] = "ntk_alpha"  # independent of the length, unlike dynamic
    return record


def flat_record(
    f: Fields,
    *,
    phi3: bool = False,
    partial: bool = False,
    extra: Table | None = None,
    keys: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
) -> Record:
    """The rope record of a family with one record for all layers.

    `partial`: heads may be rotated in part. `extra`: further keys of the family's records. `keys`:
    the config's names of theta and of the rotated fraction."""
    new, old = f.mapping("rope_parameters"), f.mapping("rope_scaling")
    if old and new and old != new:
        f.warn(
            "rope_scaling and rope_parameters are both there and differ: rope_scaling is used, "
            "as in transformers"
        )
    where = "rope_scaling" if old else "rope_parameters"
    record = _checked(f, old or new, where, phi3=phi3, extra=extra)
    if record["rope_type"] in _SCALED_BY_LENGTH and f.has("original_max_position_embeddings"):
        record["original_max_position_embeddings"] = f.integer("original_max_position_embeddings")
    _fill_theta(f, record, where, keys[0])
    if record.get("partial_rotary_factor") is None:
        record["partial_rotary_factor"] = f.number(keys[1], 1.0)
    if not (phi3 or partial) and record["partial_rotary_factor"] != 1:
        raise _fail(
            f,
            where,
            record,
            "partial_rotary_factor",
            "only 1.0 is supported: whole heads are rotated",
        )
    return record


def _fill_theta(f: Fields, record: Record, where: str, theta: float | str) -> None:
    """Set the theta of a record that has none. `theta`: a number, or the config's key of one, which
    may be null only where the record has its own."""
    value = theta if isinstance(theta, float) else f.number(theta) if f.has(theta) else None
    if "rope_theta" not in record and value is None:
        raise _fail(f, where, record, "rope_theta", f"a number is needed here or in {theta}")
    record.setdefault("rope_theta", value)


def layer_type_record(f: Fields, layer_type: str, theta: float | str) -> Record:
    """The rope record of one layer type (gemma3, olmo3). `theta`: where the record has none, a
    number or the config's key of one."""
    records = f.mapping("rope_parameters")
    for name, value in records.items():
        if name not in LAYER_TYPES and value is None:
            f.warn(f"rope_parameters.{name} is not known; its value None means off, ignored")
        elif name not in LAYER_TYPES:
            raise _fail(
                f,
                "rope_parameters",
                records,
                name,
                f"this family has one record for each of {', '.join(LAYER_TYPES)}",
            )
    where = f"rope_parameters.{layer_type}"
    record = records.get(layer_type, {})
    if not isinstance(record, Mapping):
        raise _fail(f, "rope_parameters", records, layer_type, "an object is needed")
    record = dict(record)
    if layer_type == "full_attention" and (old := f.mapping("rope_scaling")):
        if "rope_type" not in old and old.get("type", "default") != record.get(
            "rope_type", "default"
        ):
            raise _fail(
                f, "rope_scaling", old, "type", "this family reads rope_type, not type; rename it"
            )
        record, where = {**record, **old}, "rope_scaling"
    record = _checked(f, record, where)
    _fill_theta(f, record, where, theta)
    whole = record["rope_type"] != "proportional"
    if whole and record.get("partial_rotary_factor", 1) not in (1, None):
        raise _fail(
            f,
            where,
            record,
            "partial_rotary_factor",
            "only 1.0 is supported: whole heads are rotated",
        )
    if not record.get("truncate", True):
        raise _fail(f, where, record, "truncate", "only true is supported for this family")
    return record


def rope_of(f: Fields, record: Record, head_dim: int, context: int) -> RopeSpec:
    """The RopeSpec of a checked record; warns where the context changes the frequencies."""
    trained = f.integer("max_position_embeddings")
    inner = Fields(record, f.file)
    dim = head_dim  # proportional: heads are rotated as a whole, by zero in part
    if record["rope_type"] != "proportional":
        dim = int(head_dim * inner.number("partial_rotary_factor", 1.0))
    rope = make_rope(
        record,
        theta=inner.number("rope_theta"),
        dim=dim,
        context=context,
        trained=trained,
        file=f.file,
    )
    if warning := length_warning(record, context=context, trained=trained):
        f.warn(warning)
    return rope


def _checked(
    f: Fields,
    record: Mapping[str, Any],
    where: str,
    *,
    phi3: bool = False,
    extra: Table | None = None,
) -> Record:
    """The record with `rope_type` set, and without nulls and keys of other rope types."""
    name = "type" if "type" in record and "rope_type" not in record else "rope_type"
    kind = record.get(name, "default")
    if kind == "su" or (kind == "yarn" and phi3):
        kind = "longrope"  # early phi3 configs use su or yarn for longrope
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        known = ", ".join(sorted(ROPE_KEYS))
        raise ModelError(
            f"{where}.{name}: rope scaling {short(kind)} is unknown; known: {known}", file=f.file
        )
    if phi3 and kind not in ("default", "longrope"):
        raise ModelError(
            f"{where}.rope_type is {kind!r}: phi3 has default and longrope", file=f.file
        )
    table, known_elsewhere = {**ROPE_KEYS[kind], **(extra or {})}, all_rope_keys()
    kept: Record = {}
    for name, value in record.items():
        if name in known_elsewhere and name not in table:
            f.warn(f"{where}.{name} has no effect with rope_type {kind}; ignored")
        else:
            kept[name] = value
    checked = check_keys(
        {f"{where}.{name}": value for name, value in kept.items()},
        table,
        what=f"rope_type {kind}",
        file=f.file,
        prefix=f"{where}.",
        no_nulls=True,
    )
    for text in checked.warnings:
        f.warn(text)
    # Null and absence mean the same in the keys that may be null.
    found = {name.removeprefix(f"{where}."): value for name, value in checked.values.items()}
    return {name: value for name, value in found.items() if value is not None} | {"rope_type": kind}


def _fail(f: Fields, where: str, record: Mapping[str, Any], key: str, rule: str) -> ModelError:
    return ModelError(f"{where}.{key} is {short(record.get(key))}: {rule}", file=f.file)
