"""Structured output: a compiled structure accepts exactly the valid documents, an unsupported
one is rejected by name, and hostile ones stay within their limits.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import lzma
import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eventually import HANG_SECONDS
from filter_values import STRONG, WEAK
from sampling_rows import sample
from verbatim.base.errors import ParameterError, RequestError, UnsupportedError
from verbatim.base.params import SamplingParams
from verbatim.grammar import compiler, private_matcher
from verbatim.grammar import matcher as matcher_module
from verbatim.grammar.compiler import compile_structure
from verbatim.grammar.finite import infinite_keyword
from verbatim.grammar.json_schema import ASSERTIONS, normalise
from verbatim.grammar.llguidance_tokenizer import import_llguidance, llguidance_tokenizer
from verbatim.grammar.matcher import Matcher, Structure

DATA = Path(__file__).parent.parent / "data"
EOS = 256


class Bytes:
    """A tokenizer with one token per byte, an end token, a control token that spells text, and
    two words."""

    words = (b"<end>", b"<|im_end|>", b"true", b'{"')
    vocab_size = 260
    eos_ids = (EOS,)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else self.words[token - 256]

    def is_control(self, token: int) -> bool:
        return token in (256, 257)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(text.encode())


TOKENIZER = Bytes()


def build(**structure: Any) -> Structure:
    found = compile_structure(SamplingParams(**structure), TOKENIZER)
    assert found is not None
    return found


def allowed(mask: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


def takes(structure: Structure, text: str) -> bool:
    """Whether the text is a complete document, byte by byte through the masks as a sampler
    would."""
    matcher = structure.start()
    for byte in text.encode():
        try:
            if matcher.finished or byte not in allowed(matcher.mask()):
                return False
        except UnsupportedError as error:
            if "cannot become a valid document" not in str(error):
                raise
            return False
        matcher.advance(byte)
    return matcher.accepting


# --- the JSON Schema test suite


def writings(value: Any, limit: int = 24) -> Iterator[str]:
    """Spellings of one JSON value: object keys in any order, and 1.0 is the integer 1."""
    if isinstance(value, dict):
        for keys in itertools.islice(itertools.permutations(value), limit):
            parts = [list(writings(value[key], 4)) for key in keys]
            for combo in itertools.islice(itertools.product(*parts), limit):
                yield (
                    "{"
                    + ",".join(
                        f"{json.dumps(k, ensure_ascii=False)}:{v}"
                        for k, v in zip(keys, combo, strict=True)
                    )
                    + "}"
                )
    elif isinstance(value, list):
        for combo in itertools.islice(
            itertools.product(*[list(writings(v, 4)) for v in value]), limit
        ):
            yield "[" + ",".join(combo) + "]"
    elif isinstance(value, float) and value.is_integer():
        yield from (json.dumps(value), str(int(value)))
    else:
        yield json.dumps(value, ensure_ascii=False)
        if isinstance(value, str):
            yield json.dumps(value)


def suite() -> dict[str, list[dict[str, Any]]]:
    return dict(json.loads(lzma.decompress((DATA / "json_schema_test_suite.json.xz").read_bytes())))


def test_json_schema_test_suite() -> None:
    """Every schema compiles and then accepts all valid and no invalid instances, or is rejected
    with json_schema named.

    Known difference: "format" is an assertion here (where known), not an annotation, so the
    suite's "format" file, which accepts any string, is left to the next test. So is every keyword
    of a dialect that switches assertions off ("vocabulary"). Objects are written with their keys
    in the schema's order."""
    count: Counter[str] = Counter()
    wrong = []
    for file, cases in suite().items():
        for case in cases:
            try:
                structure = build(json_schema=case["schema"])
            except RequestError as error:
                count[f"refused {error.param}"] += 1
                continue
            count["compiled"] += 1
            if file in ("format", "vocabulary"):
                continue
            for test in case["tests"]:
                got = any(takes(structure, text) for text in writings(test["data"]))
                count["instances"] += 1
                if got != test["valid"]:
                    wrong.append((file, case["description"], test["description"]))
    assert not wrong
    assert count["compiled"] + count["refused json_schema"] == 368
    assert count["compiled"] >= 315  # measured: 320 of 368 with llguidance 1.9
    assert count["instances"] >= 1000


