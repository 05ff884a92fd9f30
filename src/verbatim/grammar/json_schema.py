"""Check a JSON schema before it is compiled: supported keywords, size and depth.

llguidance skips unknown keywords, as the standard tells validators to. For a generator that would
break a promise silently ("requierd" would require nothing). So every keyword must be supported or
an annotation; any other is rejected by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verbatim.base.errors import ParameterError, UnsupportedError

MAX_DEPTH = 64  # levels of nested schemas
MAX_NODES = 20_000  # schemas in all

# keyword -> subschemas in its value: "" none, "one" a schema, "many" a list or mapping of schemas
SUPPORTED = {
    "type": "", "enum": "", "const": "",
    "allOf": "many", "anyOf": "many", "oneOf": "many",
    "$ref": "", "$defs": "many", "definitions": "many",
    "properties": "many", "patternProperties": "many", "additionalProperties": "one",
    "required": "", "minProperties": "", "maxProperties": "",
    "items": "one", "prefixItems": "many", "additionalItems": "one", "minItems": "", "maxItems": "",
    "minLength": "", "maxLength": "", "pattern": "", "format": "",
    "minimum": "", "maximum": "", "exclusiveMinimum": "", "exclusiveMaximum": "", "multipleOf": "",
}  # fmt: skip
ANNOTATIONS = {
    "$schema", "$id", "$comment", "title", "description", "default", "examples", "example",
    "deprecated", "readOnly", "writeOnly", "discriminator",
}  # fmt: skip


def check_schema(schema: Any, field: str = "json_schema") -> None:
    """Raise UnsupportedError or ParameterError, naming field and keyword, unless every keyword is
    supported."""
    nodes = 0
    stack: list[tuple[Any, int, str]] = [(schema, 0, "#")]
    while stack:
        node, depth, path = stack.pop()
        nodes += 1
        if nodes > MAX_NODES:
            raise UnsupportedError(field, f"has more than {MAX_NODES} parts")
        if depth > MAX_DEPTH:
            raise UnsupportedError(field, f"is nested more than {MAX_DEPTH} deep")
        if isinstance(node, bool):
            continue
        if not isinstance(node, Mapping):
            raise ParameterError(field, f"at {path}: a schema is an object, true or false")
        if "additionalItems" in node and not isinstance(node.get("items"), list):
            raise UnsupportedError(
                field,
                f"the keyword 'additionalItems' (at {path}) means nothing without a list of items",
            )
        _check_numbers(node, path, field)
        _check_min_properties(node, path, field)
        for keyword, value in node.items():
            stack += [(s, depth + 1, p) for s, p in _subschemas(keyword, value, path, field)]


def _check_numbers(node: Mapping[str, Any], path: str, field: str) -> None:
    """Reject what llguidance 1.9 gets wrong: it reads multipleOf -2 as 2, and it generates an open
    bound itself where the other bound is less than 1 away ("0" for {"exclusiveMinimum": 0,
    "maximum": 0.5})."""
    for step in _bounds(node, "multipleOf"):
        if step <= 0:
            raise ParameterError(field, f"multipleOf (at {path}): {step} is not above 0")
    if node.get("type") == "integer":
        return
    for open_end, others, sign in (
        ("exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1),
        ("exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1),
    ):
        for bound in _bounds(node, open_end):
            for name in others:
                near = [
                    other
                    for other in _bounds(node, name)
                    if bound == int(bound) and 0 < sign * (other - bound) < 1
                ]
                if near:
                    raise UnsupportedError(
                        field,
                        f"{open_end} {bound} together with {name} {near[0]}, less than one "
                        f"away (at {path}), is not supported; use a bound that is not open, "
                        "or a pattern",
                    )


def _check_min_properties(node: Mapping[str, Any], path: str, field: str) -> None:
    """Reject minProperties over free names: llguidance counts a repeated name twice, a JSON parser
    once."""
    least = max(_bounds(node, "minProperties"), default=0)
    required = node.get("required")
    sure = (
        len(set(required))
        if isinstance(required, list) and all(isinstance(name, str) for name in required)
        else 0
    )
    spelled = node.get("additionalProperties") is False and not node.get("patternProperties")
    if least > max(1, sure) and not spelled:
        raise UnsupportedError(
            field,
            f"the keyword 'minProperties' (at {path}) is not supported where names are free: "
            "one may be written twice and count once; name them under 'properties' and 'required'",
        )


def _bounds(node: Mapping[str, Any], name: str) -> list[float]:
    """The numeric values of a keyword in this schema and in its allOf parts."""
    parts = node.get("allOf")
    inner = (
        [part.get(name) for part in parts if isinstance(part, Mapping)]
        if isinstance(parts, list)
        else []
    )
    return [
        value
        for value in (node.get(name), *inner)
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    ]


def _subschemas(keyword: str, value: Any, path: str, field: str) -> list[tuple[Any, str]]:
    """(subschema, path) for each schema in the keyword's value."""
    here = f"{path}/{keyword}"
    kind = SUPPORTED.get(keyword)
    if kind is None:
        if keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance"):
            return []
        raise UnsupportedError(field, f"the keyword {keyword!r} (at {path}) is not supported")
    if keyword == "items" and isinstance(value, list):  # drafts before 2020-12
        kind = "many"
    if kind == "one":
        return [(value, here)]
    if kind == "many":
        if isinstance(value, list):
            return [(s, f"{here}/{i}") for i, s in enumerate(value)]
        if isinstance(value, Mapping):
            return [(s, f"{here}/{name}") for name, s in value.items()]
        raise ParameterError(field, f"at {here}: expected schemas")
    return []
