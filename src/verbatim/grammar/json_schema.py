"""JSON Schema, looked over before it is compiled: which keywords we honour, and how large it may be.

llguidance skips keywords that it does not know, as the JSON Schema standard tells validators to. For a generator that would be a
silent promise broken ("requierd" would require nothing), so every keyword must be one that is honoured or one that asserts
nothing; any other is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verbatim.base.errors import ParameterError, UnsupportedError

MAX_DEPTH = 64
MAX_NODES = 20_000

# keyword -> how its value holds further schemas: "" not at all, "one" a schema, "many" a list or mapping of schemas
HONOURED = {
    "type": "", "enum": "", "const": "",
    "allOf": "many", "anyOf": "many", "oneOf": "many",
    "$ref": "", "$defs": "many", "definitions": "many",
    "properties": "many", "patternProperties": "many", "additionalProperties": "one", "required": "",
    "minProperties": "", "maxProperties": "",
    "items": "one", "prefixItems": "many", "additionalItems": "one", "minItems": "", "maxItems": "",
    "minLength": "", "maxLength": "", "pattern": "", "format": "",
    "minimum": "", "maximum": "", "exclusiveMinimum": "", "exclusiveMaximum": "", "multipleOf": "",
}  # fmt: skip
SILENT = {
    "$schema", "$id", "$comment", "title", "description", "default", "examples", "example", "deprecated", "readOnly",
    "writeOnly", "discriminator",
}  # fmt: skip


def check_schema(schema: Any, field: str = "json_schema") -> None:
    """Raise UnsupportedError or ParameterError, naming the field and the keyword, unless every part is one we honour."""
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
        _check_least_properties(node, path, field)
        for keyword, value in node.items():
            stack += [(s, depth + 1, p) for s, p in _inside(keyword, value, path, field)]


def _check_numbers(node: Mapping[str, Any], path: str, field: str) -> None:
    """llguidance 1.9 takes a multiple of -2 for one of 2, and writes the bound itself, "0" for {"exclusiveMinimum": 0, "maximum": 0.5}, where the other
    bound lies within one of it."""
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
                    why = f"{open_end} {bound} together with {name} {near[0]}, less than one away (at {path}), is not supported"
                    raise UnsupportedError(
                        field, f"{why}; use a bound that is not open, or a pattern"
                    )


def _check_least_properties(node: Mapping[str, Any], path: str, field: str) -> None:
    """A name that the schema does not spell out may be written twice, and counts once for whoever reads the document: llguidance counts both."""
    least = max(_bounds(node, "minProperties"), default=0)
    required = node.get("required")
    sure = (
        len(set(required))
        if isinstance(required, list) and all(isinstance(name, str) for name in required)
        else 0
    )
    spelled = node.get("additionalProperties") is False and not node.get("patternProperties")
    if least > max(1, sure) and not spelled:
        why = f"the keyword 'minProperties' (at {path}) is not supported where names are free: one may be written twice and count once"
        raise UnsupportedError(field, f"{why}; name them under 'properties' and 'required'")


def _bounds(node: Mapping[str, Any], name: str) -> list[float]:
    """The numbers behind a keyword, here and in the parts that hold as well."""
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


def _inside(keyword: str, value: Any, path: str, field: str) -> list[tuple[Any, str]]:
    """The schemas inside one keyword's value."""
    here = f"{path}/{keyword}"
    kind = HONOURED.get(keyword)
    if kind is None:
        if keyword in SILENT or (keyword.startswith("x-") and keyword != "x-guidance"):
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