def test_formats_are_kept_or_refused() -> None:
    email = build(json_schema={"type": "string", "format": "email"})
    assert takes(email, '"a@b.org"')
    assert not takes(email, '"2962"')
    address = build(json_schema={"type": "string", "format": "idn-email"})
    assert takes(address, '"a@b.org"')
    assert not takes(address, '"2962"')


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
        ({"$ref": "http://example.org/schema"}, r"\$ref"),
        ({"$dynamicRef": "#a"}, "dynamicRef"),
        ({"properties": {"a": {"type": "string", "required": True}}}, "required"),
        ({"type": "string", "pattern": "^(?=a)"}, "look-around"),
        ({"type": "string", "formatMinimum": "2020-01-01"}, "formatMinimum"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(UnsupportedError, match=keyword) as caught:
        build(json_schema=schema)
    assert caught.value.param == "json_schema"
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "structure",
    [
        {"json_schema": False},
        {"json_schema": {"$ref": "#"}},
        {"json_schema": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
        {"json_schema": {"enum": []}},
        {"json_schema": {"type": "array", "items": 5}},
        {"regex": "(a"},
        {"regex": "a{99999999999}"},
        {"regex": "[^\\x00-\\u{10FFFF}]"},
        {"grammar": ""},
        {"grammar": "start: missing"},
        {"grammar": "root ::= ("},
        {"grammar": "start: A\nA: /a/ & ~/a/"},
    ],
    ids=str,
)
def test_impossible_or_wrong_structures_are_refused(structure: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        build(**structure)
    assert caught.value.param == next(iter(structure))


SYNTAX = (
    "; the syntax is that of Rust's regex crate, and a backslash before a sign means the sign "
    "itself"
)


@pytest.mark.parametrize(
    ("pattern", "kind", "said"),
    [
        (
            "(",
            ParameterError,
            "regex: '(' is not a regular expression: unclosed group, at character 1 ('(')" + SYNTAX,
        ),
        (
            "ab[z-a]c",
            ParameterError,
            "character class range, the start must be <= the end, at character 4 ('z-a]c')"
            + SYNTAX,
        ),
        (
            "x" * 100 + "*)",
            ParameterError,
            f"regex: '{'x' * 57}...' is not a regular expression: unopened group, at character 102",
        ),
        ("a\nb(\nc", ParameterError, "unclosed group"),
        (
            "(?=a)b",
            UnsupportedError,
            "look-around, including look-ahead and look-behind, is not supported, at character 1",
        ),
        (r"(a)\1", UnsupportedError, "backreferences are not supported, at character 4"),
        (
            "a\\",
            ParameterError,
            "regex: ends in a backslash that escapes nothing; write two of them for the character "
            "itself",
        ),
    ],
)
def test_the_error_for_a_bad_regex_names_position_reason_and_remedy(
    pattern: str, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind) as caught:
        build(regex=pattern)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_error_for_a_bad_pattern_in_a_schema_is_the_same() -> None:
    with pytest.raises(
        ParameterError,
        match=r"json_schema: '\(' is not a regular expression \(a pattern inside\): "
        "unclosed group, at character 1",
    ):
        build(json_schema={"type": "string", "pattern": "("})


def test_two_backslashes_are_one_in_the_text() -> None:
    assert takes(build(regex="a\\\\"), "a\\")


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, False),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, False),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, False),
        ({"exclusiveMinimum": -0.5, "exclusiveMaximum": 0}, False),
        ({"exclusiveMinimum": 0, "allOf": [{"maximum": 0.25}]}, False),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, True),
        ({"exclusiveMinimum": 0, "maximum": 1.5}, True),
        ({"exclusiveMinimum": 0.5, "exclusiveMaximum": 0.75}, True),
        ({"minimum": 0, "maximum": 0.5}, True),
        ({"exclusiveMinimum": 3}, True),
    ],
    ids=str,
)
def test_an_open_bound_is_not_written_itself(bounds: dict[str, Any], kept: bool) -> None:
    """llguidance 1.9 would accept the bound where the other one is near; such schemas are
    rejected."""
    schema = {"type": "number", **bounds}
    if not kept:
        with pytest.raises(UnsupportedError, match="exclusiveM"):
            build(json_schema=schema)
        return
    structure = build(json_schema=schema)
    low, high = bounds.get("exclusiveMinimum"), bounds.get("exclusiveMaximum")
    for bound in (low, high):
        for text in {str(bound), f"{bound}.0", "-0"} if bound is not None else ():
            assert bound != 0 or not takes(structure, text)
            assert not takes(structure, text) or text == "-0"


