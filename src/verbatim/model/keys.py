"""Key tables: how the loader treats each key of a config.json or of a GGUF header.

In: the keys and values of a model file, and the table of its family (model/families).
Out: warnings to show at load. A key that the engine cannot follow is a ModelError that names it.

Every key has one of three treatments:

    followed    read into the ModelSpec (or, for token ids, into the stop tokens)
    must equal  only the listed values are implemented; any other value is an error
    no effect   cannot change logits: training, metadata, generation defaults, kernel choice

A key that is in no table is unknown. If its value means off (null, false, 0, empty) or its name is
private (leading underscore), it is ignored with a warning. Any other unknown key is an error,
because it may change logits in a way that the engine does not implement.

null is a value: a key that is present with null does not take the default of an absent key. It is
an error, unless the key has no default or its row says that null has a meaning (`nullable`). In a
rope record the config's own keys are defaults, so only `nullable` counts there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from verbatim.base.errors import ModelError
from verbatim.model.config_fields import Fields, short

Treatment = Literal["followed", "must equal", "no effect"]
_NUMBER = re.compile(r"^num_|_(size|heads|layers|experts|window)$")  # keys that have a number
_MAX_LISTED = 8  # unknown keys listed in one error text


@dataclass(frozen=True, slots=True)
class Key:
    """One row of a key table. `note` is the column "how" of docs/config-keys.md."""

    treatment: Treatment
    note: str
    values: tuple[Any, ...] = ()  # what "must equal" accepts; absence is always accepted
    default: Any = None  # value of an absent key ("followed" only)
    # null is accepted, as a value of its own; None: as transformers' config class says
    nullable: bool | None = None
    alias: str = ""  # another name of this key in the same family
    private: bool = False  # found in published files, but not in transformers or gguf's constants
    config: str = ""  # GGUF only: the config's name of this key
    zero_is_absent: bool = False  # GGUF only: 0 means the same as absence


Table = Mapping[str, Key]


def followed(
    note: str, default: object = None, *, nullable: bool | None = None, private: bool = False
) -> Key:
    return Key("followed", note, default=default, nullable=nullable, private=private)


def renamed(config: str, note: str = "", default: object = None, *, zero: bool = False) -> Key:
    """A key of a GGUF header that has the meaning of the config's key `config`, and its note where
    it has none of its own. `zero`: 0 means that it is absent."""
    note = note or f"as `{config}`{'; 0: absent' if zero else ''}"
    return Key("followed", note, default=default, config=config, zero_is_absent=zero)


def alias(of: str, *, private: bool = False) -> Key:
    return Key(
        "followed",
        f"another name of `{of}`; both with different values are an error",
        alias=of,
        private=private,
    )


def must_equal(*values: object, note: str, nullable: bool = True, private: bool = False) -> Key:
    return Key("must equal", note, values=values, nullable=nullable, private=private)


def no_effect(note: str, *, private: bool = False) -> Key:
    return Key("no effect", note, private=private)


@dataclass(slots=True)
class Checked:
    """Values of a file with aliases resolved, defaults filled in and unknown keys removed, the
    warnings, and the alias that the file has for a key."""

    values: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)


def _check_value(
    reader: Fields, name: str, key: Key, value: object, what: str, no_nulls: bool
) -> None:
    required = key.values or key.default is not None or (no_nulls and key.treatment == "followed")
    if value is None:
        if required and not key.nullable:
            default = key.values[0] if key.values else key.default
            hint = "" if default is None else f" for the default {short(default)}"
            raise ModelError(
                f"{reader.prefix}{name} is null: {what} needs a value here; remove the key{hint}",
                file=reader.file,
            )
    elif key.treatment == "must equal" and not any(_same(value, v) for v in key.values):
        allowed = " or ".join(short(v) for v in key.values) or "null"
        raise reader.fail(name, f"only {allowed} is supported for {what} ({key.note})")
    elif rule := _wrong_kind(name, key, value):
        raise reader.fail(name, rule)


def check_keys(
    values: Mapping[str, object],
    table: Table,
    *,
    what: str,
    file: str,
    prefix: str = "",
    no_nulls: bool = False,
) -> Checked:
    """Check every key of `values` that starts with `prefix` against `table`.

    The keys of `table` have no prefix. `no_nulls`: refuse null also where a key has no default."""
    checked = Checked(dict(values))
    reader = Fields(values, file, prefix)
    unknown: list[str] = []
    for full, value in values.items():
        if not full.startswith(prefix):
            continue
        name = full[len(prefix) :]
        key = table.get(name)
        if key is None:
            _unknown(full, value, what, unknown, checked.warnings)
            del checked.values[full]
        else:
            _check_value(reader, name, key, value, what, no_nulls)
            if key.alias and value is not None:
                _resolve_alias(full, prefix + key.alias, value, checked, file)
    if unknown:
        more = f" (and {len(unknown) - _MAX_LISTED} more)" if len(unknown) > _MAX_LISTED else ""
        raise ModelError(
            f"{', '.join(unknown[:_MAX_LISTED])}{more}: not known for {what}, and may change the "
            "output; remove the keys if they have no effect on this model, or run the model with "
            "the code it was made for",
            file=file,
        )
    for name, key in table.items():
        if key.default is not None and prefix + name not in values:
            checked.values.setdefault(prefix + name, key.default)
    return checked


def _wrong_kind(name: str, key: Key, value: object) -> str:
    """The rule that a value of a followed key breaks by its type, or "". It is checked for all of
    them, because some are read only if another key says so."""
    if key.treatment != "followed":
        return ""
    number = not isinstance(key.default, bool | str | None) or (
        key.default is None and _NUMBER.search(name)
    )
    if name.endswith("_pattern"):  # exaone4's may be a text of letters
        return ""
    if number and isinstance(value, bool | str | Mapping):
        return "a number is needed"
    if isinstance(key.default, bool) and isinstance(value, str | Mapping | list):
        return "true or false is needed"
    return ""


def _unknown(name: str, value: object, what: str, unknown: list[str], warnings: list[str]) -> None:
    plain = name.rsplit(".", 1)[-1]
    if plain.startswith("_"):
        warnings.append(f"{printable(name)} is not known for {what}; a private key, ignored")
    elif not value:
        warnings.append(
            f"{printable(name)} is not known for {what}; "
            f"its value {short(value)} means off, ignored"
        )
    else:
        unknown.append(f"{printable(name)} is {short(value)}")


def printable(name: str) -> str:
    """A key for messages: escaped and cut if it is long or not printable."""
    return name if name.isprintable() and len(name) <= 80 else short(name)


def _resolve_alias(name: str, canonical: str, value: object, checked: Checked, file: str) -> None:
    other = checked.values.get(canonical)
    if other is not None and not _same(other, value):
        raise ModelError(
            f"{name} is {short(value)} and {canonical} is {short(other)}: two names of one "
            "setting, which must be equal; remove the wrong one",
            file=file,
        )
    if isinstance(other, float):  # 4.0 beside 4: a key that needs a whole number refuses the 4.0
        return
    checked.values[canonical], checked.written[canonical] = value, name


def _same(a: object, b: object) -> bool:
    """Equality of JSON values: true differs from 1, but 1 equals 1.0."""
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)
