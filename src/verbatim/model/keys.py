"""Key tables: how the loader treats each key of a config.json or of a GGUF header.

In: the keys and values of a model file, and the table of its family (config_keys.py, gguf_keys.py).
Out: the warnings to show at load; a key that the engine cannot follow is a ModelError that names it.

Every key has one of three treatments:

    followed    read into the ModelSpec (or, for token ids, into the stop tokens)
    must equal  only the listed values are implemented; any other value is refused
    no effect   cannot change logits: training, metadata, generation defaults, kernel choice

A key that is in no table is unknown. Its value decides: off (null, false, 0, empty) or a private name
(leading underscore) is a warning, because such a key changes nothing; any other value is an error,
because the key may change logits and the engine does not know how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from verbatim.base.errors import ModelError
from verbatim.model.config_fields import Fields, short

Treatment = Literal["followed", "must equal", "no effect"]
_NAMED = 8  # unknown keys that one message lists


@dataclass(frozen=True, slots=True)
class Key:
    """One row of a key table. `note` is the column "how" of docs/config-keys.md."""

    treatment: Treatment
    note: str
    values: tuple[Any, ...] = ()  # what "must equal" accepts; null and absence are always accepted
    default: Any = None  # value of an absent key ("followed" only)
    nullable: bool = False  # an explicit null is a value of its own, not the default
    alias: str = ""  # another name of this key in the same family
    private: bool = (
        False  # in published files, unknown to transformers' class or to gguf's constants
    )


Table = Mapping[str, Key]


def followed(
    note: str, default: Any = None, *, nullable: bool = False, private: bool = False
) -> Key:
    return Key("followed", note, default=default, nullable=nullable, private=private)


def alias(of: str, *, private: bool = False) -> Key:
    return Key(
        "followed",
        f"another name of `{of}`; both with different values are refused",
        alias=of,
        private=private,
    )


def must_equal(*values: Any, note: str, private: bool = False) -> Key:
    return Key("must equal", note, values=values, private=private)


def no_effect(note: str, *, private: bool = False) -> Key:
    return Key("no effect", note, private=private)


@dataclass(slots=True)
class Checked:
    """Values of a file after the check: aliases resolved, defaults filled in, and what to warn of."""

    values: dict[str, Any]
    warnings: list[str] = field(default_factory=list)


def check_keys(
    values: Mapping[str, Any], table: Table, *, what: str, file: str, prefix: str = ""
) -> Checked:
    """Check every key of `values` that begins with `prefix` against `table` (whose keys have no prefix)."""
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
        elif (
            key.treatment == "must equal"
            and value is not None
            and not any(_same(value, v) for v in key.values)
        ):
            allowed = " or ".join(short(v) for v in key.values) or "null"
            raise reader.fail(name, f"only {allowed} is supported for {what} ({key.note})")
        elif key.alias and value is not None:
            _resolve_alias(full, prefix + key.alias, value, checked.values, file)
    if unknown:
        more = f" (and {len(unknown) - _NAMED} more)" if len(unknown) > _NAMED else ""
        raise ModelError(
            f"{', '.join(unknown[:_NAMED])}{more}: not known for {what}, and may change the answers; "
            "remove what has no effect on this model, or use the model with the code it was made for",
            file=file,
        )
    for name, key in table.items():
        if key.default is None or (prefix + name in values and key.nullable):
            continue
        if checked.values.get(prefix + name) is None:
            checked.values[prefix + name] = key.default
    return checked


def _unknown(name: str, value: Any, what: str, unknown: list[str], warnings: list[str]) -> None:
    plain = name.rsplit(".", 1)[-1]
    if plain.startswith("_"):
        warnings.append(f"{spelled(name)} is not known for {what}; a private key, ignored")
    elif not value:
        warnings.append(
            f"{spelled(name)} is not known for {what}; its value {short(value)} means off, ignored"
        )
    else:
        unknown.append(f"{spelled(name)} is {short(value)}")


def spelled(name: str) -> str:
    """A key in a message: as it is, unless it is long or holds what a terminal would not show as text."""
    return name if name.isprintable() and len(name) <= 80 else short(name)


def _resolve_alias(
    name: str, canonical: str, value: Any, values: dict[str, Any], file: str
) -> None:
    other = values.get(canonical)
    if other is not None and not _same(other, value):
        raise ModelError(
            f"{name} is {short(value)} and {canonical} is {short(other)}: two names of one number, "
            "which must be equal; remove the wrong one",
            file=file,
        )
    values[canonical] = value


def _same(a: Any, b: Any) -> bool:
    """Equal as JSON: true is not 1, and 1 is 1.0."""
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)