@pytest.mark.parametrize("step", [-2, -0.5, 0])
def test_a_multiple_of_nothing_or_less_is_refused(step: float) -> None:
    with pytest.raises(ParameterError, match="multipleOf"):
        build(json_schema={"type": "number", "multipleOf": step})


@pytest.mark.parametrize(
    "schema",
    [
        {
            "minProperties": 2,
            "patternProperties": {"^(b|a)$": {"const": 1}},
            "additionalProperties": False,
        },
        {"minProperties": 2},
        {"allOf": [{"minProperties": 2}], "required": ["b"]},
    ],
)
def test_a_name_that_is_written_twice_does_not_count_twice(schema: dict[str, Any]) -> None:
    """{"b":1,"b":1} has one property for a JSON parser; llguidance counts two."""
    structure = build(json_schema={"type": "object", **schema})
    assert takes(structure, '{"b":1,"a":1}')
    assert not takes(structure, '{"b":1,"b":1}')


ILL_TYPED = [5, "x", None, True, [], {}, [5], {"a": 5}, -1, 1e400, [[]], 0.5]


@pytest.mark.parametrize("keyword", sorted(ASSERTIONS))
def test_ill_typed_keywords_are_refused_or_harmless(keyword: str) -> None:
    """Whatever the value of a keyword, the result is a structure or an error that names the
    field."""
    for value in ILL_TYPED:
        for kind in ("object", "array"):
            schema = json.loads(
                json.dumps({"type": kind, keyword: value if value != 1e400 else 10**30})
            )
            try:
                build(json_schema=schema)
            except RequestError as error:
                assert error.param == "json_schema"  # noqa: PT017


def test_a_long_chain_of_references_is_checked_quickly() -> None:
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(9000)}
    schema = {
        "$defs": dict(reversed(chain.items())) | {"a9000": {"type": "null"}},
        "$ref": "#/$defs/a0",
    }
    assert infinite_keyword(schema) is None
    assert infinite_keyword({"$defs": chain, "$ref": "#/$defs/a0"}) is None


NODE: dict[str, Any] = {
    "type": "object",
    "properties": {"next": {"$ref": "#"}},
    "required": ["next"],
}


@pytest.mark.parametrize(
    ("schema", "keyword", "place"),
    [
        (NODE, "required", "#"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "minItems", "#"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
            "allOf",
            "#/$defs/a",
        ),
        (
            {"anyOf": [NODE | {"properties": {"next": {"$ref": "#"}}}, {"$ref": "#"}]},
            "required",
            "#/anyOf/0",
        ),
        (
            {"type": "object", "required": ["x"], "additionalProperties": {"$ref": "#"}},
            "required",
            "#",
        ),
    ],
    ids=str,
)
def test_a_document_that_must_contain_itself_is_refused(
    schema: dict[str, Any], keyword: str, place: str
) -> None:
    why = f"no document satisfies it: {keyword}: every document would contain itself (at {place})"
    with pytest.raises(ParameterError, match=f"{re.escape(why)}$"):
        build(json_schema=schema)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (NODE | {"required": []}, "{}"),
        (
            {**NODE, "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
            '{"next":{"next":null}}',
        ),
        ({"type": "array", "items": {"$ref": "#"}}, "[[],[]]"),
        (
            {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
            '{"a":null}',
        ),
        (
            {
                "type": "array",
                "prefixItems": [{"type": "integer"}],
                "items": {"$ref": "#"},
                "minItems": 1,
            },
            "[1]",
        ),
    ],
    ids=str,
)
def test_recursion_that_can_end_is_served(schema: dict[str, Any], text: str) -> None:
    assert takes(build(json_schema=schema), text)


# --- the four kinds


