"""Is there a finite document under a JSON schema? (schema) -> the keyword that forbids it, or None.

    {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}

asks for an object within an object without end. A grammar accepts its every beginning and never its end, so a model would write
until its last token. We look for the least set of schemas that have a finite value: start with none, add those that need only what
is in the set, until nothing changes. Where a rule is not understood, or the search takes too long, the schema is taken to be finite: nothing
honest is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Known = Callable[[Any], bool]
MOST_LOOKS = 200_000  # some tenths of a second

_INSIDE_ONE = ("additionalProperties", "items")
_INSIDE_MANY = (
    "allOf",
    "anyOf",
    "oneOf",
    "$defs",
    "definitions",
    "properties",
    "patternProperties",
    "prefixItems",
)


def endless(schema: Any) -> str | None:
    """The keyword by which every document of this schema would have to contain itself; None if there is a finite one."""
    nodes = list(_nodes(schema))
    finite: dict[int, bool] = {id(node): False for node in nodes}

    def known(part: Any) -> bool:
        return finite.get(
            id(part), True
        )  # true and false are no nodes; false is llguidance's to refuse

    changed, looked = True, 0
    while changed:
        changed = False
        for node in reversed(nodes):  # the innermost first: most schemas are done in one round
            if not finite[id(node)] and _blocked(node, schema, known) is None:
                finite[id(node)] = changed = True
        looked += len(nodes)
        if looked > MOST_LOOKS:
            return None
    return (
        _blocked(schema, schema, known)
        if isinstance(schema, Mapping) and not finite[id(schema)]
        else None
    )


def _nodes(schema: Any) -> Iterator[Mapping[str, Any]]:
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, Mapping):
            yield node
            stack += [node[k] for k in _INSIDE_ONE if k in node]
            for k in _INSIDE_MANY:
                value = node.get(k)
                stack += (
                    value.values()
                    if isinstance(value, Mapping)
                    else value
                    if isinstance(value, list)
                    else []
                )


def _blocked(node: Mapping[str, Any], root: Any, finite: Known) -> str | None:
    """The first keyword of this schema that needs something not known to be finite."""
    if "$ref" in node and not finite(_target(node["$ref"], root)):
        return "$ref"
    if not all(finite(part) for part in node.get("allOf", ())):
        return "allOf"
    for keyword in ("anyOf", "oneOf"):
        if keyword in node and not any(finite(part) for part in node[keyword]):
            return keyword
    if "enum" in node or "const" in node:
        return None
    kinds = node.get("type")
    if kinds in ("object", ["object"]):
        return "required" if not all(finite(part) for part in _required(node)) else None
    if kinds in ("array", ["array"]):
        return "minItems" if not all(finite(part) for part in _least_items(node)) else None
    return None  # some other value is free to be chosen


def _required(node: Mapping[str, Any]) -> Iterator[Any]:
    properties = node.get("properties", {})
    for name in node.get("required", ()):
        if name in properties:
            yield properties[name]
        elif "patternProperties" not in node:
            yield node.get("additionalProperties", True)


def _least_items(node: Mapping[str, Any]) -> Iterator[Any]:
    count = node.get("minItems", 0)
    first = node.get("prefixItems", [])
    yield from first[: int(count)]
    if count > len(first) and not isinstance(node.get("items"), list):
        yield node.get("items", True)


def _target(ref: Any, root: Any) -> Any:
    """What a $ref within the schema points at; True (finite) for any other."""
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
