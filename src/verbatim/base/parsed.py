"""Answers as Python objects: what Choice.parsed returns.

In: the JSON text of an answer and the schema of its request. Out: an object of the type that was
given as json_schema (the types of schema_types.py), or plain data for a schema that was given as
JSON. The grammar has checked the document; a pydantic model validates it once more by its own
validators.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

from verbatim.base.errors import RequestError
from verbatim.base.json_io import JsonObject


class SchemaText(str):
    """A JSON schema as text that remembers the Python type which it was made from. A copy by pickle
    is a plain string: the type may be local to a function."""

    __slots__ = ("kind",)
    kind: Any

    def __new__(cls, text: str, kind: object) -> SchemaText:
        made = super().__new__(cls, text)
        made.kind = kind
        return made

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str.__str__(self),)


def parse_answer(schema: str | None, text: str, finish: str) -> object:
    """The answer as an object; None without a schema. `finish` is its finish reason.

    >>> parse_answer('{"type": "object"}', '{"a": 1}', "stop")
    {'a': 1}
    """
    if schema is None:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        raise RequestError(
            f"parsed: the answer is not a whole JSON document (it ended by {finish!r}); allow more"
            " with max_tokens, or read .text",
            param="max_tokens",
        ) from None
    kind = getattr(schema, "kind", None)
    return value if kind is None else build(kind, value)


def build(kind: object, value: object) -> object:
    """A JSON value as an object of a type. ValueError: the value is not of that type.

    >>> build(list[tuple[int, str]], [[1, "a"]])
    [(1, 'a')]
    """
    if validate := getattr(kind, "model_validate_json", None):  # pydantic; not imported here
        return validate(json.dumps(value))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return kind(**_fields(kind, value))
    if hasattr(kind, "__required_keys__"):  # a TypedDict
        return _fields(kind, value)
    return _generic(kind, value)


def _fields(kind: Any, value: Any) -> JsonObject:
    hints = typing.get_type_hints(kind, include_extras=True)
    needed = getattr(kind, "__required_keys__", ())
    if not isinstance(value, Mapping) or not set(value) <= set(hints):
        raise ValueError(f"{value!r:.60} is not {kind.__name__}")
    if any(name not in value for name in needed if "NotRequired" not in str(hints[name])):
        raise ValueError(f"{value!r:.60} is not {kind.__name__}")
    return {name: build(hints[name], part) for name, part in value.items()}


def _generic(kind: object, value: Any) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    name = getattr(origin, "__name__", getattr(origin, "_name", ""))
    if origin in (typing.Union, types.UnionType):
        return _first(args, value)
    if origin is typing.Annotated or name in ("Required", "NotRequired", "ReadOnly"):
        return build(args[0], value)
    if origin is typing.Literal and value not in args:
        raise ValueError(f"{value!r:.60} is not one of {args}")
    if origin is tuple and args[-1:] != (...,):
        return tuple(build(part, item) for part, item in zip(args, value, strict=True))
    if name in ("list", "tuple", "Sequence", "set", "frozenset"):
        made = [build(args[0], item) for item in _checked(list, value)]
        return made if origin is None or name == "Sequence" else origin(made)
    if name in ("dict", "Mapping"):
        pairs = _checked(dict, value).items()
        return {build(args[0], key): build(args[1], item) for key, item in pairs}
    if kind in (tuple, set, frozenset):
        return kind(_checked(list, value))
    if kind is float:
        return float(_checked((int, float), value))
    return _checked(kind, value) if kind in (str, int, bool, list, dict) else value


def _first(kinds: tuple[object, ...], value: object) -> object:
    """The value as the first member of a union that takes it."""
    for kind in kinds:
        if (kind is type(None)) != (value is None):
            continue
        try:
            return None if value is None else build(kind, value)
        except (ValueError, TypeError):
            continue
    raise ValueError(f"{value!r:.60} is none of {kinds}")


def _checked(kind: Any, value: object) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{value!r:.60} is not {kind}")
    return value