def test_each_kind_of_structure() -> None:
    schema = build(
        json_schema={
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        }
    )
    assert takes(schema, '{"a": 12}')
    assert takes(schema, '{\n  "a" : 12\n}')
    assert not takes(schema, '{"a": "12"}')
    assert not takes(schema, '{"b": 1}')
    regex = build(regex=r"[a-c]{2,3}|x\d+")
    assert takes(regex, "abc")
    assert takes(regex, "x42")
    assert not takes(regex, "abcd")
    lark = build(grammar='start: "(" start ")" | "x"')
    assert takes(lark, "((x))")
    assert not takes(lark, "((x)")
    gbnf = build(grammar='root ::= "(" root ")" | [xy]')
    assert takes(gbnf, "((y))")
    assert not takes(gbnf, "((z))")
    choice = build(choice=["yes", "no", 'say "maybe"\n', "né"])
    for text in ("yes", "no", 'say "maybe"\n', "né"):
        assert takes(choice, text)
    for text in ("ye", "yesno", "maybe"):
        assert not takes(choice, text)
    anything = build(json_schema=True)
    assert takes(anything, '[1, {"x": null}]')


def test_a_request_without_a_structure_compiles_to_none() -> None:
    assert compile_structure(SamplingParams(), TOKENIZER) is None


def test_the_end_token_is_allowed_exactly_where_the_text_is_complete() -> None:
    matcher = build(regex="ab(ab)?").start()
    for token, may_end in ((97, False), (98, False), (97, True), (98, False)):
        assert (EOS in allowed(matcher.mask())) == may_end
        matcher.advance(token)
    assert matcher.finished
    other = build(regex="ab(ab)?").start()
    other.advance(97)
    other.advance(98)
    assert not other.finished
    other.advance(EOS)
    assert other.finished
    early = build(regex="ab(ab)?").start()
    early.advance(97)
    with pytest.raises(UnsupportedError):
        early.advance(EOS)


def test_control_tokens_are_not_text() -> None:
    """A free string may contain the characters of a control token, but never the token itself."""
    matcher = build(regex=r"[^\n]*").start()
    assert 257 not in allowed(matcher.mask())
    assert 258 in allowed(matcher.mask())  # the word `true`
    assert takes(build(choice=["<|im_end|>"]), "<|im_end|>")
    assert allowed(build(choice=["<|im_end|>"]).start().mask()) == [ord("<")]
    with pytest.raises(UnsupportedError, match="control tokens"):
        build(grammar='start: <|im_end|> "x"')


def test_masks_along_drafts_are_those_of_single_steps() -> None:
    structure = build(json_schema={"type": "array", "items": {"type": "boolean"}})
    matcher = structure.start()
    # [ true x ]: the x is forbidden
    drafts = matcher.allowed_drafts([ord("["), 258, ord("x"), ord("]")])
    assert drafts == (ord("["), 258)
    masks = matcher.masks_along(drafts)
    single = structure.start()
    for i, mask in enumerate(masks):
        assert mask == single.mask()
        if i < 2:
            single.advance(drafts[i])
    assert matcher.mask() == masks[0]  # the matcher itself did not advance
    assert matcher.masks_along(drafts[:1]) == masks[:2]  # a plan may submit fewer
    assert matcher.masks_along([]) == (masks[0],)
    with pytest.raises(AssertionError):
        matcher.masks_along([ord("x")])


def test_masks_along_drafts_that_complete_the_document() -> None:
    matcher = build(choice=["no"]).start()
    drafts = matcher.allowed_drafts([ord("n"), ord("o"), 5])
    assert drafts == (ord("n"), ord("o"))
    assert matcher.masks_along(drafts)[2] is None


def test_forced_tokens_are_the_only_continuation() -> None:
    structure = build(grammar='start: "answer: " ("yes" | "no")')
    matcher = structure.start()
    forced = matcher.forced()
    assert bytes(forced) == b"answer: "
    for token in forced:
        assert allowed(matcher.mask()) == [token]
        matcher.advance(token)
    assert matcher.forced() == ()


