"""Lower a normalised JSON schema to what llguidance enforces, and name what is left to check.

In: the schema of json_schema.normalise(). Out: a Lowered record:

    schema   what llguidance accepts; every valid document satisfies it
    checked  keywords that it does not enforce, or not wholly; document_check.py does
    impossible  why no array, or no object, satisfies a part

Invariant: the lowered schema admits every document of the given one, except that some formats
admit a subset (`iri` is written as `uri`) and patterns leave out what validators disagree on. So a
structure without `checked` keywords is exact, and one with them is exact after the check of the
document.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from verbatim.base.errors import UnsupportedError
from verbatim.base.json_io import JsonMapping, JsonObject
from verbatim.grammar.ecma_pattern import rust_pattern
from verbatim.grammar.json_schema import ASSERTIONS, FORMATS, PATTERNS, SUBSETS, bounds, rounds
from verbatim.grammar.llguidance_tokenizer import completions, string_matcher

MAX_CONDITIONALS = 6  # if/then/else written as alternatives; each one doubles the grammar
MAX_NAME = 1000  # characters; longer bounds on a name's length are checked
MAX_VISITS = 2000  # beginnings of names, to count the names of a pattern; some 50 ms
MAX_RANGE = 256  # integers of a range that counts as a list of values

# Formats of names, as llguidance 1.9 reads them; it takes no format for a name.
_DATE = (
    "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|[12][0-9]))"
)
_HOUR = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:([0-5][0-9]|60)(\.[0-9]+)?([zZ]|[+-]{_HOUR})"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
NAME_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
}
CHECKED = (
    "not", "dependentRequired", "dependentSchemas", "contains", "minContains", "maxContains",
    "unevaluatedItems",
)  # fmt: skip
_REWRITTEN = (
    *("if", "then", "else", "propertyNames", "unevaluatedProperties", "uniqueItems", "format"),
)
# Keywords that llguidance enforces unchanged -> what their value holds, as in ASSERTIONS
DIRECT = {
    **{name: kind for name, kind in ASSERTIONS.items() if name not in (*CHECKED, *_REWRITTEN)},
    "$ref": "",
    "$defs": "many",
}
_LIST_OF_NAMES = re.compile(r"\^([\w-]+)\$|\^\((?:\?:)?([\w-]+(?:\|[\w-]+)*)\)\$")
_IDLE: tuple[tuple[str, Any], ...] = (("unevaluatedItems", True), ("unevaluatedItems", {}))


@dataclass(frozen=True, slots=True)
class Options:
    """What to leave to the check because llguidance does not follow it here."""

    conditionals: bool = True  # write if/then/else as alternatives
    patterns: bool = True  # keep patternProperties that may overlap
    one_of: bool = True  # keep oneOf, whose parts llguidance must find disjoint; else anyOf
    counts: bool = True  # keep minProperties and maxProperties where llguidance may count names
    bounds: bool = True  # keep bounds beyond 2**53, which llguidance keeps as doubles or 64 bits


@dataclass(slots=True)
class Lowered:
    schema: Any = None
    checked: set[str] = field(default_factory=set)
    impossible: list[str] = field(default_factory=list)


def lower(schema: Any, options: Options = Options()) -> Lowered:
    work = _Lowering(schema, options)
    work.result.schema = work.node(schema)
    return work.result


class _Lowering:
    def __init__(self, root: Any, options: Options) -> None:
        self.root, self.options = root, options
        self.result = Lowered()
        self._conditionals = 0

    def node(self, node: Any, scope: JsonMapping | None = None) -> Any:
        """Lower one schema to the keywords that llguidance enforces. `scope`: properties declared
        by the schema that contains this one in its allOf."""
        if isinstance(node, bool):
            return node
        if node.get("not") in (True, {}):
            return False
        scope = {**(scope or {}), **_mapping(node.get("properties"))}
        out: JsonObject = {}
        for keyword, value in node.items():
            if keyword in DIRECT:
                out[keyword] = self._value(keyword, value, scope if keyword == "allOf" else None)
            elif keyword in CHECKED and (keyword, value) not in _IDLE:
                self.result.checked.add(keyword)
        self._number(node, out)
        self._string(node, out)
        self._array(node, out)
        self._object(node, out)
        if "oneOf" in out and not self.options.one_of:
            self.result.checked.add("oneOf")
            out["allOf"] = [*out.get("allOf", []), {"anyOf": out.pop("oneOf")}]
        if "if" in node:
            self._conditional(node, out, scope)
        return False if out.get("type") == [] else _names_together(out)

    def _value(self, keyword: str, value: Any, scope: JsonMapping | None) -> Any:
        kind = DIRECT[keyword]
        if kind == "one":
            return self.node(value)
        if kind == "many" and isinstance(value, list):
            return [self.node(part, scope) for part in value]
        if keyword == "patternProperties":
            value = {rust_pattern(name, common=False): part for name, part in value.items()}
        if kind == "many":
            return {name: self.node(part) for name, part in value.items()}
        return rust_pattern(value, common=True) if keyword == "pattern" else value

    def _number(self, node: JsonMapping, out: JsonObject) -> None:
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            bound = node.get(keyword, 0)
            # llguidance computes the first integer inside an open bound as a double, which rounds
            # 2**53 + 1 to 2**53: write the closed bound, which admits one more value.
            closed = keyword.removeprefix("exclusive").lower()
            widened = closed != keyword and abs(bound) >= 2**53
            dropped = abs(bound) > 2**53 and not self.options.bounds
            if dropped or widened:
                del out[keyword]
            if widened and not dropped:
                out.setdefault(closed, bound)
            if dropped or widened or rounds(bound):
                self.result.checked.add(keyword)

    def _string(self, node: JsonMapping, out: JsonObject) -> None:
        named = node.get("format")
        if named is None:
            return
        named = SUBSETS.get(named, named)
        if named in FORMATS:
            out["format"] = named
        elif named == "regex":
            self.result.checked.add("format")
        elif named in PATTERNS:
            out["allOf"] = [*out.get("allOf", []), {"pattern": PATTERNS[named]}]

    # ------------------------------------------------------------------------------- arrays

    def _array(self, node: JsonMapping, out: JsonObject) -> None:
        if "contains" in node and node.get("minContains", 1) > 0:
            out["minItems"] = max(1, out.get("minItems", 0))
            if self.node(node["contains"]) is False:
                self._without_type(out, "array", "contains: nothing satisfies it")
        if node.get("uniqueItems") is not True:
            return
        self.result.checked.add("uniqueItems")
        values = finite_items(node, self.root)
        if values is not None:
            out["maxItems"] = min([len(values), *map(int, bounds(node, "maxItems"))])
            least = max(bounds(node, "minItems"), default=0)
            if out["maxItems"] < least:
                why = f"minItems {least} with uniqueItems: there are only {len(values)}"
                self._without_type(out, "array", f"{why} different items")

    def _without_type(self, out: JsonObject, kind: str, why: str) -> None:
        """No array, or no object, satisfies the schema; a value of another type may."""
        types = out.get("type", ["null", "boolean", "number", "string", "array", "object"])
        types = [types] if isinstance(types, str) else types
        out["type"] = [name for name in types if name != kind]
        self.result.impossible.append(why)

    # ------------------------------------------------------------------------------ objects

    def _object(self, node: JsonMapping, out: JsonObject) -> None:
        if "propertyNames" in node:
            self._names(node, out)
        if "unevaluatedProperties" in node:
            self._unevaluated(node, out)
        self._listed_names(out)
        patterns = _mapping(out.get("patternProperties"))
        if len(patterns) > 1 and len({str(part) for part in patterns.values()}) == 1:
            joined = "|".join(f"({pattern})" for pattern in patterns)
            out["patternProperties"] = {joined: next(iter(patterns.values()))}
        elif patterns and not self.options.patterns:
            self.result.checked.add("patternProperties")
            del out["patternProperties"]
            out.pop("additionalProperties", None)
        if not self.options.counts or _counts_names(node):
            for keyword in ("minProperties", "maxProperties"):
                if out.pop(keyword, None) is not None:
                    self.result.checked.add(keyword)
        self._other_names(out)
        self._count(node, out)

    def _count(self, node: JsonMapping, out: JsonObject) -> None:
        """Exclude objects that would need more names than they may have."""
        least = int(max(bounds(node, "minProperties"), default=0))
        most = int(min(bounds(node, "maxProperties"), default=least))
        if most < least:
            self._without_type(out, "object", f"minProperties {least} with maxProperties {most}")
        elif least and out.get("additionalProperties") is False:
            patterns, properties = (
                _mapping(out.get(keyword)) for keyword in ("patternProperties", "properties")
            )
            if (fewer := fewer_names(patterns, properties, least)) is not None:
                why = f"minProperties {least}: there are only {fewer} different names"
                self._without_type(out, "object", why)

    def _listed_names(self, out: JsonObject) -> None:
        """Write a pattern that lists names, such as ^(a|b)$, as properties: the grammar writes each
        once, and knows when none is left."""
        patterns = dict(out.get("patternProperties", {}))
        properties = dict(out.get("properties", {}))
        for pattern in list(patterns):
            if found := _LIST_OF_NAMES.fullmatch(pattern):
                part = patterns.pop(pattern)
                for name in (found[1] or found[2]).split("|"):
                    parts = [properties[name], part] if name in properties else [part]
                    properties[name] = {"allOf": parts} if len(parts) > 1 else part
        if len(patterns) < len(out.get("patternProperties", {})):
            out["properties"] = properties
            out.pop("patternProperties")
            if patterns:
                out["patternProperties"] = patterns

    def _other_names(self, out: JsonObject) -> None:
        """Names that are not declared: llguidance 1.9 compares them with the declared names as
        written, so it takes "\\u0061" for another name than "a". In a pattern it admits only the
        escapes of control characters, so the names of an open object become a pattern that every
        name matches. What this cannot express is left to the check."""
        rest, patterns = out.get("additionalProperties", True), out.get("patternProperties")
        if rest is False or not (out.get("properties") or patterns):
            return
        counted = "minProperties" in out or "maxProperties" in out
        if rest in (True, {}) and not patterns and not counted and self.options.patterns:
            out["patternProperties"], out["additionalProperties"] = {"": True}, False
        else:
            self.result.checked.add("additionalProperties")

    def _names(self, node: JsonMapping, out: JsonObject) -> None:
        """propertyNames: a list of names or a pattern where the object declares none, or admits any
        further ones; what this does not express is checked."""
        names, rest = node["propertyNames"], self.node(node.get("additionalProperties", True))
        if _no_name(names):
            out.pop("patternProperties", None)
            out["properties"], out["additionalProperties"] = {}, False
            return
        declared = "properties" in node or "patternProperties" in node
        pattern, exact = _name_pattern(names, self.root)
        values = finite_values(names, self.root)
        if declared or not (exact if values is None else _only_lists(names, self.root)):
            self.result.checked.add("propertyNames")
        if (declared and rest not in (True, {})) or "patternProperties" in node:
            return
        if values is not None:
            listed = {name: rest for name in values if isinstance(name, str)}
            out["properties"] = {**listed, **_mapping(out.get("properties"))}
            out["additionalProperties"] = False
        elif pattern is not None:
            out["patternProperties"], out["additionalProperties"] = {pattern: rest}, False

    def _unevaluated(self, node: JsonMapping, out: JsonObject) -> None:
        """Lower unevaluatedProperties: false to a closed object whose keys are the names that any
        subschema (allOf, anyOf, $ref, ...) declares; a DocumentCheck verifies the rest."""
        if node["unevaluatedProperties"] in (True, {}):
            return
        self.result.checked.add("unevaluatedProperties")
        parts = list(_in_place(node, self.root))
        for pattern in (name for part in parts for name in _mapping(part.get("patternProperties"))):
            if sum(map(pattern.count, "*+{")) > 1:  # the validator would match it by backtracking
                raise UnsupportedError(
                    "json_schema",
                    "'unevaluatedProperties' together with the name pattern "
                    f"{pattern!r} is not supported; use additionalProperties",
                )
        others = ("additionalProperties", "patternProperties", "unevaluatedProperties")
        if node["unevaluatedProperties"] is not False or any(
            name in part for part in parts for name in (others[:2] if part is node else others)
        ):
            return
        names = {name: True for part in parts for name in _mapping(part.get("properties"))}
        out["properties"] = {**names, **_mapping(out.get("properties"))}
        out["additionalProperties"] = False

    # ------------------------------------------------------------------------- conditionals

    def _conditional(self, node: JsonMapping, out: JsonObject, scope: JsonMapping) -> None:
        """Either `if` and `then` hold, or `else` holds and, where it can be written, `if` not."""
        self.result.checked.add("if")
        self._conditionals += 1
        if not self.options.conditionals or self._conditionals > MAX_CONDITIONALS:
            return
        holds = {"allOf": [self.node(node["if"]), self.node(node.get("then", True))]}
        fails = {"allOf": [self._negation(node["if"], scope), self.node(node.get("else", True))]}
        out["allOf"] = [*out.get("allOf", []), {"anyOf": [holds, fails]}]

    def _negation(self, test: Any, scope: JsonMapping) -> Any:
        """The negation of true, or of "property p is one of these values" where p has finitely many
        values; otherwise true."""
        if test in (True, {}):
            return False
        properties = _mapping(test.get("properties")) if isinstance(test, Mapping) else {}
        if len(properties) != 1 or set(test) - {"properties", "required", "type"}:
            return True
        ((name, wanted),) = properties.items()
        if test.get("type", "object") != "object" or not _only_lists(wanted, self.root):
            return True
        values = finite_values(wanted, self.root)
        possible = finite_values(scope.get(name), self.root)
        if values is None or possible is None or test.get("required", [name]) != [name]:
            return True
        rest = {"properties": {name: {"enum": _without(possible, values)}}}
        return rest if "required" in test else {**rest, "required": [name]}


# --- reading a schema


def without_definitions(node: Any, names: Collection[str]) -> Any:
    """A lowered schema without these $defs, which no document satisfies: a $ref to one is false."""
    if not isinstance(node, Mapping):
        return node
    if node.get("$ref", "").removeprefix("#/$defs/") in names:
        return False
    out = dict(node)
    for keyword, value in node.items():
        kind = DIRECT.get(keyword, "")
        if kind == "one":
            out[keyword] = without_definitions(value, names)
        elif kind and isinstance(value, list):
            out[keyword] = [without_definitions(part, names) for part in value]
        elif kind:
            kept = {n: p for n, p in value.items() if keyword != "$defs" or n not in names}
            out[keyword] = {n: without_definitions(part, names) for n, part in kept.items()}
    return out


def has_free_names(schema: Any) -> bool:
    """Whether a lowered schema may admit an object with names that it does not list. llguidance
    writes listed names once, and others as often as the model likes."""
    stack = [(schema, True, True)]  # may the schemas around each admit free names, free items?
    while stack:
        node, names, items = stack.pop()
        if node is False or (isinstance(node, Mapping) and ("enum" in node or "const" in node)):
            continue
        if not isinstance(node, Mapping):
            return True
        for part in (node, *filter(_mapping, node.get("allOf", ()))):
            types = part.get("type", ("object", "array"))
            listed = part.get("additionalProperties") is False and not part.get("patternProperties")
            names = names and "object" in types and not listed
            items = items and "array" in types and "items" not in part and part.get("maxItems") != 0
        inner = [p for keyword in ("allOf", "anyOf", "oneOf") for p in node.get(keyword, ())]
        if (names or items) and "$ref" not in node and not inner:
            return True
        stack += [(part, names, items) for part in inner]
        parts = [*_mapping(node.get("properties")).values(), *_mapping(node.get("$defs")).values()]
        parts += [*node.get("prefixItems", ()), node.get("items", False)]
        stack += [(part, True, True) for part in parts]
    return False


# A pattern that repeats one kind of character, so a bound on the length is the number of repeats.
_REPEATED = re.compile(r"\^(\[(?:\\.|[^\\\]])+\]|\\[dws])([*+])\$")


def _no_name(names: Any) -> bool:
    """Whether no name matches a propertyNames, as far as it says so itself."""
    if not isinstance(names, Mapping):
        return names is False
    return bool(names.get("minLength", 0) > names.get("maxLength", math.inf))


def _name_pattern(names: Any, root: Any) -> tuple[str | None, bool]:
    """(a pattern of all names that match a propertyNames, whether it matches no others)."""
    for _ in range(8):
        if isinstance(names, Mapping) and set(names) == {"$ref"}:
            names = target(names["$ref"], root)
    if not isinstance(names, Mapping) or names.get("type", "string") != "string":
        return None, False
    rest = set(names) - {"type"}
    low, high = int(names.get("minLength", 0)), names.get("maxLength")
    if "pattern" in names:
        repeated = _REPEATED.fullmatch(names["pattern"])
        if repeated and max(low, high or 0) <= MAX_NAME:
            low, rest = max(low, repeated[2] == "+"), rest - {"minLength", "maxLength"}
            pattern = f"^{repeated[1]}{{{low:d},{'' if high is None else int(high)}}}$"
        else:
            pattern = names["pattern"]
        return rust_pattern(pattern, common=True), rest == {"pattern"}
    if names.get("format") in NAME_FORMATS:
        return f"^({NAME_FORMATS[names['format']]})$", rest == {"format"}
    if rest & {"minLength", "maxLength"} and max(low, high or 0) <= MAX_NAME:
        pattern = f"(?s:^.{{{low}}})" if high is None else f"(?s:^.{{{low},{int(high)}}}$)"
        return pattern, rest <= {"minLength", "maxLength"}
    return None, False


# A pattern whose every match has longer ones: it does not say where a name ends, or its last part
# repeats without a limit, and it has no alternatives.
_ENDLESS = re.compile(r"[^$]*|[^|$]*[^\\|$](?:[*+]|\{[0-9]+,\})\$")


def names_may_run_out(schema: Any) -> bool:
    """Whether a lowered schema may admit an object with names from a pattern that, from some
    beginning of a name on, has finitely many."""
    if isinstance(schema, Mapping):
        if any(not _ENDLESS.fullmatch(name) for name in _mapping(schema.get("patternProperties"))):
            return True
        return any(map(names_may_run_out, schema.values()))
    return isinstance(schema, list) and any(map(names_may_run_out, schema))


def fewer_names(patterns: Iterable[str], names: Iterable[str], least: int) -> int | None:
    """The number of names in `names` or under a pattern if it is less than `least`; otherwise, or
    where a search of MAX_VISITS beginnings does not show it, None."""
    found, visits = set(names), count()
    for pattern in patterns:
        matcher = string_matcher("pattern", pattern).deep_copy()
        matcher.consume_token(0x22)
        for name in completions(matcher, b"", lambda _: next(visits) < MAX_VISITS):
            if name is None or len(found) >= least:
                return None
            found.add(name)
    return len(found) if len(found) < least else None


def finite_items(node: JsonMapping, root: Any) -> list[Any] | None:
    """The values that the items of an array can have, if they are scalars from a short list."""
    return None if "prefixItems" in node else finite_values(node.get("items"), root)


def finite_values(node: Any, root: Any, depth: int = 0) -> list[Any] | None:
    """The scalars that a schema admits, or more; None if they are not a short list."""
    if not isinstance(node, Mapping) or depth > 8:
        return None
    listed = node.get("enum", [node["const"]] if "const" in node else None)
    if isinstance(listed, list):
        return (
            None if any(isinstance(value, (dict, list)) for value in listed) else distinct(listed)
        )
    if "$ref" in node:
        return finite_values(target(node["$ref"], root), root, depth + 1)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(node.get(keyword), list):
            parts = [finite_values(part, root, depth + 1) for part in node[keyword]]
            return None if None in parts else distinct([v for part in parts for v in part or ()])
    low, high = bounds(node, "minimum"), bounds(node, "maximum")
    if node.get("type") == "integer" and low and high and high[0] - low[0] < MAX_RANGE:
        return list(range(int(low[0]), int(high[0]) + 1))
    if node.get("type") == "null":
        return [None]
    return [True, False] if node.get("type") == "boolean" else None


def _only_lists(node: Any, root: Any, depth: int = 0) -> bool:
    """Whether finite_values() of the schema are exactly the values that it admits."""
    if not isinstance(node, Mapping) or depth > 8:
        return False
    if set(node) == {"$ref"}:
        return _only_lists(target(node["$ref"], root), root, depth + 1)
    if set(node) == {"anyOf"}:
        return all(_only_lists(part, root, depth + 1) for part in node["anyOf"])
    if set(node) == {"type"}:
        return node["type"] in ("null", "boolean")
    text = "type" not in node or (
        node["type"] == "string"
        and all(isinstance(value, str) for value in finite_values(node, root) or ())
    )
    return text and set(node) - {"type"} in ({"enum"}, {"const"})


def canonical(value: Any) -> Any:
    """A hashable key that is equal for equal JSON values: 1 and 1.0 are equal, 1 and true are not.

    >>> canonical([1, True]) == canonical([1.0, True]), canonical(1) == canonical(True)
    (True, False)
    """
    if isinstance(value, bool) or value is None:
        return (str(value),)
    if isinstance(value, dict):
        return frozenset((key, canonical(part)) for key, part in value.items())
    if isinstance(value, list):
        return ("list", *map(canonical, value))
    return value


def distinct(values: list[Any]) -> list[Any]:
    return list({canonical(value): value for value in values}.values())


def _without(values: list[Any], others: list[Any]) -> list[Any]:
    keys = {canonical(value) for value in others}
    return [value for value in values if canonical(value) not in keys]


def target(ref: str, root: Any) -> Any:
    """The target of a normalised $ref."""
    return root if ref == "#" else root["$defs"][ref.removeprefix("#/$defs/")]


def _in_place(node: Any, root: Any, depth: int = 0) -> Iterator[JsonMapping]:
    """The schema and all parts of it that apply to the same value."""
    if not isinstance(node, Mapping) or depth > 16:
        return
    yield node
    if "$ref" in node:
        yield from _in_place(target(node["$ref"], root), root, depth + 1)
    for keyword in ("allOf", "anyOf", "oneOf"):
        for part in node.get(keyword, ()):
            yield from _in_place(part, root, depth + 1)
    for part in _mapping(node.get("dependentSchemas")).values():
        yield from _in_place(part, root, depth + 1)
    for keyword in ("if", "then", "else"):
        yield from _in_place(node.get(keyword), root, depth + 1)


def _names_together(node: JsonObject) -> JsonObject:
    """The schema with the keywords of names side by side. llguidance intersects keywords in their
    order, so a closed object would lose names to an enum or allOf that stands before its
    patterns."""
    names = [k for k in ("properties", "patternProperties", "additionalProperties") if k in node]
    if len(names) < 2:
        return node
    keys = list(node)
    at = min(map(keys.index, names[:1] if "properties" in node else names))
    order = [k for k in keys[:at] if k not in names] + names
    return {k: node[k] for k in [*order, *keys[at:]]}


def _counts_names(node: JsonMapping) -> bool:
    """Whether the number of names in an object needs a DocumentCheck: llguidance cannot count them,
    or counts a duplicate name twice, which a JSON parser counts once."""
    required = node.get("required")
    sure = set(map(str, required)) if isinstance(required, list) else set()
    named = set(_mapping(node.get("properties")))
    spelled = node.get("additionalProperties") is False and not node.get("patternProperties")
    least = max(bounds(node, "minProperties"), default=0)
    return bool(named - sure) or (not spelled and least > max(1, len(sure)))


def _mapping(value: Any) -> JsonMapping:
    return value if isinstance(value, Mapping) else {}
