"""JSON schema keywords beyond the grammar: what is ignored, rewritten, checked or refused.

A random model writes documents through the masks; jsonschema judges them against the schema as
given."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import ipaddress
import json
import lzma
import pathlib
import random
import re
import typing
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import jsonschema
import numpy as np
import pydantic
import pytest
import typing_extensions
from llguidance import LLMatcher
from pydantic import Field, Json, SecretStr

from verbatim import LLM, SamplingParams
from verbatim.base.errors import ParameterError, RequestError, UnsupportedError
from verbatim.grammar.compiler import compile_structure
from verbatim.grammar.document_check import CheckState, DocumentCheck, validator
from verbatim.grammar.json_schema import normalise
from verbatim.grammar.lower import lower
from verbatim.grammar.matcher import Structure
from verbatim.testing.fakes import ByteTokenizer, fake_parts

TOKENIZER = ByteTokenizer()
CLOSERS = b'"]}'


def build(schema: Any) -> Structure:
    found = compile_structure(SamplingParams(json_schema=schema), TOKENIZER)
    assert found is not None
    return found


def allowed(mask: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


class Unfinished(Exception):
    """The random model did not finish within the limit."""


def random_document(structure: Structure, seed: int, limit: int = 1500) -> str:
    rng, matcher, out = random.Random(seed), structure.start(), bytearray()
    while not matcher.finished:
        if len(out) >= limit:
            raise Unfinished
        tokens = allowed(matcher.mask())
        if max(tokens) >= 256 and rng.random() < 0.7:
            break
        tokens = [t for t in tokens if 0x20 < t < 0x7F] or [t for t in tokens if t < 256]
        closing = [t for t in tokens if t in CLOSERS]
        eager = 0.3 if len(out) < 300 else 0.99
        token = rng.choice(closing if closing and rng.random() < eager else tokens)
        matcher.advance(token)
        out.append(token)
    return out.decode()


def takes(structure: Structure, text: str) -> bool:
    matcher = structure.start()
    for byte in text.encode():
        try:
            if matcher.finished or byte not in allowed(matcher.mask()):
                return False
            matcher.advance(byte)
        except UnsupportedError:
            return False
    return matcher.accepting


# --- annotations


@pytest.mark.parametrize(
    ("schema", "ignored"),
    [
        ({"type": "string", "$default": {"$source": "argv"}}, "$default"),
        ({"type": "string", "absolutePath": True}, "absolutePath"),
        ({"type": "string", "contentMediaType": "application/json"}, "contentMediaType"),
        ({"type": "string", "format": "path"}, "format: path"),
        ({"type": "string", "x-order": 1, "cli": "x"}, "cli, x-order"),
        ({"type": "object", "properties": {"a": {"alias": "b"}}}, "alias"),
    ],
)
def test_unknown_annotations_are_ignored_and_listed(schema: Any, ignored: str) -> None:
    assert build(schema).warnings == (
        f"json_schema: these keywords assert nothing and were ignored: {ignored}",
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": False},
        {"type": "object", "propertyNames": {"type": "string"}},
        {"id": "http://example.org/a", "$schema": "http://json-schema.org/draft-04/schema#"},
        {"$schema": "https://json-schema.org/schema", "title": "t", "markdownDescription": "d"},
        {"type": "string", "default": "", "examples": [""], "$comment": "", "readOnly": True},
        {"prefixItems": [{}], "additionalItems": False},
        {"type": "string", "then": False},
    ],
)
def test_what_asks_for_nothing_needs_no_warning_and_no_check(schema: Any) -> None:
    structure = build(schema)
    assert structure.warnings == ()
    assert structure.check is None or structure.check.names_only


def test_the_answer_lists_what_was_ignored() -> None:
    with LLM.from_loaded(fake_parts(), kv_blocks=64) as llm:
        params = SamplingParams(json_schema={"const": 1, "cli": "x"}, max_tokens=4, temperature=0)
        done = llm.generate("hi", params)
    assert done.text == "1"
    assert any("ignored: cli" in warning for warning in done.warnings)


# --- pydantic


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


class Point(pydantic.BaseModel):
    x: int
    y: float = 0.0


class Tree(pydantic.BaseModel):
    name: str
    left: Tree | None = None


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    tail: bool


class Row(typing_extensions.TypedDict):
    a: int


@dataclasses.dataclass
class Record:
    b: str


class Pair(typing.NamedTuple):
    a: int
    b: str


Pet = typing.Annotated[Cat | Dog, Field(discriminator="kind")]
FIELD_TYPES: list[Any] = [
    str, int, float, bool, None, bytes, Any,
    list[int], set[str], frozenset[int], tuple[int, str], tuple[int, ...], collections.deque[int],
    dict[str, int], dict[Colour, int], dict[int, str], set[Colour],
    Colour, Size, Literal["a", 1], str | None, int | str,
    datetime.datetime, datetime.date, datetime.time, datetime.timedelta,
    uuid.UUID, decimal.Decimal, pathlib.Path, SecretStr, Json[list[int]], re.Pattern[str],
    pydantic.AnyUrl, ipaddress.IPv4Address, ipaddress.IPv6Address,
    Point, Tree, Pet, Row, Record, Pair,
    typing.Annotated[str, Field(pattern="^[a-c]+$", max_length=5)],
    typing.Annotated[int, Field(gt=0, le=10, multiple_of=5)],
]  # fmt: skip


@pytest.mark.parametrize("kind", FIELD_TYPES, ids=str)
def test_every_field_type_of_pydantic_gives_valid_documents(kind: Any) -> None:
    schema = pydantic.create_model("Model", field=(kind, ...)).model_json_schema()
    structure = build(schema)
    for seed in range(2):
        jsonschema.validate(json.loads(random_document(structure, seed)), schema)


# --- uniqueItems


def test_an_item_is_not_written_twice() -> None:
    structure = build({"type": "array", "items": {"type": "string"}, "uniqueItems": True})
    assert takes(structure, '["a", "ab","a b"]')
    assert not takes(structure, '["a","a"]')
    matcher = structure.start()
    for byte in b'["a","a':
        matcher.advance(byte)
    assert ord('"') not in allowed(matcher.mask())  # another item is still possible
    assert ord("b") in allowed(matcher.mask())


@pytest.mark.parametrize(
    "items",
    [
        {"enum": ["a", "ab", "b", 1, None]},
        {"type": "boolean"},
        {"type": "integer", "minimum": 1, "maximum": 3},
        {"anyOf": [{"const": "x"}, {"type": "null"}]},
        {"$ref": "#/$defs/colour"},
    ],
)
def test_unique_items_of_a_short_list_never_run_out(items: Any) -> None:
    """Whatever the model writes, there is always a next token: the array closes in time."""
    schema = {
        "$defs": {"colour": {"enum": ["red", "green"]}},
        "properties": {"a": {"type": "array", "items": items, "uniqueItems": True, "minItems": 2}},
        "required": ["a"],
        "additionalProperties": False,
        "type": "object",
    }
    structure = build(schema)
    for seed in range(10):
        jsonschema.validate(json.loads(random_document(structure, seed)), schema)


def test_more_unique_items_than_there_are_is_refused() -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}
    for least in ({"minItems": 3}, {"allOf": [{"minItems": 3}]}):
        with pytest.raises(ParameterError, match=r"minItems 3 .* only 2 different items"):
            build({**schema, **least})


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("[1,1.0]", False), ("[1,true]", True), ('[{"a":1,"b":2},{"b":2,"a":1}]', False),
        ("[[1],[1]]", False), ("[1,11]", True), ("[ 1 , 1 ]", False), ('["a","\\u0061"]', False),
        ("[[1,1]]", True), ("[null,0,false]", True),
    ],
)  # fmt: skip
def test_equal_is_equal_as_json_values(text: str, valid: bool) -> None:
    assert takes(build({"type": "array", "uniqueItems": True}), text) is valid


def test_tokens_of_several_characters_are_checked_as_a_whole() -> None:
    """An array may open and close inside one token, and a string inside another."""
    schema = {"type": "array", "items": {"type": "array", "uniqueItems": True}}
    tokens = [b"[", b"[0,0]", b"[0,1]", b'["a', b'","', b'a"]', b'b"]]', b"</s>"]
    check = DocumentCheck(schema, tokens, [7])

    def after(*ids: int) -> list[int]:
        state = CheckState()
        for token in ids:
            state = check.after(token, state)
        return allowed(check.filter(bytes([0x7F]), state)[0])

    assert 1 not in after(0)
    assert 2 in after(0)
    assert 5 not in after(0, 3, 4)
    assert 6 in after(0, 3, 4)


def test_a_number_and_the_blank_behind_it_may_be_one_token() -> None:
    check = DocumentCheck({"type": "array", "uniqueItems": True}, [b"[", b"1 ", b",", b"2 "], [])
    state = CheckState()
    for token in (0, 1, 2):
        state = check.after(token, state)
    assert allowed(check.filter(bytes([0b1010]), state)[0]) == [3]


@pytest.mark.parametrize("value", [1e22, 1e-7, 1e16, 1.0, -0.0, "\x7f", "\b", "/"])
def test_unique_items_are_listed_as_the_grammar_writes_them(value: Any) -> None:
    schema = {"type": "array", "items": {"enum": [value]}, "uniqueItems": True, "minItems": 1}
    assert json.loads(random_document(build(schema), 0)) == [value]


# --- other keywords that are checked

CHECKED: list[tuple[dict[str, Any], str, str]] = [
    ({"not": {"required": ["b"]}, "type": "object"}, '{"a":1}', '{"b":1}'),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "1", "3"),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"a":1}', '{"a":1,"b":1}'),
    ({"dependentRequired": {"a": ["b"]}}, '{"a":1,"b":1}', '{"a":1}'),
    ({"dependencies": {"a": ["b"]}}, '{"b":1}', '{"a":1}'),
    ({"contains": {"const": 1}, "type": "array"}, "[0,1]", "[0]"),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, '{"ab":1}', '{"abc":1}'),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, '{"ab":1}', '{"b":1}'),
    ({"propertyNames": {"enum": ["a"]}, "type": "object"}, '{"a":1}', '{"b":1}'),
    ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False, "type": "object"},
     '{"a":1}', '{"b":1}'),
    ({"patternProperties": {"^a": {"type": "integer"}, "b$": {"maximum": 5}}},
     '{"ab":3,"a":9}', '{"ab":9}'),
    ({"allOf": [{"patternProperties": {"^a": {"type": "integer"}}},
                {"patternProperties": {"b$": {"maximum": 5}}}]}, '{"ab":3,"a":9}', '{"ab":9}'),
    ({"format": "regex", "type": "string"}, '"a+"', '"("'),
    ({"maxProperties": 1, "properties": {"a": {}, "b": {}}}, '{"b":1}', '{"a":1,"b":1}'),
    ({"type": "number", "minimum": 3, "exclusiveMinimum": True}, "4", "3"),
    ({"type": "object", "propertyNames": {"enum": ["a", "bb"], "maxLength": 1}},
     '{"a":1}', '{"bb":1}'),
    ({"type": "object", "propertyNames": {"enum": ["a"]}, "minProperties": 1}, '{"a":1}', "{}"),
    ({"properties": {"a": {}}, "allOf": [{"minProperties": 1}], "type": "object"}, '{"a":1}', "{}"),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, str(-(2**63)), str(2**63)),
    ({"type": "integer", "minimum": 2**53 + 1}, str(2**53 + 1), str(2**53)),
    ({"type": "integer", "exclusiveMaximum": 2**53 + 4}, str(2**53 + 3), str(2**53 + 4)),
    ({"type": "integer", "exclusiveMaximum": 2**53 + 2}, str(2**53 + 1), str(2**53 + 2)),
    ({"type": "integer", "exclusiveMinimum": 2**53}, str(2**53 + 1), str(2**53)),
    ({"patternProperties": {"^b": {"type": "integer"}, "^.$": {}}},
     '{"b\\u007f":1}', '{"b\\u007f":"1"}'),
    ({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}, "-1.5e3", "1e39"),
    ({"properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"], "type": "object",
      "if": {"properties": {"n": {"enum": [1, 2], "multipleOf": 2}}, "required": ["n"]},
      "then": {"required": ["b"]}, "additionalProperties": {}}, '{"n":1}', '{"n":2}'),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), CHECKED, ids=lambda value: str(value)[:40])
def test_checked_keywords_admit_valid_documents_only(
    schema: dict[str, Any], good: str, bad: str
) -> None:
    structure = build(schema)
    assert takes(structure, good)
    assert not takes(structure, bad)


INT = {"type": "integer"}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": INT}},
        {"properties": {"a": INT}, "additionalProperties": {"type": "string"}},
        {"properties": {"a": INT}, "required": ["a"], "minProperties": 1},
        {"allOf": [{"properties": {"a": INT}}, {"properties": {"b": INT}}]},
        {"anyOf": [{"properties": {"a": INT}}, {"required": ["b"], "properties": {"a": INT}}]},
        {"properties": {"a": INT}, "allOf": [{"properties": {"d": {"const": "x"}}}]},
        {"properties": {"a": INT}, "additionalProperties": True, "enum": [{"a": 1, "d": "x"}]},
        {"patternProperties": {"^.$": {}}, "enum": [{"a": 1, "d": "x"}],
         "additionalProperties": False},
        {"properties": {"a": INT}, "anyOf": [{"required": ["d"]}, {"required": ["b"]}]},
        {"patternProperties": {"^a": INT}},
        {"allOf": [{"properties": {"a": INT}}, {"patternProperties": {"^c": INT}}]},
    ],
    ids=str,
)  # fmt: skip
def test_a_name_written_with_escapes_is_the_same_name(schema: dict[str, Any]) -> None:
    structure = build({"type": "object", **schema})
    assert takes(structure, '{"a":1,"d":"x"}')
    assert not takes(structure, '{"a":1,"\\u0061":"x"}')
    assert not takes(structure, '{"\\u0061":"x"}')


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53 + 1},
        {"enum": [1, {"id": 123456789012345678}]},
        {"items": {"const": -(10**400) - 1}},
    ],
)
def test_an_integer_that_the_grammar_would_round_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"too many digits.*use a string"):
        build(schema)


def test_a_conditional_on_a_listed_property_needs_no_luck() -> None:
    """Each value of `kind` leads to the members that it requires, so no document ends in an
    error."""
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer"}},
        "required": ["kind"],
        "additionalProperties": False,
        "if": {"properties": {"kind": {"const": "a"}}, "required": ["kind"]},
        "then": {"required": ["n"]},
        "else": {"properties": {"n": {"const": 7}}},
    }
    structure = build(schema)
    assert takes(structure, '{"kind":"a","n":1}')
    assert takes(structure, '{"kind":"b","n":7}')
    assert not takes(structure, '{"kind":"a"}')
    assert not takes(structure, '{"kind":"b","n":1}')
    for seed in range(10):
        jsonschema.validate(json.loads(random_document(structure, seed)), schema)


def test_a_dead_end_is_an_error_that_names_the_keyword() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
        "not": {"properties": {"a": {"const": True}}},
    }
    matcher = build(schema).start()
    for byte in b'{"a":true':
        matcher.advance(byte)
    while True:  # whitespace may follow, up to the limit; never the brace
        try:
            tokens = allowed(matcher.mask())
        except UnsupportedError as error:
            assert "cannot become a valid document (not: not met)" in str(error)  # noqa: PT017
            break
        assert ord("}") not in tokens
        matcher.advance(tokens[0])


@pytest.mark.parametrize(
    ("schema", "bad"),
    [
        ({"type": ["boolean", "null"], "not": {"const": False}}, "false"),
        ({"enum": [1, 23], "not": {"const": 1}}, "1"),
        ({"oneOf": [{"type": "null"}, {"enum": [None, 5]}]}, "null"),
    ],
)
def test_a_scalar_that_nothing_can_follow_is_checked(schema: dict[str, Any], bad: str) -> None:
    """The engine ends such an output at once, without an end token."""
    structure = build(schema)
    for seed in range(10):
        try:
            jsonschema.validate(json.loads(random_document(structure, seed)), schema)
        except UnsupportedError as error:
            assert "cannot become a valid document" in str(error)  # noqa: PT017
    assert not takes(structure, bad)


def test_drafts_are_checked_like_drawn_tokens() -> None:
    structure = build({"type": "array", "items": {"type": "integer"}, "uniqueItems": True})
    matcher = structure.start()
    assert matcher.allowed_drafts(b"[1,1,2]") == tuple(b"[1,1")
    masks = matcher.masks_along(b"[1,1")
    assert ord(",") not in allowed(masks[-1] or b"")
    twin = matcher.copy()
    for byte in b"[1,1":
        twin.advance(byte)
    assert twin.mask() == masks[-1]


def test_random_documents_under_the_test_suite_are_valid() -> None:
    """One document per schema of the JSON-Schema-Test-Suite that compiles."""
    data = Path(__file__).parent.parent / "data" / "json_schema_test_suite.json.xz"
    count: Counter[str] = Counter()
    for file, cases in json.loads(lzma.decompress(data.read_bytes())).items():
        for case in cases if file not in ("format", "vocabulary") else ():
            try:
                structure = build(case["schema"])
            except RequestError:
                continue
            try:
                document = json.loads(random_document(structure, 0, limit=400))
            except UnsupportedError as error:
                assert "cannot become a valid document" in str(error)  # noqa: PT017
                count["dead end"] += 1
                continue
            except Unfinished:
                count["unfinished"] += 1
                continue
            count["valid"] += 1
            assert jsonschema.Draft202012Validator(case["schema"]).is_valid(document), case
    assert count["valid"] >= 280
    assert count["dead end"] <= 10


# --- references and older drafts


@pytest.mark.parametrize(
    "schema",
    [
        {"definitions": {"A<b>": {"const": 1}}, "$ref": "#/definitions/A<b>"},
        {"definitions": {"A<b>": {"const": 1}}, "$ref": "#/definitions/A%3Cb%3E"},
        {"$id": "http://a.org/x.json", "$defs": {"a": {"const": 1}}, "$ref": "x.json#/$defs/a"},
        {"$id": "http://a.org/x.json", "$defs": {"a": {"const": 1}},
         "$ref": "http://a.org/x.json#/$defs/a"},
        {"$defs": {"a": {"$id": "http://b.org/y.json", "const": 1}}, "$ref": "http://b.org/y.json"},
        {"$defs": {"a": {"$anchor": "here", "const": 1}}, "$ref": "#here"},
        {"components": {"schemas": {"a": {"const": 1}}}, "$ref": "#/components/schemas/a"},
        {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a": {"const": 1}},
         "allOf": [{"$ref": "#/definitions/a", "type": "string"}]},
    ],
)  # fmt: skip
def test_local_references_are_followed(schema: dict[str, Any]) -> None:
    structure = build(schema)
    assert takes(structure, "1")
    assert not takes(structure, "2")


def test_the_normal_form_has_one_dialect() -> None:
    normal = normalise({
        "items": [{"type": "string"}], "additionalItems": False, "minItems": 1.0,
        "dependencies": {"a": ["b"], "c": {"required": ["d"]}},
    }).schema  # fmt: skip
    assert normal == {
        "prefixItems": [{"type": "string"}], "items": False, "minItems": 1,
        "dependentRequired": {"a": ["b"]}, "dependentSchemas": {"c": {"required": ["d"]}},
    }  # fmt: skip


def test_values_that_json_does_not_have_match_nothing() -> None:
    structure = build({"anyOf": [{"instanceof": "Function"}, {"type": "boolean"}]})
    assert takes(structure, "true")
    assert not takes(structure, "1")


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^\d$", "1", "٣"), (r"^\w$", "a", "é"), (r"^\s$", " ", "\u200b"),
        (r"^[^\s]$", "a", "\x1f"), (r"^\S$", "a", "\ufeff"), (r"^\W$", "-", "é"),
        (r"^[\d-]$", "-", "٣"), (r"^[^\D]$", "1", "٣"), (r"^\\d$", "\\d", "1"),
        (r"^[\D]$", "a", "1"), (r"^\[\d\]$", "[1]", "[٣]"),
        ("^[a&&b]$", "&", "c"), ("^[a~~b]$", "~", "c"), ("^[+--]$", ",", "a"),
        ("^[a-c--/]$", ".", "d"),
        (r"^[^\\/:*?\"<>|]$", "a", "\\"), (r"^[^\\/:*?\"<>|]$", "\n", '"'), ("^[^ -~]$", "\n", '"'),
        ("^[--/]$", ".", "a"), ("^[^--/]$", "a", "."), ("^[Z^-b]$", "a", "c"),
        ("^[[a]$", "[", "b"), ("^[a-z&&[^b]]$", "b]", "a"),
    ],
)  # fmt: skip
def test_patterns_match_what_every_validator_matches(pattern: str, good: str, bad: str) -> None:
    structure = build({"type": "string", "pattern": pattern})
    assert takes(structure, json.dumps(good))
    assert not takes(structure, json.dumps(bad, ensure_ascii=False))
    assert not takes(structure, json.dumps(bad))


# --- hostile


def test_the_check_does_not_backtrack() -> None:
    schema = {"type": "string", "maxLength": 60, "not": {"pattern": "^(a+)+b$"}}
    assert takes(build(schema), json.dumps("a" * 50 + "c"))


def test_the_work_of_a_check_is_limited() -> None:
    both = {"allOf": [{"$ref": "#/$defs/n0"}, {"$ref": "#/$defs/n0"}]}
    schema: dict[str, Any] = {"type": "integer", "not": both, "$defs": {}}
    for i in range(30):
        part = {"$ref": f"#/$defs/n{i + 1}"}
        schema["$defs"][f"n{i}"] = {"allOf": [part, part]}
    schema["$defs"]["n30"] = {"maximum": 5}
    with pytest.raises(UnsupportedError, match="too complex to check"):
        takes_or_raises(build(schema))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer", "not": {"const": 5}}, b"1" * 4301),  # more digits than Python reads
        ({"type": "array", "contains": {"multipleOf": 0.5}}, b"[1e400"),
    ],
    ids=["digits", "infinite"],
)
def test_a_number_too_long_to_check_ends_the_completion(schema: Any, text: bytes) -> None:
    check = DocumentCheck(schema, [text, b"]"], [2])
    mask = bytes([0b100 if schema["type"] == "integer" else 0b10])
    with pytest.raises(UnsupportedError, match="a number is too long to check"):
        check.filter(mask, check.after(0, CheckState()))


@pytest.mark.parametrize("keyword", ["minLength", "maxItems", "minimum", "multipleOf"])
@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_a_number_that_is_not_finite_is_refused(keyword: str, number: float) -> None:
    with pytest.raises(ParameterError, match=f"at #/{keyword}: (inf|nan) is not a"):
        normalise({keyword: number})


def takes_or_raises(structure: Structure) -> None:
    matcher = structure.start()
    matcher.mask()
    matcher.advance(ord("3"))
    matcher.mask()


def test_what_the_grammar_enforces_needs_no_check() -> None:
    schema = {"type": "object", "properties": {"a": {"oneOf": [{"type": "string"}, {"const": 2}]}}}
    assert not lower(normalise(schema).schema).checked
    check = build(schema).check
    assert check is None or check.names_only


# --- keywords that resemble others, and parts that no document satisfies


@pytest.mark.parametrize(
    ("schema", "warning"),
    [
        ({"type": "array", "item": {"type": "string"}}, "item (at #; did you mean 'items'?)"),
        (
            {"type": "object", "properties": {"a": {"tsAdditionalProperties": False}}},
            "tsAdditionalProperties (at #/properties/a; did you mean 'additionalProperties'?)",
        ),
        (
            {"anyOf": [{"requierd": ["a"]}, {"requierd": ["b"]}], "cli": 1},
            "cli, requierd (at #/anyOf/0; did you mean 'required'?)",
        ),
    ],
)
def test_a_keyword_that_resembles_an_assertion_is_ignored_with_its_likely_meaning(
    schema: Any, warning: str
) -> None:
    """JSON Schema ignores unknown keywords, and published schemas have some by mistake."""
    assert build(schema).warnings == (
        f"json_schema: these keywords assert nothing and were ignored: {warning}",
    )


# Every alternative closes the object to a name that the definition requires, as in dbt's schemas.
IMPOSSIBLE = {
    "type": "object",
    "anyOf": [{"properties": {"range": {}}, "required": ["range"], "additionalProperties": False}],
    "properties": {"field": {"type": "string"}},
    "required": ["field"],
    "additionalProperties": False,
}
ENDLESS = {
    "type": "object",
    "properties": {"next": {"$ref": "#/definitions/endless"}},
    "required": ["next"],
}


@pytest.mark.parametrize("name", ["impossible", "around", "endless"])
@pytest.mark.parametrize(
    ("part", "valid"),
    [
        ({"properties": {"p": "PART", "q": {"type": "null"}}}, ['{"q":null}', "{}"]),
        ({"properties": {"p": {"anyOf": [{"type": "null"}, "PART"]}}}, ['{"p":null}']),
        ({"properties": {"p": {"type": "array", "items": "PART"}}}, ['{"p":[]}']),
        ({"additionalProperties": "PART"}, ["{}"]),
    ],
    ids=str,
)
def test_a_definition_that_no_document_satisfies_only_never_occurs(
    part: Any, valid: list[str], name: str
) -> None:
    ref = json.dumps({"$ref": f"#/definitions/{name}"})
    schema = {
        "type": "object",
        "additionalProperties": False,
        **json.loads(json.dumps(part).replace('"PART"', ref)),
        "definitions": {
            "impossible": IMPOSSIBLE,
            "around": {
                "type": "array",
                "items": {"$ref": "#/definitions/impossible"},
                "minItems": 1,
            },
            "endless": ENDLESS,
        },
    }
    structure = build(schema)
    for text in valid:
        assert takes(structure, text), text
    for text in ('{"p":{', '{"p":[{', '{"p":[['):
        assert not reaches(structure, text), text


def reaches(structure: Structure, text: str) -> bool:
    """Whether the masks allow these first bytes."""
    matcher = structure.start()
    for byte in text.encode():
        if matcher.finished or byte not in allowed(matcher.mask()):
            return False
        matcher.advance(byte)
    return True


def requiring(part: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": part}, "required": ["a"]}


BAD = {"type": "integer", "minimum": 5, "maximum": 3}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (BAD, "minimum (5) is greater than maximum (3) (at #)"),
        (False, "the schema is false (at #)"),
        (requiring(False), "the schema is false (at #/properties/a)"),
        (requiring({"not": {}}), "the schema is false (at #/properties/a)"),
        (requiring(requiring({"type": "array", "items": BAD, "minItems": 1})),
         "minimum (5) is greater than maximum (3) (at #/properties/a/properties/a/items)"),
        (requiring({"type": "array", "prefixItems": [INT, False], "minItems": 2}),
         "the schema is false (at #/properties/a/prefixItems/1)"),
        (requiring({"allOf": [INT, BAD]}),
         "minimum (5) is greater than maximum (3) (at #/properties/a/allOf/1)"),
        ({"allOf": [INT, {"type": "string"}]}, "incompatible types (at #)"),
        ({"title": "x", "type": "integer", "anyOf": [BAD, False]},
         "minimum (5) is greater than maximum (3) (at #/anyOf/0)"),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": BAD}},
         "minimum (5) is greater than maximum (3) (at #/$defs/B)"),
        (requiring({"type": "array", "items": {"const": 1}, "minItems": 2, "uniqueItems": True}),
         "minItems 2 with uniqueItems: there are only 1 different items (at #/properties/a)"),
        (requiring({"type": "array", "contains": {"not": {}}}),
         "contains: nothing satisfies it (at #/properties/a)"),
        ({"type": "object", "propertyNames": False, "minProperties": 1},
         "minProperties 1: there are only 0 different names (at #)"),
        ({"type": "object", "properties": {"a/b~": False}, "required": ["a/b~"]},
         "the schema is false (at #/properties/a~1b~0)"),
        ({"type": "object", "required": ["z"], "additionalProperties": False},
         "required property 'z' is unsatisfiable (at #)"),
        ({**requiring({"$ref": "#/definitions/impossible"}),
          "definitions": {"impossible": IMPOSSIBLE}},
         "required property 'range' is unsatisfiable (at #/definitions/impossible)"),
        (requiring({"anyOf": [{"type": "null"}, INT], "enum": ["x"]}),
         "incompatible types (at #/properties/a)"),
    ],
    ids=str,
)  # fmt: skip
def test_a_schema_that_no_document_satisfies_is_refused_with_the_innermost_place(
    schema: Any, why: str
) -> None:
    with pytest.raises(ParameterError) as caught:
        build(schema)
    assert str(caught.value) == f"json_schema: no document satisfies it: {why}"


def test_the_search_for_the_place_is_bounded() -> None:
    """Every level is compiled again, so a schema of many levels gets an outer place."""
    schema: Any = BAD
    for _ in range(40):
        padding = {f"p{i}": {"type": "string", "enum": ["x" * 100]} for i in range(10)}
        schema = {**requiring(schema), "properties": {**padding, "a": schema}}
    with pytest.raises(ParameterError, match=r"\(at #(/properties/a){3,30}\)$"):
        build(schema)


def test_the_reason_is_of_the_alternative_that_the_document_is_closest_to() -> None:
    def call(name: str, least: int) -> dict[str, Any]:
        items = {"type": "array", "minItems": least}
        return {"properties": {"name": {"const": name}, "a": items}}

    problem = validator({"anyOf": [call("x", 0), call("y", 2), call("z", 2)]})
    assert problem({"name": "y", "a": [1]}) == "minItems: not met at 'a'"
    deep = {"properties": {"name": {"const": "y"}, "a": {"items": {"const": 1}}}}
    assert validator({"anyOf": [call("x", 0), deep]})({"name": "y", "a": [2]}).endswith("'a/0'")


# --- names of an object


def walk(structure: Structure, text: str) -> int:
    """The number of bytes that the masks allow."""
    matcher = structure.start()
    for count, byte in enumerate(text.encode()):
        if matcher.finished or byte not in allowed(matcher.mask()):
            return count
        matcher.advance(byte)
    return len(text.encode())


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object"}, '{"a":1,"a'),
        ({}, '[{"a":{"a":1,"b":{}}},{"a":1,"":0,"'),
        ({"type": "object"}, '{"a":{"b":1},"c":[{"a":1}],"a'),
        ({"type": "object"}, '{"é":1,"é'),
        ({"type": "object"}, '{"\\n":1,"\\u000a'),
        ({"type": "object"}, '{"a\\"b":1,"a\\"b'),
        ({"properties": {"a": {"type": "integer"}}, "type": "object"}, '{"a":1,"b":2,"b'),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}, '{"a":1,"\\u0061'),
        (
            {"patternProperties": {"^x": {}}, "additionalProperties": False, "type": "object"},
            '{"x1":1,"x1',
        ),
        ({"properties": {"deep": {"type": "array"}}}, '{"deep":[{"k":1,"k'),
        ({"type": "array", "items": {}, "uniqueItems": True}, '[{"a":1,"a'),
    ],
    ids=str,
)
def test_a_name_never_repeats_within_an_object(schema: Any, text: str) -> None:
    """RFC 8259 advises against it, and our own server refuses such bodies."""
    structure = build(schema)
    assert walk(structure, text + '"') == len(text.encode())
    longer = text + 'z":1'
    assert walk(structure, longer) == len(longer.encode()), "a longer name is always possible"


def test_a_token_that_holds_a_whole_name_is_removed() -> None:
    tokens = [
        b'{"a"',
        b":1",
        b',"a"',
        b',"b"',
        b',"',
        b'a"',
        b'a":',
        b'\\u0061"',
        b"a",
        b'"',
        b'",',
    ]
    check = DocumentCheck(True, tokens, [])
    every = bytes([0xFF, 0x07])

    def after(*ids: int) -> list[int]:
        state = CheckState()
        for token in ids:
            state = check.after(token, state)
        return allowed(check.filter(every, state)[0])

    assert 2 not in after(0, 1)
    assert 3 in after(0, 1)
    assert {5, 6, 7}.isdisjoint(after(0, 1, 4))
    assert 8 in after(0, 1, 4)
    assert {9, 10}.isdisjoint(after(0, 1, 4, 8))
    assert {5, 6, 7, 9} <= set(after(0, 1, 4, 8, 8))
    assert {2, 3}.isdisjoint(after(0, 1, 3, 1))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
        {"type": "array", "items": {"enum": [{"a": 1}, "b"]}},
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
        {
            "type": "object",
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"type": "null"}},
            "additionalProperties": False,
            "$defs": {"n": {"type": ["integer", "null"]}},
        },
    ],
    ids=str,
)
def test_objects_that_list_their_names_need_no_check(schema: Any) -> None:
    assert build(schema).check is None


@pytest.mark.parametrize("pattern", ["^(a|b)$", "^(?:a|b)$"])
def test_an_object_closes_when_every_listed_name_is_there(pattern: str) -> None:
    schema = {
        "type": "object",
        "patternProperties": {pattern: {"type": "integer"}, "^b$": {"minimum": 2}},
        "additionalProperties": False,
    }
    structure = build(schema)
    assert takes(structure, '{"a":1,"b":2}')
    assert takes(structure, '{"b":2}')
    assert not reaches(structure, '{"a":1,"b":2,')
    assert not takes(structure, '{"b":1}')
    assert structure.check is None


FINITE_NAMES: list[dict[str, Any]] = [
    {"patternProperties": {"^[ab]$": INT}, "additionalProperties": False},
    {"patternProperties": {"^[0-9]$": INT}, "additionalProperties": False, "minProperties": 3},
    {"patternProperties": {"^(abc|x[0-9]*)$": INT}, "additionalProperties": False},
    {"patternProperties": {"^[ab\\n]$": INT}, "additionalProperties": False},
    {"patternProperties": {"^(é|è)$": INT}, "additionalProperties": False},
    {"patternProperties": {'^["a]{1,2}$': INT}, "additionalProperties": False},
    {"properties": {"a": INT}, "required": ["a"], "patternProperties": {"^[ab]$": INT},
     "additionalProperties": False},
    {"propertyNames": {"pattern": "^[01]{1,2}$"}},
    {"propertyNames": {"enum": ["a", "b"]}},
    {"propertyNames": {"const": "a"}},
    {"propertyNames": {"format": "date"}},
    {"propertyNames": {"maxLength": 1}},
    {"propertyNames": {"minLength": 2, "maxLength": 3}},
    {"properties": {"a": INT}, "propertyNames": {"maxLength": 1}},
    {"propertyNames": {"$ref": "#/$defs/name"}, "$defs": {"name": {"format": "uuid"}}},
    {"patternProperties": {"^[ab]$": {"type": "object", "propertyNames": {"pattern": "^[xy]$"},
                                      "additionalProperties": INT}},
     "additionalProperties": False},
]  # fmt: skip


@pytest.mark.parametrize("schema", FINITE_NAMES, ids=str)
def test_an_object_whose_names_run_out_closes(schema: dict[str, Any]) -> None:
    """No comma follows where every name is there, and no name starts that has no unused end. The
    random model writes few values and many names; whatever it writes, there is a next token."""
    schema = {"type": "object", "additionalProperties": INT, **schema}
    structure = build(schema)
    for seed in range(6):
        rng, matcher, out = random.Random(seed), structure.start(), bytearray()
        while not matcher.finished and len(out) < 250:
            tokens = [t for t in allowed(matcher.mask()) if t not in b" \t\n\r"]
            wanted = [t for t in tokens if t in b',:"{0'] if len(out) < 200 else []
            wanted = wanted or [t for t in tokens if t in CLOSERS] if rng.random() < 0.8 else tokens
            token = rng.choice(wanted or tokens)
            if token >= 256:
                break
            matcher.advance(token)
            out.append(token)
        if matcher.finished or token >= 256:
            jsonschema.validate(json.loads(out), schema)


def test_the_end_of_the_names_is_seen_through_tokens_of_several_characters() -> None:
    schema = {
        "type": "object",
        "patternProperties": {"^(ab|ac|[0-9]{3})$": {"type": "integer"}},
        "additionalProperties": False,
    }
    grammar = build(schema)
    assert grammar.check is not None
    tokens = [b'{"ab":1', b',"', b"a", b'ac":1', b', "a', b'"', b"}", b"12", b"1"]
    names = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    check = DocumentCheck(True, tokens, [], names)

    def after(*ids: int) -> set[int]:
        state = CheckState()
        for token in ids:
            state = check.after(token, state)
        return set(allowed(check.filter(bytes([0xFF, 1]), state)[0]))

    assert {1, 4} <= after(0)  # "ac" is unused
    assert {2, 3, 7} <= after(0, 1)
    full = after(0, 1, 3)
    assert 4 not in full  # no unused name starts with "a"
    assert 1 in full
    assert 2 not in after(0, 1, 3, 1)
    assert {7, 8} <= after(0, 1, 3, 1)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"patternProperties": {"^[ab]$": {}}, "additionalProperties": False}, "only 2 different"),
        ({"propertyNames": {"enum": ["a", "b"]}}, "only 2 different names"),
        ({"properties": {"a": {}, "b": {}}, "additionalProperties": False}, "only 2 different"),
        ({"maxProperties": 2}, "minProperties 3 with maxProperties 2"),
    ],
    ids=str,
)
def test_more_names_than_there_are_is_refused(schema: dict[str, Any], why: str) -> None:
    schema = {"type": "object", "minProperties": 3, **schema}
    with pytest.raises(ParameterError, match=f"no document satisfies it: .*{why}"):
        build(schema)
    assert takes(build({**schema, "type": ["object", "null"]}), "null")
    assert takes(build({"anyOf": [schema, {"type": "integer"}]}), "1")


def test_many_names_are_not_counted() -> None:
    schema = {"patternProperties": {"^(b*a|.{5})$": {}}, "additionalProperties": False}
    build({"type": "object", "minProperties": 5000, **schema})


@pytest.mark.parametrize(
    ("names", "good", "bad"),
    [
        ({"maxLength": 2}, ['{"ab":1', '{"é😀":1', '{"\\n\\n":1', '{"":1'], ['{"abc', '{"\\n\\n1']),
        ({"minLength": 2}, ['{"ab":1', '{"abcdef":1'], ['{"a"']),
        ({"format": "date"}, ['{"2024-02-29":1'], ['{"2024-02-3', '{"x']),
        ({"format": "date-time"}, ['{"2024-02-29T23:59:60.5+01:00":1'], ['{"2024-02-29"']),
        ({"format": "ipv4"}, ['{"127.0.0.1":1'], ['{"256']),
        ({"pattern": "^a", "maxLength": 2}, ['{"ab":1'], ['{"b']),
        ({"pattern": "^[a-z]+$", "maxLength": 2}, ['{"ab":1'], ['{"abc', '{"A', '{"":']),
        ({"pattern": r"^[\]a]*$", "minLength": 2}, ['{"]a]":1'], ['{"a"', '{"[']),
    ],
    ids=str,
)  # fmt: skip
def test_what_names_must_be_is_held_while_they_are_written(
    names: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    structure = build({"type": "object", "propertyNames": names})
    for text in good:
        assert reaches(structure, text), text
    for text in bad:
        assert not reaches(structure, text), text


@pytest.mark.parametrize("names", [False, {"minLength": 3, "maxLength": 2}], ids=str)
def test_an_object_without_possible_names_is_empty(names: Any) -> None:
    structure = build({"type": "object", "properties": {"a": INT}, "propertyNames": names})
    assert takes(structure, "{}")
    assert not reaches(structure, '{"')
    pattern = {"pattern": "^[a-z]*$", "minLength": 3, "maxLength": 2}
    assert not reaches(build({"type": "object", "propertyNames": pattern}), '{"')


@pytest.mark.parametrize("name", ["email", "hostname", "ipv6", "uri", "duration"])
def test_other_formats_of_names_are_checked(name: str) -> None:
    good = {"email": "a@b.org", "ipv6": "::1", "uri": "a:b", "duration": "P1D"}.get(name, "a.b")
    structure = build({"type": "object", "propertyNames": {"format": name}})
    assert takes(structure, json.dumps({good: 1}))
    assert not takes(structure, '{"/ ":1}')