def test_an_exhausted_shared_lexer_changes_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matchers share the states of one lexer, whose number is limited. A long output that
    exhausts it, in another choice or request, changes nothing: the masks are the same as alone."""
    monkeypatch.setitem(matcher_module.LIMITS, "max_lexer_states", 300)
    pattern = "(a|b)*a(a|b){8}"

    def walk(structure: Structure, seed: int) -> list[bytes]:
        rng, matcher, masks = random.Random(seed), structure.start(), []
        for _ in range(100):
            masks.append(matcher.mask())
            matcher.advance(rng.choice([97, 98]))
        return masks

    def fresh() -> Structure:
        compiler._CACHES.pop(TOKENIZER, None)
        return build(regex=pattern)

    alone = [walk(fresh(), seed) for seed in range(5)]
    shared = fresh()
    assert [walk(shared, seed) for seed in range(5)] == alone
    assert shared.exhausted  # the shared lexer was exhausted
    compiler._CACHES.pop(TOKENIZER, None)


def test_a_panic_inside_llguidance_ends_one_completion_only() -> None:
    """A lazy expression that may be empty trips an assertion of llguidance 1.9 and leaves the
    shared lexer unusable. The other sequences continue with another lexer; with this grammar
    they fail by themselves, with our error."""
    lib = import_llguidance("grammar")
    broken = lib.LLMatcher(
        llguidance_tokenizer(lib, TOKENIZER),
        lib.LLMatcher.grammar_from_lark('start: a "!"\na[lazy]: /.*?/'),
        log_level=0,
    )
    broken.deep_copy().compute_bitmask()
    poisoned = broken.deep_copy()
    poisoned.compute_bitmask()
    assert "PoisonError" in poisoned.get_error()
    structure = build(regex="poison[0-9]")
    alone = structure.start().mask()
    matcher = structure.start()
    matcher._inner, matcher._mask = poisoned, None
    assert matcher.mask() == alone
    assert structure.exhausted
    assert build(regex="poison[0-9]") is not structure
    with pytest.raises(UnsupportedError, match="llguidance, which follows it, failed"):
        build(grammar='start: a "!"\na[lazy]: /.*?/')


def test_a_completion_too_complex_for_its_private_lexer_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(matcher_module.LIMITS, "max_lexer_states", 300)
    compiler._CACHES.pop(TOKENIZER, None)
    rng, matcher = random.Random(0), build(regex="(a|b)*a(a|b){8}").start()

    def go_on() -> None:
        for _ in range(1000):
            matcher.advance(rng.choice([97, 98]))
            matcher.mask()

    with pytest.raises(UnsupportedError, match="too many states"):
        go_on()
    compiler._CACHES.pop(TOKENIZER, None)


def test_an_exhausted_lexer_is_detected_where_one_byte_must_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one allowed byte llguidance does not run its lexer: it returns without an error that
    only `t` may follow, though `true` may as well."""
    monkeypatch.setitem(matcher_module.LIMITS, "max_lexer_states", 300)
    compiler._CACHES.pop(TOKENIZER, None)
    structure, rng = build(regex="xxt[a-z]{1,5}[ab]*a[ab]{8}"), random.Random(0)
    matcher, other = structure.start(), structure.start()
    for token in b"xx":
        matcher.mask()
        matcher.advance(token)
    for token in b"xxtxxxxx":
        other.advance(token)
    while other.poll_mask():
        other.advance(rng.choice(b"ab"))
    alone = matcher._inner.deep_copy()
    assert allowed(bytes(alone.compute_bitmask())) == [ord("t")]
    assert not alone.is_error()  # fails once llguidance fixes this
    assert allowed(matcher.mask()) == [ord("t"), 258]
    compiler._CACHES.pop(TOKENIZER, None)


