"""Normalise a JSON schema: one dialect (2020-12), local references only, known keywords only.

In: a schema of any draft from 4 on. Out: a Normal record:

    schema     the same assertions in 2020-12; every $ref is "#" or "#/$defs/NAME"
    ignored    keywords that assert nothing by the standard and are not well known ("$default"), of
               each part apart
    places     name under $defs -> its place in the given schema
    parts      the names under $defs of the parts that must each have a document (SCHEMA_PART)

Invariant: no assertion is lost. An unknown keyword is an annotation, as the standard says; the
warning about one that resembles an assertion ("requierd") names that too. Assertions that nothing
here can enforce are refused by name. lower.py then turns the result into what llguidance accepts.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import product
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from verbatim.base.errors import ParameterError, UnsupportedError
from verbatim.base.json_io import JsonMapping, JsonObject
from verbatim.base.params import SCHEMA_PART

MAX_DEPTH = 64  # levels of nested schemas
MAX_NODES = 50_000  # schemas in all; a schema of 1 MiB has about 30,000

# keyword -> subschemas in its value: "" none, "one" a schema, "many" a list or mapping of schemas
ASSERTIONS = {
    "type": "", "enum": "", "const": "",
    "allOf": "many", "anyOf": "many", "oneOf": "many", "not": "one",
    "if": "one", "then": "one", "else": "one", "dependentSchemas": "many", "dependentRequired": "",
    "properties": "many", "patternProperties": "many", "additionalProperties": "one",
    "propertyNames": "one", "unevaluatedProperties": "one",
    "required": "", "minProperties": "", "maxProperties": "",
    "items": "one", "prefixItems": "many", "unevaluatedItems": "one", "minItems": "",
    "maxItems": "", "uniqueItems": "", "contains": "one", "minContains": "", "maxContains": "",
    "minLength": "", "maxLength": "", "pattern": "", "format": "",
    "minimum": "", "maximum": "", "exclusiveMinimum": "", "exclusiveMaximum": "", "multipleOf": "",
}  # fmt: skip
# Keywords of the standard, and very common ones, that assert nothing: not worth a warning.
ANNOTATIONS = {
    "$schema", "$id", "id", "$comment", "$anchor", "$dynamicAnchor", "$recursiveAnchor",
    "$vocabulary", "$defs", "definitions", "title", "description", "default", "examples", "example",
    SCHEMA_PART, "deprecated", "readOnly", "writeOnly", "discriminator", "markdownDescription",
}  # fmt: skip
# Assertions, of the standard or of validators' extensions, that are not supported.
REFUSED = {
    "$dynamicRef", "$recursiveRef", "extends", "disallow", "divisibleBy", "x-guidance",
    "formatMinimum", "formatMaximum", "formatExclusiveMinimum", "formatExclusiveMaximum",
    "patternRequired", "deepRequired", "allRequired", "anyRequired", "oneRequired",
    "deepProperties", "uniqueItemProperties", "exclusiveRange",
}  # fmt: skip
# JavaScript values that no JSON document contains (ajv-keywords): such a schema matches nothing.
_NOT_JSON = {
    "instanceof": {"Function", "RegExp", "Date", "Promise", "Map", "Set", "Error", "Buffer"},
    "typeof": {"function", "undefined", "symbol", "bigint"},
}
_POINTER = r"(/([^~/]|~[01])*)*"
FORMATS = {
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"
}  # fmt: skip
SUBSETS = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri"}
PATTERNS = {
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]*)(#|{_POINTER})$",
    "uri-reference": r"^[A-Za-z0-9._~/-]*(\?[A-Za-z0-9._~/=&-]*)?(#[A-Za-z0-9._~/-]*)?$",
}
PATTERNS["iri-reference"] = PATTERNS["uri-template"] = PATTERNS["uri-reference"]
KNOWN_FORMATS = {*FORMATS, *SUBSETS, *PATTERNS, "regex"}
_MISTAKABLE = sorted({*ASSERTIONS, "$ref", "dependencies", "additionalItems"})


@dataclass(frozen=True, slots=True)
class Normal:
    schema: Any
    ignored: tuple[tuple[str, ...], ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)
    parts: Collection[str] = ()


@dataclass(slots=True)
class _Document:
    """The schema as given: where each $id and anchor points."""

    root: Any
    legacy: bool  # draft 7 or older: keywords beside a $ref have no effect
    ids: JsonObject = field(default_factory=dict)  # absolute URI -> node
    bases: dict[int, str] = field(default_factory=dict)  # id(node) -> base URI inside it


def normalise(schema: Any, field: str = "json_schema") -> Normal:
    """Raise ParameterError or UnsupportedError, naming the field, keyword and path, unless every
    assertion of the schema is one that this package knows."""
    work = _Normaliser(schema, field)
    normal = work.node(schema, "#", 0)
    if work.defs and isinstance(normal, dict):
        normal = {**normal, "$defs": work.finished_defs()}
    ignored: dict[str, list[str]] = {}
    for part, name in sorted(work.ignored, key=lambda key: (key[1].startswith("format: "), key)):
        ignored.setdefault(part, []).append(work.ignored[part, name])
    parts = [work.defs[node] for node in work.parts]
    return Normal(normal, tuple(map(tuple, ignored.values())), work.places, parts)


class _Normaliser:
    def __init__(self, schema: Any, field: str) -> None:
        self.field = field
        self.document = _read_document(schema)
        # (place of the part, or "", keyword) -> the keyword, its place and its likely meaning
        self.ignored: dict[tuple[str, str], str] = {}
        self.places: dict[str, str] = {}
        self.parts: dict[int, str] = {}  # id(node with SCHEMA_PART) -> its place
        self.defs: dict[int, str] = {}  # id(target node) -> its name under $defs
        self._bodies: JsonObject = {}
        self._queue: list[tuple[str, Any, str]] = []  # targets that are not normalised yet
        self._nodes = 0

    def finished_defs(self) -> JsonObject:
        """Every target of a $ref, by its new name; targets may refer to further targets."""
        while self._queue:
            name, target, path = self._queue.pop()
            self._bodies[name] = self._body(target, path, 0)
        return dict(sorted(self._bodies.items()))

    def node(self, node: Any, path: str, depth: int) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise UnsupportedError(self.field, f"has more than {MAX_NODES} parts")
        if depth > MAX_DEPTH:
            raise UnsupportedError(self.field, f"is nested more than {MAX_DEPTH} deep")
        if isinstance(node, bool):
            return node
        if not isinstance(node, Mapping):
            raise ParameterError(self.field, f"at {path}: a schema is an object, true or false")
        if SCHEMA_PART in node:
            return {"$ref": self._definition(node, "part", path)}
        return self._body(node, path, depth)

    def _body(self, node: Any, path: str, depth: int) -> Any:
        if isinstance(node, bool):
            return node
        if "$ref" in node and self.document.legacy:
            return {"$ref": self._reference(node, path)}
        if _matches_nothing(node):
            return False
        out: JsonObject = {}
        for keyword, value in _renamed(node).items():
            if keyword == "$ref":
                out["$ref"] = self._reference(node, path)
            elif keyword in ASSERTIONS:
                out[keyword] = self._value(keyword, value, f"{path}/{keyword}", depth)
            else:
                self._annotation(keyword, path)
        _check_values(out, path, self.field)
        return _without_idle(out)

    def _value(self, keyword: str, value: Any, path: str, depth: int) -> Any:
        if keyword == "required" and isinstance(value, bool):
            raise UnsupportedError(
                self.field,
                f"the keyword 'required' (at {path}) is a list of names since draft 4; "
                "move it to the object",
            )
        if (expected := _expected(keyword, value)) is not None:
            raise ParameterError(self.field, f"at {path}: {value!r:.40} is not {expected}")
        if keyword in ("enum", "const") and (number := _rounded(value)) is not None:
            raise UnsupportedError(
                self.field,
                f"the integer {number} (at {path}) has too many digits: the grammar would write "
                "another one; use a string",
            )
        if keyword == "format" and value not in KNOWN_FORMATS:
            self._ignore(f"format: {value}", path.removesuffix("/format"))
        kind = ASSERTIONS[keyword]
        if kind == "one":
            return self.node(value, path, depth + 1)
        if kind == "many" and isinstance(value, list):
            return [self.node(s, f"{path}/{i}", depth + 1) for i, s in enumerate(value)]
        if kind == "many":
            return {
                name: self.node(s, f"{path}/{escaped(name)}", depth + 1)
                for name, s in value.items()
            }
        return int(value) if keyword in _COUNTS else value

    def _annotation(self, keyword: str, path: str) -> None:
        if keyword in REFUSED:
            raise UnsupportedError(
                self.field, f"the keyword {keyword!r} (at {path}) is not supported"
            )
        if keyword not in ANNOTATIONS:
            self._ignore(keyword, path)

    def _ignore(self, keyword: str, path: str) -> None:
        """Note a keyword or format that asserts nothing, once for each part."""
        inside = (place for place in self.parts.values() if f"{path}/".startswith(f"{place}/"))
        part = next(inside, "")
        if (part, keyword) in self.ignored:
            return
        close = difflib.get_close_matches(keyword, _MISTAKABLE, 1, 0.85)
        similar = close and not keyword.startswith(("x-", "$"))
        hint = f"; did you mean {close[0]!r}?" if similar else ""
        where = f" (at {path}{hint})" if part or hint else ""
        self.ignored[part, keyword] = f"{keyword}{where}"

    def _reference(self, node: JsonMapping, path: str) -> str:
        """The new $ref. Its target gets a name under $defs, whatever its place was before."""
        ref = node["$ref"]
        if not isinstance(ref, str):
            raise ParameterError(self.field, f"$ref (at {path}): {ref!r:.40} is not a string")
        target = _resolve(ref, node, self.document)
        if target is None:
            where = f"{ref!r} (at {path})"
            if ref.startswith("#"):
                raise ParameterError(self.field, f"$ref {where} points to nothing in the schema")
            raise UnsupportedError(
                self.field, f"$ref outside the schema is not supported, nothing is fetched: {where}"
            )
        if target is self.document.root:
            return "#"
        return self._definition(target, unquote(ref.rsplit("/", 1)[-1]), ref)

    def _definition(self, target: Any, stem: str, place: str) -> str:
        """The $ref to a part of the schema, which becomes a definition."""
        if id(target) not in self.defs:
            if isinstance(target, Mapping) and SCHEMA_PART in target:
                self.parts[id(target)] = place
            stem = re.sub(r"\W+", "_", stem).strip("_")[:40]
            name = self.defs[id(target)] = f"{stem or 'part'}.{len(self.defs)}"
            self._queue.append((name, target, place))
            self.places[name] = place
        return f"#/$defs/{self.defs[id(target)]}"


# --- references


def escaped(name: str) -> str:
    """A name as a part of a JSON pointer.

    >>> escaped("a/b~c")
    'a~1b~0c'
    """
    return name.replace("~", "~0").replace("/", "~1")


def _read_document(root: Any) -> _Document:
    dialect = str(root.get("$schema", "")) if isinstance(root, Mapping) else ""
    document = _Document(root, bool(re.search(r"draft-0[3-7]", dialect)))
    stack = [(root, "")]
    while stack:
        node, base = stack.pop()
        if isinstance(node, list):
            stack += [(part, base) for part in node]
        if not isinstance(node, Mapping):
            continue
        for name in ("$id", "id"):
            if isinstance(node.get(name), str):
                base = urldefrag(_join(base, node[name])).url
                document.ids.setdefault(_join(base, node[name]).removesuffix("#"), node)
        for name in ("$anchor", "$dynamicAnchor"):
            if isinstance(node.get(name), str):
                document.ids.setdefault(f"{base}#{node[name]}", node)
        document.bases[id(node)] = base
        stack += [
            (value, base)
            for name, value in node.items()
            if isinstance(value, (Mapping, list)) and name not in ("enum", "const", "default")
        ]
    return document


def _resolve(ref: str, node: Any, document: _Document) -> Any:
    """The schema that a $ref names, or None."""
    base = document.bases.get(id(node), "")
    url, fragment = urldefrag(_join(base, ref) if base else ref)
    whole = f"{url}#{fragment}" if fragment else url
    if whole in document.ids:
        return document.ids[whole]
    home = document.ids.get(url, document.root if url in ("", base) else None)
    for start in (home, document.root) if ref.startswith("#") else (home,):
        found = _at_pointer(start, fragment)
        if found is not None:
            return found
    return None


def _at_pointer(node: Any, fragment: str) -> Any:
    if fragment and not fragment.startswith("/"):
        return None
    for raw in fragment.split("/")[1:]:
        part = unquote(raw).replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        else:
            return None
    return node if isinstance(node, (Mapping, bool)) else None


def _join(base: str, ref: str) -> str:
    try:
        return urljoin(base, ref)
    except ValueError:  # not a URI
        return ref


# --- older drafts


def _renamed(node: JsonMapping) -> JsonObject:
    """The node with the keywords of older drafts under their names of 2020-12."""
    out = dict(node)
    items = out.get("items")
    if isinstance(items, list):
        out["prefixItems"] = items
        del out["items"]
        if "additionalItems" in out:
            out["items"] = out["additionalItems"]
    out.pop("additionalItems", None)  # without a list of items it asserts nothing
    for open_bound, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(out.get(open_bound), bool):  # draft 4
            strict = out.pop(open_bound)
            if strict and bound in out:
                out[open_bound] = out.pop(bound)
    dependencies = out.pop("dependencies", None)
    if isinstance(dependencies, Mapping):
        for name, value in dependencies.items():
            keyword = "dependentRequired" if isinstance(value, list) else "dependentSchemas"
            out[keyword] = {**out.get(keyword, {}), name: value}
    if "if" not in out:  # then and else have no effect without it
        out.pop("then", None)
        out.pop("else", None)
    return out


def _matches_nothing(node: JsonMapping) -> bool:
    return any(node.get(name) in values for name, values in _NOT_JSON.items() if name in node)


def _without_idle(node: JsonObject) -> JsonObject:
    """The node without assertions that every document meets."""
    if node.get("uniqueItems") is False:
        del node["uniqueItems"]
    if node.get("propertyNames") in ({"type": "string"}, {}, True):
        del node["propertyNames"]
    return node


# --- values


_COUNTS = {
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
    "minContains", "maxContains",
}  # fmt: skip
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_TEXTS = {"pattern", "format"}
_SCHEMA_LISTS = {"allOf", "anyOf", "oneOf", "prefixItems"}


def _expected(keyword: str, value: Any) -> str | None:
    """The kind of value that a keyword needs, for an error; None if it has such a value."""
    number = (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )
    if keyword in _COUNTS:
        return None if number and value >= 0 and value == int(value) else "a count"
    if keyword in _NUMBERS:
        return None if number else "a finite number"
    if keyword in _TEXTS:
        return None if isinstance(value, str) else "a string"
    if keyword == "uniqueItems":
        return None if isinstance(value, bool) else "true or false"
    if keyword == "enum":
        return None if isinstance(value, list) else "a list"
    if keyword == "required":
        return None if _names(value) else "a list of names"
    if keyword == "dependentRequired":
        fits = isinstance(value, Mapping) and all(map(_names, value.values()))
        return None if fits else "a mapping of names to lists of names"
    if keyword in _SCHEMA_LISTS:
        return None if isinstance(value, list) else "a list of schemas"
    if ASSERTIONS[keyword] == "many":
        return None if isinstance(value, Mapping) else "a mapping of names to schemas"
    return None


def rounds(number: float) -> bool:
    """Whether llguidance, which keeps numbers as doubles, writes another integer than this one.

    >>> rounds(2**53 - 1), rounds(2**53 + 1), rounds(10**22), rounds(1e300)
    (False, True, False, False)
    """
    if not isinstance(number, int) or abs(number) <= 2**53:
        return False
    try:
        return Decimal(repr(float(number))) != number
    except OverflowError:
        return True


def _rounded(value: Any) -> int | None:
    """An integer inside the value of an enum or const that llguidance would change."""
    if isinstance(value, (list, Mapping)):
        parts = value if isinstance(value, list) else value.values()
        return next((found for part in parts if (found := _rounded(part)) is not None), None)
    return value if isinstance(value, int) and rounds(value) else None


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _check_values(node: JsonMapping, path: str, field: str) -> None:
    """Reject values that llguidance 1.9 reads in another way: multipleOf -2 as 2, and an
    open bound less than 1 away from the other bound as a closed one ("0" for {"exclusiveMinimum":
    0, "maximum": 0.5})."""
    for step in bounds(node, "multipleOf"):
        if step <= 0:
            raise ParameterError(field, f"multipleOf (at {path}): {step} is not above 0")
    if node.get("type") == "integer":
        return
    for open_end, name, sign in (
        ("exclusiveMinimum", "maximum", 1),
        ("exclusiveMinimum", "exclusiveMaximum", 1),
        ("exclusiveMaximum", "minimum", -1),
        ("exclusiveMaximum", "exclusiveMinimum", -1),
    ):
        for bound, other in product(bounds(node, open_end), bounds(node, name)):
            if bound == int(bound) and 0 < sign * (other - bound) < 1:
                raise UnsupportedError(
                    field,
                    f"{open_end} {bound} together with {name} {other}, less than one away (at "
                    f"{path}), is not supported; use minimum or maximum instead, or a pattern",
                )


def bounds(node: JsonMapping, name: str) -> list[float]:
    """The numeric values of a keyword in this schema and in its allOf parts."""
    parts = node.get("allOf")
    nodes = [node, *(parts if isinstance(parts, list) else ())]
    found = [part.get(name) for part in nodes if isinstance(part, Mapping)]
    return [n for n in found if isinstance(n, (int, float)) and not isinstance(n, bool)]
