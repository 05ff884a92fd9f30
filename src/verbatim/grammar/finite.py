"""Reject JSON schemas that no finite document satisfies.

In: a schema. Out: the keyword that forces infinite recursion, or None. Example:

    {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}

requires infinitely nested objects. A grammar would accept every prefix and no complete document, so
the model would write until max_tokens. The algorithm is a least fixed point: start with no schema
known to be finite, add each schema that needs only finite ones, repeat until nothing changes.
Invariant: a schema with a finite document is never rejected; unknown rules count as finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from verbatim.base.json_io import JsonMapping
from verbatim.grammar.json_schema import escaped

Known = Callable[[Any], bool]
MAX_VISITS = 200_000  # schema nodes; some tenths of a second, then the schema counts as finite

_ONE_SCHEMA = ("additionalProperties", "items")
_MANY_SCHEMAS = (
    *("allOf", "anyOf", "oneOf", "$defs", "definitions", "properties", "patternProperties"),
    "prefixItems",
)


def infinite_keyword(schema: Any) -> str | None:
    """The keyword whose recursion has no end, so that every document is infinite, or None."""
    known = _finite_parts(schema)
    return None if known(schema) else _blocked(schema, schema, known)


def infinite_definitions(schema: Any) -> list[str]:
    """The names under $defs of schemas without a finite document."""
    known = _finite_parts(schema)
    parts = schema.get("$defs", {}) if isinstance(schema, Mapping) else {}
    return [name for name, part in parts.items() if not known(part)]


def _finite_parts(schema: Any) -> Known:
    """Whether a part of the schema has a finite document."""
    nodes = list(_nodes(schema))
    finite: dict[int, bool] = {id(node): False for node in nodes}

    def known(part: Any) -> bool:
        return finite.get(id(part), True)  # true and false are not nodes; llguidance rejects false

    changed, visited = True, 0
    while changed:
        changed = False
        for node in reversed(nodes):  # innermost first: most schemas need one round
            if not finite[id(node)] and _blocked(node, schema, known) is None:
                finite[id(node)] = changed = True
        visited += len(nodes)
        if visited > MAX_VISITS:
            return lambda _: True
    return known


def _nodes(schema: Any) -> Iterator[JsonMapping]:
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, Mapping):
            yield node
            stack += [node[k] for k in _ONE_SCHEMA if k in node]
            for value in map(node.get, _MANY_SCHEMAS):
                if isinstance(value, (Mapping, list)):
                    stack += value.values() if isinstance(value, Mapping) else value


def _blocked(node: JsonMapping, root: Any, finite: Known) -> str | None:
    """The first keyword of this schema that requires a part not known to be finite."""
    if "$ref" in node and not finite(_target(node["$ref"], root)):
        return "$ref"
    for keyword in ("anyOf", "oneOf"):
        if keyword in node and not any(finite(part) for part in node[keyword]):
            return keyword
    return next((keyword for keyword, _, part in needed(node) if not finite(part)), None)


def needed(node: JsonMapping) -> Iterator[tuple[str, str, Any]]:
    """The parts that every document of a schema satisfies, or has: (the keyword that says so, the
    place of the part below the schema, the part)."""
    for i, part in enumerate(node.get("allOf", ())):
        yield "allOf", f"/allOf/{i}", part
    if "enum" in node or "const" in node:
        return
    if node.get("type") in ("object", ["object"]):
        for name in node.get("required", ()):
            if name in (properties := node.get("properties", {})):
                yield "required", f"/properties/{escaped(name)}", properties[name]
            elif "patternProperties" not in node and "additionalProperties" in node:
                yield "required", "/additionalProperties", node["additionalProperties"]
    if node.get("type") in ("array", ["array"]):
        count, first = int(node.get("minItems", 0)), node.get("prefixItems", [])
        for i, part in enumerate(first[:count]):
            yield "minItems", f"/prefixItems/{i}", part
        if count > len(first) and not isinstance(node.get("items"), list):
            yield "minItems", "/items", node.get("items", True)


def _target(ref: Any, root: Any) -> Any:
    """The target of a $ref within the schema; True (finite) for any other $ref."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return True
    node = root
    for part in ref[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping) and part in node:
            node = node[part]
        else:
            return True
    return node if ref == "#" or ref.startswith("#/") else True