def test_an_exhausted_lexer_is_detected_within_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance knows that a string may contain `true` without walking it. When it walks it and
    the lexer is exhausted on the way, it reports an invalid token."""
    plain = build(json_schema={"type": "string"}).start()
    monkeypatch.setitem(matcher_module.LIMITS, "step_lexer_fuel", 1120)
    compiler._CACHES.pop(TOKENIZER, None)
    structure = build(json_schema={"type": "string"})
    matcher = structure.start()
    for token in (ord('"'), 258):
        assert matcher.mask() == plain.mask()
        matcher.advance(token)
        plain.advance(token)
    assert matcher.mask() == plain.mask()
    assert structure.exhausted
    compiler._CACHES.pop(TOKENIZER, None)


@pytest.mark.parametrize("stretch", [1000, 20])
def test_where_a_completion_ends_as_too_complex_depends_on_its_tokens_alone(
    monkeypatch: pytest.MonkeyPatch, stretch: int
) -> None:
    """Whichever sequences share the lexer, and however often one was rebuilt: each completion
    ends at its own token, or not at all."""
    monkeypatch.setitem(matcher_module.LIMITS, "max_lexer_states", 60)
    monkeypatch.setattr(private_matcher, "MIN_LEXER_TOKENS", stretch)

    def ends(together: bool) -> list[int]:
        compiler._CACHES.pop(TOKENIZER, None)
        structure = build(regex="(a|b)*a(a|b){8}")
        rngs, found = [random.Random(seed) for seed in range(6)], {}
        matchers = [
            (
                structure if together else Structure(structure._make, "regex", TOKENIZER.eos_ids)
            ).start()
            for _ in rngs
        ]
        for taken in range(100):
            for i, (rng, matcher) in enumerate(zip(rngs, matchers, strict=True)):
                with contextlib.suppress(UnsupportedError):
                    if i not in found:
                        found[i] = taken  # unless it can continue
                        matcher.mask()
                        matcher.advance(rng.choice([97, 98]))
                        del found[i]
        compiler._CACHES.pop(TOKENIZER, None)
        return [found.get(i, 100) for i in range(6)]

    alone = ends(together=False)
    assert ends(together=True) == alone
    assert len(set(alone)) > 1
    assert max(alone) < 33 if stretch == 1000 else min(alone) >= 33


def test_an_exhausted_lexer_is_rebuilt_in_a_background_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(matcher_module.LIMITS, "max_lexer_states", 300)
    compiler._CACHES.pop(TOKENIZER, None)
    structure, rng = build(regex="(a|b)*a(a|b){8}"), random.Random(0)
    go, threads = threading.Event(), []

    def slowly(make: Callable[[Any], Any], limits: Any) -> Any:
        threads.append(threading.current_thread())
        assert go.wait(HANG_SECONDS)
        return make(limits)

    structure._make = partial(slowly, structure._make)
    matcher = structure.start()
    while matcher.poll_mask():
        matcher.advance(rng.choice([97, 98]))
    assert structure.exhausted
    assert not matcher.poll_mask()  # the rebuild is still pending
    assert not matcher.finished
    go.set()
    matcher.mask()
    assert matcher.poll_mask()
    assert threading.current_thread() not in threads
    assert len(threads) == 1
    compiler._CACHES.pop(TOKENIZER, None)


def test_a_rebuild_is_cancelled_when_its_sequence_is_gone() -> None:
    structure, made = build(regex="a*"), []

    def make() -> Any:
        made.append(1)
        return structure.private_matcher()

    for since in (None, 0):
        assert (
            private_matcher.rebuild(make, list(b"aaa"), since, lambda: None).exception() is not None
        )
        assert not made
        assert (
            private_matcher.rebuild(make, list(b"aaa"), since, lambda: 1).result().inner.rollback(3)
        )
        assert made.pop()
    waits = iter([1, 1, 1])
    # cancelled during the replay
    assert (
        private_matcher.rebuild(make, list(b"a" * 50), None, lambda: next(waits, None)).exception()
        is not None
    )
    assert next(waits, None) is None


def test_the_first_mask_may_use_the_full_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared lexer has half the limit. If that is too little for the first mask, each sequence
    gets a private lexer; if the full limit is too little, the structure is rejected."""
    text = "(t|r|u|e)*t(t|r|u|e){8}"  # `true` is a token: walking it finds states
    plain = build(regex=text).start()
    monkeypatch.setitem(matcher_module.LIMITS, "max_lexer_states", 32)
    compiler._CACHES.pop(TOKENIZER, None)
    structure = build(regex=text)
    matcher = structure.start()
    assert matcher.mask() == plain.mask()
    for one in (matcher, plain):
        one.advance(ord("u"))
    assert matcher.mask() == plain.mask()
    assert structure.exhausted
    monkeypatch.setitem(matcher_module.LIMITS, "max_lexer_states", 16)
    compiler._CACHES.pop(TOKENIZER, None)
    with pytest.raises(UnsupportedError, match="too many states"):
        build(regex=text)


