"""JSON schemas of Python types: pydantic models, TypedDicts, dataclasses and plain annotations.

In: a type. Out: a JSON schema as plain data. A pydantic model makes its own; for the others this
module knows the types that JSON has. An unknown type is an error that names it.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from verbatim.base.errors import UnsupportedError
from verbatim.base.json_io import JsonObject

_PLAIN: dict[Any, JsonObject] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    None: {"type": "null"},
    type(None): {"type": "null"},
    Any: {},
    list: {"type": "array"},
    tuple: {"type": "array"},
    set: {"type": "array", "uniqueItems": True},
    frozenset: {"type": "array", "uniqueItems": True},
    dict: {"type": "object"},
}
_VALUES = ("const", "enum", "default", "examples")  # keywords whose value is no schema


def is_schema_type(value: object) -> bool:
    """Whether a value of json_schema is a Python type instead of a schema."""
    return isinstance(value, type) or typing.get_origin(value) is not None or value is Any


def schema_of(kind: object) -> JsonObject:
    """The JSON schema of a type.

    >>> class City(typing.TypedDict):
    ...     name: str
    ...     population: int
    >>> schema_of(City)["required"]
    ['name', 'population']
    """
    defs: JsonObject = {}
    schema = _schema(kind, defs)
    return {**schema, "$defs": defs} if defs else schema


def parameters_schema(function: Callable[..., object]) -> JsonObject:
    """The JSON schema of the arguments of a function, all by name: a closed object."""
    defs: JsonObject = {}
    hints = typing.get_type_hints(function, include_extras=True)
    properties: JsonObject = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"the parameter {parameter} cannot be given by name")
        properties[name] = _schema(hints.get(name, Any), defs)
        if parameter.default is parameter.empty:
            required.append(name)
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **({"$defs": defs} if defs else {}),
    }


def _schema(kind: Any, defs: JsonObject) -> JsonObject:
    plain = next((schema for known, schema in _PLAIN.items() if known is kind), None)
    if plain is not None:
        return dict(plain)
    own = getattr(kind, "model_json_schema", None)  # pydantic; not imported here
    if own is not None:
        return _hoisted(own(), defs)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [member.value for member in kind]}
    if typing.is_typeddict(kind) or _looks_like_typed_dict(kind):
        return _object(kind, kind.__required_keys__, defs)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        missing = dataclasses.MISSING
        needed = {
            field.name
            for field in dataclasses.fields(kind)
            if field.default is missing and field.default_factory is missing
        }
        return _object(kind, needed, defs)
    return _generic(kind, defs)


def _generic(kind: object, defs: JsonObject) -> JsonObject:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return {"enum": list(args)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(arg, defs) for arg in args]}
    if origin is typing.Annotated or _name(origin) in ("Required", "NotRequired", "ReadOnly"):
        return _schema(args[0], defs)
    if origin is tuple and args[-1:] != (...,):
        parts = [_schema(arg, defs) for arg in args]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
    if _name(origin) in ("list", "tuple", "Sequence", "set", "frozenset"):
        unique = {"uniqueItems": True} if origin in (set, frozenset) else {}
        return {"type": "array", "items": _schema(args[0], defs), **unique}
    if _name(origin) in ("dict", "Mapping"):
        names = _schema(args[0], defs)
        only = {"propertyNames": names} if "enum" in names else {}
        if args[0] is not str and not only:
            raise _unknown(kind, "the keys of a JSON object are strings")
        return {"type": "object", "additionalProperties": _schema(args[1], defs), **only}
    raise _unknown(kind, "use a pydantic model, a TypedDict, a dataclass or a JSON schema")


def _object(kind: Any, required: frozenset[str] | set[str], defs: JsonObject) -> JsonObject:
    """A reference to the schema of a class with annotated fields; the class may contain itself."""
    name = f"{kind.__module__}.{kind.__qualname__}".replace("/", "_").replace("~", "_")
    if name not in defs:
        defs[name] = {}
        hints = typing.get_type_hints(kind, include_extras=True)
        defs[name] = {
            "type": "object",
            "properties": {field: _schema(hint, defs) for field, hint in hints.items()},
            "required": [field for field in hints if _needed(hints[field], field in required)],
            "additionalProperties": False,
            "title": kind.__name__,
        }
        if len(defs) == 1 and not _refers(defs[name], name):
            return dict(defs.pop(name))
    return {"$ref": f"#/$defs/{name}"}


def _needed(hint: object, otherwise: bool) -> bool:
    """Whether a TypedDict key is required: by the Required or NotRequired of its hint, else
    `otherwise`. With string annotations the class itself does not know of these markers."""
    marker = _name(typing.get_origin(hint))
    return marker == "Required" or (otherwise and marker != "NotRequired")


def _refers(schema: object, name: str) -> bool:
    if isinstance(schema, Mapping):
        return schema.get("$ref") == f"#/$defs/{name}" or any(
            _refers(part, name) for part in schema.values()
        )
    return isinstance(schema, list) and any(_refers(part, name) for part in schema)


def _hoisted(schema: JsonObject, defs: JsonObject) -> JsonObject:
    """A pydantic schema, with its definitions moved to the whole schema's."""
    defs.update({name: _closed(part) for name, part in schema.pop("$defs", {}).items()})
    return typing.cast(JsonObject, _closed(schema))


def _closed(schema: object) -> object:
    """A pydantic schema whose objects have no further keys, as those of the other classes; a model
    with extra="allow" says that it has."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(part) for name, part in schema.items() if name not in _VALUES}
    out = {name: closed.get(name, part) for name, part in schema.items()}
    if schema.get("type") == "object" and "properties" in schema:
        out.setdefault("additionalProperties", False)
    return out


def _looks_like_typed_dict(kind: object) -> bool:
    """TypedDict of typing_extensions, which typing.is_typeddict does not know."""
    return isinstance(kind, type) and issubclass(kind, dict) and hasattr(kind, "__required_keys__")


def _name(origin: object) -> str:
    return str(getattr(origin, "__name__", getattr(origin, "_name", "")))


def _unknown(kind: object, why: str) -> UnsupportedError:
    return UnsupportedError("json_schema", f"{kind!r} has no JSON schema here; {why}")
