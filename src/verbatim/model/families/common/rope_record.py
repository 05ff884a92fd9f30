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

from verbatim.base.errors import ModelError
from verbatim.model.config_fields import Fields, short
from verbatim.model.families.common.family import Config
from verbatim.model.families.common.gguf_fields import Record
from verbatim.model.families.common.rope_keys import ROPE_KEYS, all_rope_keys
from verbatim.model.keys import check_keys
from verbatim.model.rope import length_warning, make_rope
from verbatim.model.spec import RopeSpec

# The rope types that read original_max_position_embeddings.
_SCALED_BY_LENGTH = ("llama3", "yarn", "longrope")
LAYER_TYPES = ("full_attention", "sliding_attention")
_WHOLE_HEADS = "only 1.0 is supported: whole heads are rotated"


def one_record(c: Config) -> tuple[Record, Record]:
    """The records of full and of sliding layers, of a family with one record for all layers."""
    record = family_record(c)
    return record, record


def family_record(c: Config) -> Record:
    """The rope record of a family with one record for all layers."""
    if found := c.fact("rope"):
        return dict(found)
    absent = c.family.rope.absent
    if absent and not c.has("rope_parameters"):
        c = c.with_values(rope_parameters=c.mapping("rope_scaling") or absent)
    return _flat_record(c)


def _flat_record(f: Config) -> Record:
    rules = f.family.rope
    new, old = f.mapping("rope_parameters"), f.mapping("rope_scaling")
    if old and new and old != new:
        f.warn(
            "rope_scaling and rope_parameters are both there and differ: rope_scaling is used, "
            "as in transformers"
        )
    where = "rope_scaling" if old else "rope_parameters"
    record = _checked(f, old or new, where)
    if record["rope_type"] in _SCALED_BY_LENGTH and f.has("original_max_position_embeddings"):
        record["original_max_position_embeddings"] = f.integer("original_max_position_embeddings")
    _fill_theta(f, record, where, rules.theta)
    if record.get("partial_rotary_factor") is None:
        record["partial_rotary_factor"] = f.number(rules.fraction, 1.0)
    _warn_of_two(f, record, where, "partial_rotary_factor", rules.fraction)
    if not rules.partial and record["partial_rotary_factor"] != 1:
        raise _fail(f, where, record, "partial_rotary_factor", _WHOLE_HEADS)
    return record


def _fill_theta(f: Config, record: Record, where: str, theta: float | str) -> None:
    """Set the theta of a record that has none. `theta`: a number, or the config's key of one, which
    may be null only where the record has its own."""
    value = theta if isinstance(theta, float) else f.number(theta) if f.has(theta) else None
    if "rope_theta" not in record and value is None:
        raise _fail(f, where, record, "rope_theta", f"a number is needed here or in {theta}")
    record.setdefault("rope_theta", value)
    if isinstance(theta, str):
        _warn_of_two(f, record, where, "rope_theta", theta)


def _warn_of_two(f: Config, record: Record, where: str, name: str, key: str) -> None:
    """Warn of a config whose own `key` differs from `name` of its record."""
    own = f.given.get(key)
    if own is not None and own != record[name]:
        f.warn(
            f"{key} is {short(own)} and {where}.{name} is {short(record[name])}: the record's is "
            "used, as in transformers"
        )


def layer_type_record(f: Config, layer_type: str, theta: float | str) -> Record:
    """The rope record of one layer type (gemma3, olmo3). `theta`: where the record has none, a
    number or the config's key of one."""
    if found := f.fact("rope" if layer_type == "full_attention" else "local_rope"):
        return dict(found)
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
        raise _fail(f, where, record, "partial_rotary_factor", _WHOLE_HEADS)
    if not record.get("truncate", True):
        raise _fail(f, where, record, "truncate", "only true is supported for this family")
    return record


def rope_of(f: Fields, record: Record, head_dim: int, context: int) -> RopeSpec:
    """The RopeSpec of a checked record; warns where the context changes the frequencies."""
    trained = f.integer("max_position_embeddings")
    inner = Fields(record, f.file)
    dim = record.get("dim", head_dim)  # proportional: heads are rotated as a whole, by zero in part
    if record["rope_type"] != "proportional":
        dim = int(dim * inner.number("partial_rotary_factor", 1.0))
    theta = inner.number("rope_theta")
    rope = make_rope(record, theta=theta, dim=dim, context=context, trained=trained, file=f.file)
    if warning := length_warning(record, context=context, trained=trained):
        f.warn(warning)
    return rope


def _checked(f: Config, record: Mapping[str, object], where: str) -> Record:
    """The record with `rope_type` set, and without nulls and keys of other rope types."""
    rules = f.family.rope
    name = "type" if "type" in record and "rope_type" not in record else "rope_type"
    kind = record.get(name, "default")
    if kind == "su" or (kind == "yarn" and rules.only_longrope):
        kind = "longrope"  # early phi3 configs use su or yarn for longrope
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        known = ", ".join(sorted(ROPE_KEYS))
        raise ModelError(
            f"{where}.{name}: rope scaling {short(kind)} is unknown; known: {known}", file=f.file
        )
    if rules.only_longrope and kind not in ("default", "longrope"):
        raise ModelError(
            f"{where}.rope_type is {kind!r}: phi3 has default and longrope", file=f.file
        )
    table, known_elsewhere = {**ROPE_KEYS[kind], **rules.keys}, all_rope_keys()
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


def _fail(f: Config, where: str, record: Mapping[str, object], key: str, rule: str) -> ModelError:
    return ModelError(f"{where}.{key} is {short(record.get(key))}: {rule}", file=f.file)