def test_drafts_never_exhaust_the_lexer_of_a_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong drafts exhaust the draft lexer: that ends drafting, and the completion continues
    with its own lexer."""
    monkeypatch.setitem(matcher_module.LIMITS, "max_lexer_states", 600)
    compiler._CACHES.pop(TOKENIZER, None)
    rng, structure = random.Random(0), build(regex="(a|b)*a(a|b){8}")
    matcher, alone = (
        structure.start(),
        Structure(structure._make, "regex", TOKENIZER.eos_ids).start(),
    )
    walked = 0
    for step in range(60):
        drafts = matcher.allowed_drafts([rng.choice([97, 98]) for _ in range(15)])
        walked += len(drafts)
        token = drafts[0] if drafts and step % 2 else rng.choice([97, 98])
        for one in (matcher, alone):
            one.advance(token)
        assert matcher.mask() == alone.mask()
    assert 100 < walked < 60 * 15
    assert not structure.has_draft_matcher
    assert not structure.exhausted  # the completion kept its lexer
    assert structure.start().allowed_drafts([97, 98]) == structure.start().forced() == ()
    assert structure.start().masks_along(()) == (structure.start().mask(),)
    compiler._CACHES.pop(TOKENIZER, None)


def test_draft_masks_equal_the_masks_of_the_sequence() -> None:
    """Whatever the draft matcher consumed before, and wherever it starts: the masks of a step
    are those of the sequence itself."""
    structure = build(
        json_schema={
            "type": "object",
            "properties": {"a": {"type": "array", "items": {"type": "number"}}},
        }
    )
    text = list(b'{"a": [1.5, -2, 30, 4e5, 6]}')
    for begin in (0, 5, len(text) - 3):
        matcher = structure.start()
        for at, token in enumerate(text):
            if at >= begin:
                drafts = matcher.allowed_drafts([*text[at : at + 4], ord("7")])
                single = structure.start()
                for earlier in text[:at]:
                    single.advance(earlier)
                assert drafts[:4] == tuple(text[at : at + 4])
                for draft, mask in zip((*drafts, None), matcher.masks_along(drafts), strict=True):
                    assert mask is None or mask == single.mask()
                    if draft is not None:
                        single.advance(draft)
            matcher.advance(token)
        assert matcher.accepting


def test_a_slow_draft_matcher_compiles_in_a_thread_or_not_at_all() -> None:
    for seconds, made in (
        (matcher_module.INLINE_COMPILE / 2, "now"),
        (matcher_module.MAX_DRAFT_COMPILE / 2, "later"),
        (matcher_module.MAX_DRAFT_COMPILE * 2, "never"),
    ):
        structure = Structure(build(regex="scout[0-9]")._make, "regex", TOKENIZER.eos_ids)
        threads: list[threading.Thread] = []
        go = threading.Event()

        def waits(
            make: Callable[[Any], Any], limits: Any, threads: Any = threads, go: Any = go
        ) -> Any:
            threads.append(threading.current_thread())
            assert threads[-1] is threading.main_thread() or go.wait(HANG_SECONDS)
            return make(limits)

        structure._make, structure.seconds = partial(waits, structure._make), seconds
        assert structure.start().allowed_drafts(b"sc") == (tuple(b"sc") if made == "now" else ())
        go.set()
        for thread in threads:
            if thread is not threading.main_thread():
                thread.join(HANG_SECONDS)
        assert structure.start().allowed_drafts(b"sc") == (() if made == "never" else tuple(b"sc"))
        assert [t is threading.main_thread() for t in threads] == {
            "now": [True],
            "later": [False],
            "never": [],
        }[made]


def test_copies_of_a_matcher_are_independent() -> None:
    first = build(choice=["ab", "ac"]).start()
    first.advance(97)
    second = first.copy()
    first.advance(98)
    assert first.finished
    assert allowed(second.mask()) == [98, 99]


def test_whitespace_is_bounded() -> None:
    """A model that likes blanks cannot fill its output with them."""
    matcher = build(json_schema={"type": "array", "items": {"type": "integer"}}).start()
    matcher.advance(ord("["))
    for _ in range(32):
        matcher.advance(ord(" "))
    assert ord(" ") not in allowed(matcher.mask())


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}


def written(matcher: Matcher, params: SamplingParams, seed: int) -> str:
    """Draw an output from random logits through the whole sampling pipeline."""
    rng = np.random.default_rng(seed)
    out = bytearray()
    for position in range(400):
        drawn = sample(
            rng.normal(size=260) * 3,
            params,
            mask=matcher.mask(),
            position=position,
            prompt_len=0,
            key=seed,
        )
        if drawn.token in TOKENIZER.eos_ids:
            break
        out += TOKENIZER.token_bytes(drawn.token)
        matcher.advance(drawn.token)
        if matcher.finished:
            break
    return out.decode(errors="replace")


@pytest.mark.parametrize(
    "setting", [{"temperature": 1.5}, {"temperature": 0}, *STRONG.values(), WEAK], ids=str
)
def test_random_logits_under_a_schema_give_valid_documents(setting: dict[str, Any]) -> None:
    import jsonschema

    structure = build(json_schema=SCHEMA)
    for seed in range(10):
        document = json.loads(
            written(structure.start(), SamplingParams(**setting, json_schema=SCHEMA), seed)
        )
        jsonschema.validate(document, SCHEMA)


# --- hostile


def nested(depth: int, wrap: Any) -> Any:
    out: Any = {}
    for _ in range(depth):
        out = wrap(out)
    return out


HOSTILE: list[dict[str, Any]] = [
    {"json_schema": {"type": "integer", "multipleOf": 7919 * 7907}},
    {"json_schema": {"allOf": [{"type": "string", "pattern": f"a{{{i}}}.*b"} for i in range(200)]}},
    {"json_schema": nested(11, lambda s: {"allOf": [s, {"properties": {"a": s}}]})},
    {"json_schema": nested(100, lambda s: {"type": "array", "items": s})},
    {"json_schema": {"properties": {f"p{i}": {} for i in range(20_001)}}},
    {"json_schema": {"allOf": [
        {"anyOf": [
            {"properties": {f"a{i}": {"type": "integer"}}},
            {"properties": {f"b{i}": {}}},
        ]}
        for i in range(20)
    ]}},
    {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
    {"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
    {"regex": "a" * (16 * 1024 + 1)},
    {"choice": ["x" * 1000 + str(i) for i in range(300)]},
]  # fmt: skip


@pytest.mark.parametrize(
    "structure", HOSTILE, ids=lambda s: f"{next(iter(s))}-{str(next(iter(s.values())))[:24]}"
)
def test_hostile_structures_are_refused(structure: dict[str, Any]) -> None:
    """Rejected, by name, for its cost: not for a timeout."""
    with pytest.raises(RequestError) as caught:
        build(**structure)
    assert caught.value.param == next(iter(structure))


def test_random_walks_in_large_structures_stay_within_limits() -> None:
    """Large but legal structures: a random walk continues, ends, or is rejected by name."""
    rng = random.Random(4)
    refused: list[str | None] = []
    for structure in (
        {"regex": "(a|a)*" * 2000},
        {"regex": ".{0,5000}" * 50},
        {
            "grammar": "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(30))
            + '\nr30: "a"\nstart: r0'
        },
        {"regex": "(a|b)*a(a|b){200}"},
        {"regex": "\\p{L}{1,10000}"},
        {"json_schema": {"type": "array", "minItems": 100_000}},
        {"json_schema": {"enum": ["x" * i for i in range(200)]}},
        {"choice": [f"choice {i}" for i in range(3000)]},
    ):
        try:
            matcher = build(**structure).start()
            for _ in range(60):
                if matcher.finished:
                    break
                matcher.advance(rng.choice(allowed(matcher.mask())))
        except UnsupportedError as error:
            refused.append(error.param)
    assert set(refused) <= {"regex", "json_schema", "choice", "grammar"}


def test_schema_size_is_checked_before_the_compile() -> None:
    with pytest.raises(UnsupportedError, match="deep"):
        normalise(nested(65, lambda s: {"items": s}))
    with pytest.raises(UnsupportedError, match="parts"):
        normalise({"anyOf": [{}] * 50_001})
    normalise(nested(63, lambda s: {"items": s}))


def test_without_llguidance_the_field_and_the_remedy_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match=r"pip install '\.\[grammar\]'") as caught:
        build(regex="a")
    assert caught.value.param == "regex"


def test_a_temperature_inside_a_grammar_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="temperature"):
        build(grammar="start: a\na[temperature=0.5]: /a+/")


def test_a_schema_inside_a_grammar_is_checked_too() -> None:
    assert takes(build(grammar='start: "<" %json {"type": "integer"} ">"'), "<12>")
    with pytest.raises(UnsupportedError, match="deepRequired") as caught:
        build(grammar='start: %json {"deepRequired": ["a"]}')
    assert caught.value.param == "grammar"
    assert build(grammar='start: %json {"item": {}} | %json {"item": 1}').warnings == (
        "grammar: %json: these keywords assert nothing and were ignored: "
        "item (at #; did you mean 'items'?)",
    )
    with pytest.raises(ParameterError, match=r"grammar: %json: the key 'type' appears twice"):
        build(grammar='start: %json {"type": "integer", "type": "null"}')


def test_sizes_are_limited() -> None:
    with pytest.raises(ParameterError, match="characters"):
        build(grammar="x" * (256 * 1024 + 1))
