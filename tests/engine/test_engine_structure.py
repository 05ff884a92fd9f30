"""Structured output in the engine: the mask works with every other feature, and a grammar that
fails ends only its own request."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from eventually import HANG_SECONDS
from verbatim import LLM, SamplingParams
from verbatim.base.errors import ParameterError, UnsupportedError
from verbatim.base.records import Completion, Finish
from verbatim.engine.core import EngineCore
from verbatim.grammar import compiler, private_matcher
from verbatim.grammar import matcher as matcher_module
from verbatim.grammar.document_check import CheckState, DocumentCheck
from verbatim.grammar.llguidance_tokenizer import import_llguidance, llguidance_tokenizer
from verbatim.grammar.matcher import Matcher, Structure
from verbatim.testing.fakes import fake_parts

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ann", "bob"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASKED: list[dict[str, Any]] = [
    {"json_schema": SCHEMA},
    {"regex": "[a-f]{4,12}z"},
    {"choice": ["red", "green", "blue"]},
    {"grammar": 'start: "yes" | "no" " " /[0-9]{3}/'},
    {"json_schema": SCHEMA, "n": 3, "frequency_penalty": 0.3},
    {"regex": "[a-f]{4,12}z", "stop": "b", "min_tokens": 2, "temperature": 2.0},
]


def fake_llm(**options: Any) -> LLM:
    return LLM.from_loaded(fake_parts(canary=True), **{"kv_blocks": 200, "check": True, **options})


def params() -> list[SamplingParams]:
    return [
        SamplingParams(**{"max_tokens": 150, "seed": i, "logprobs": 1, **asked})
        for i, asked in enumerate(ASKED)
    ]


def test_every_output_matches_its_grammar() -> None:
    done = fake_llm().generate(["hello"] * len(ASKED), params())
    for i in (0, 4):
        for choice in done[i].choices:
            value = json.loads(choice.text)
            assert set(value) == {"name", "age"}
            assert value["name"] in ("ann", "bob")
            assert 0 <= value["age"] <= 99
            assert choice.finish.reason == "stop"
            assert choice.finish.detail in ("json_schema", "eos")
    assert re.fullmatch("[a-f]{4,12}z", done[1].text)
    assert done[2].text in ("red", "green", "blue")
    assert re.fullmatch("yes|no [0-9]{3}", done[3].text)
    assert "b" not in done[5].text[2:]


@pytest.mark.parametrize(
    "mode",
    [
        {"step_tokens": 3},
        {"kv_blocks": 13, "step_tokens": 16},
        {"use_cache": False},
        {"speculate": "off"},
        {"speculate": "suffix"},
        {"max_running": 2},
    ],
)
def test_structured_outputs_are_the_same_in_every_mode(mode: dict[str, Any]) -> None:
    plain = fake_llm().generate(["hello"] * len(ASKED), params())
    other = fake_llm(**mode).generate(["hello"] * len(ASKED), params())
    assert [c.choices for c in other] == [c.choices for c in plain]


@pytest.mark.parametrize(
    ("values", "length"),
    [({"choice": ["a", "b"]}, 1), ({"json_schema": {"enum": ["ab", "cd"]}}, 4)],
    ids=str,
)
def test_a_structure_that_is_complete_at_max_tokens_stops(
    values: dict[str, Any], length: int
) -> None:
    with fake_llm() as llm:
        for limit, reason in ((length - 1, "length"), (length, "stop"), (length + 1, "stop")):
            params = SamplingParams(seed=1, max_tokens=limit, **values)
            assert llm.generate("x", params).finish.reason == reason
        assert llm.generate("x", params).finish == Finish("stop", next(iter(values)))


def test_an_end_token_is_no_text_where_it_ends_a_structure() -> None:
    params = SamplingParams(seed=1, max_tokens=30, regex="(ab?)*", skip_special=False)
    with fake_llm() as llm:
        plain, ignoring = llm.generate(["x", "x"], [params, params.with_(ignore_eos=True)])
    assert plain.token_ids == ignoring.token_ids
    assert plain.text == ignoring.text


def test_streamed_text_equals_the_whole_text() -> None:
    for asked in params():
        stream = fake_llm().stream("hello", asked)
        deltas = list(stream)
        for choice in stream.completion.choices:
            assert "".join(d.text for d in deltas if d.index == choice.index) == choice.text


@pytest.mark.parametrize("failing", range(1, 8))
def test_an_interrupt_while_masks_are_computed_loses_no_block_copy(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step was planned, with copies of shared blocks, and is not executed: later steps must
    not read a block that was never copied."""
    asked = params()[4]
    whole = fake_llm().generate("hello", asked)
    llm, made, calls = fake_llm(), Matcher.masks_along, 0

    def sometimes(matcher: Matcher, drafts: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise KeyboardInterrupt
        return made(matcher, drafts)

    monkeypatch.setattr(Matcher, "masks_along", sometimes)
    stream = llm.stream("hello", asked)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    list(stream)
    assert stream.completion.choices == whole.choices
    llm.check()


def test_a_draft_that_hits_a_grammar_limit_does_not_end_the_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An ambiguous grammar becomes too complex after 74 tokens, with half the real limit.
    Drafts get there first; the output must not change, alone or in a batch."""
    monkeypatch.setitem(matcher_module.LIMITS, "max_items_in_row", 500)
    deep = 'start: s\ns: "ab" | s s | s s s | s s s s | s s s s s'
    stops = SamplingParams(max_tokens=150, min_tokens=65, grammar=deep, stop="ab" * 33, seed=1)
    fails = SamplingParams(max_tokens=150, min_tokens=125, grammar=deep, seed=1, n=2)
    found = []
    for way in ("off", "ngram", "suffix"):
        llm = fake_llm(speculate=way, context=512, kv_blocks=200)
        llm.core.drafting.adaptive = False
        done = [llm.generate("ab", asked) for asked in (stops, fails)]
        found.append([[(c.token_ids, c.finish) for c in d.choices] for d in done])
        llm.core.check()
    assert found[1] == found[0], "ngram"
    assert found[2] == found[0], "suffix"
    assert [c[1].reason for d in found[0] for c in d] == ["stop", "error", "error"]


@pytest.mark.parametrize("states", [150, 25_000])
def test_drafts_consume_no_lexer_states_of_the_shared_matcher(
    monkeypatch: pytest.MonkeyPatch, states: int
) -> None:
    """A grammar whose outputs need ever more lexer states: an output that ends at that limit
    ends at the same token with and without drafts."""
    monkeypatch.setitem(matcher_module.LIMITS, "max_lexer_states", states)
    asked = [
        SamplingParams(regex="([ab]*a[ab]{9}c)|d", max_tokens=120, seed=i, logit_bias={99: -100})
        for i in range(3 if states == 150 else 1)
    ]
    found = {}
    for way in ("off", "ngram", "suffix", *(("auto",) if states == 150 else ())):
        answers, drafted = [], 0
        for params in asked:
            llm = fake_llm(speculate=way)
            llm.core.drafting.adaptive = False
            done = llm.generate("ab", params)
            drafted += done.usage.drafted_tokens
            answers.append([(c.token_ids, c.finish) for c in done.choices])
        found[way] = answers
        assert way == "off" or drafted > 30 * len(asked)
        assert answers == found["off"], way
    assert {finish.reason for (choice,) in found["off"] for _, finish in (choice,)} == (
        {"error"} if states == 150 else {"length"}
    )


# each text needs ever more states
GROWING = SamplingParams(regex="([ab]*a[ab]{9}c)|d", max_tokens=80, logit_bias={99: -100})
Answers = list[list[tuple[tuple[int, ...], Any]]]


def grown(seeds: Sequence[int], n: int = 1, **options: Any) -> Answers:
    compiler._CACHES.clear()
    llm = fake_llm(**options)
    llm.core.drafting.adaptive = False
    done = llm.generate(["ab"] * len(seeds), [replace(GROWING, seed=seed, n=n) for seed in seeds])
    llm.check()
    compiler._CACHES.clear()
    return [[(tuple(c.token_ids), c.finish) for c in one.choices] for one in done]


@pytest.mark.parametrize(("limit", "most"), [("max_lexer_states", 120), ("step_lexer_fuel", 250)])
def test_an_output_becomes_too_complex_by_its_own_tokens_alone(
    monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    """Choices and other requests share one lexer, drafts change the pace, a rebuild takes no
    time or long: the tokens and finishes equal those alone."""
    monkeypatch.setitem(matcher_module.LIMITS, limit, most)
    alone = [grown([seed])[0] for seed in range(5)]
    assert {answer[0][1].reason for answer in alone} == {"error"}
    assert len({len(answer[0][0]) for answer in alone}) > 1
    assert grown(range(5)) == alone
    assert grown(range(5), speculate="suffix", max_running=3) == alone
    copies = grown([7], n=6)[0]
    assert grown([7], n=3)[0] == copies[:3]
    honest, step, stepped = Structure.private_matcher, EngineCore.step, threading.Condition()

    def waits_for_steps(self: Structure) -> Any:
        """A private matcher takes as long as three steps of the engine."""
        with stepped:
            for _ in range(3):
                assert stepped.wait(HANG_SECONDS)
        return honest(self)

    def counted(self: EngineCore) -> Any:
        with stepped:
            stepped.notify_all()
        return step(self)

    monkeypatch.setattr(Structure, "private_matcher", waits_for_steps)
    monkeypatch.setattr(EngineCore, "step", counted)
    assert grown([7], n=6, speculate="ngram", kv_blocks=26)[0] == copies


def test_sequences_together_may_exceed_one_lexer(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sequence does so alone: all complete, and the shared lexer is replaced as often as
    needed."""
    monkeypatch.setitem(matcher_module.LIMITS, "max_lexer_states", 250)
    together = grown([3], n=8)[0]
    assert {finish.reason for _, finish in together} == {"length"}
    monkeypatch.setitem(matcher_module.LIMITS, "max_lexer_states", 120)
    assert {finish.reason for _, finish in grown([3], n=2)[0]} == {"error"}
    monkeypatch.setattr(private_matcher, "MIN_LEXER_TOKENS", 8)
    assert grown([3], n=8)[0] == together


def test_other_sequences_continue_while_a_matcher_is_rebuilt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One sequence pauses until another has completed. An abort does not wait either."""
    monkeypatch.setitem(matcher_module.LIMITS, "max_lexer_states", 250)
    plain, neighbour = (
        grown([1, 2]),
        fake_llm().generate("neighbour", SamplingParams(max_tokens=150, seed=1)),
    )
    go, honest = threading.Event(), Structure.private_matcher

    def waits(self: Structure) -> Any:
        assert go.wait(HANG_SECONDS)
        return honest(self)

    monkeypatch.setattr(Structure, "private_matcher", waits)
    core = fake_llm().core
    for name, text, asked in (
        ("a", "ab", replace(GROWING, seed=1)),
        ("b", "ab", replace(GROWING, seed=2)),
        ("gone", "ab", replace(GROWING, seed=3)),
        ("c", "neighbour", SamplingParams(max_tokens=150, seed=1)),
    ):
        core.add(core.request(text, asked, request_id=name))
    ended: dict[str, Any] = {}
    while core.busy:
        ended |= {out.request_id: out for out in core.step() if isinstance(out, Completion)}
        if "c" in ended and not go.is_set():
            assert set(ended) == {"c"}
            assert core.abort("gone")
            assert core.step()[0].request_id == "gone"
            go.set()
    core.check()
    assert ended["c"].choices == neighbour.choices
    assert [[(tuple(c.token_ids), c.finish) for c in ended[name].choices] for name in "ab"] == plain


@pytest.mark.parametrize("mode", ["off", "ngram"])
@pytest.mark.parametrize("at", [6, 32])
def test_a_pause_between_accepted_drafts_or_at_the_end(
    monkeypatch: pytest.MonkeyPatch, mode: str, at: int
) -> None:
    """Forced tokens are accepted drafts. The lexer is exhausted after one of them, or at the
    last token of the output."""
    asked = SamplingParams(max_tokens=60, regex="there is only one way [a-f]{4} to go", seed=1)
    plain = fake_llm(speculate="off").generate("x", asked)
    assert plain.finish.detail == "regex"
    assert len(plain.choices[0].token_ids) == 32
    llm, honest, paused = fake_llm(speculate=mode), Matcher.advance, []
    llm.core.drafting.adaptive = False
    lib = import_llguidance("regex")
    limits = lib.LLParserLimits(**matcher_module.LIMITS | {"step_lexer_fuel": 1})
    grown = lib.LLMatcher.grammar_from_regex(str(GROWING.regex))
    broken = lib.LLMatcher(
        llguidance_tokenizer(lib, llm.core.loaded.tokenizer), grown, log_level=0, limits=limits
    )
    while not broken.is_error():
        broken.compute_bitmask()
        broken.consume_token(97)

    def breaks(self: Matcher, token: int) -> None:
        honest(self, token)
        if len(self._tokens) == at:
            paused.append(at)
            self._inner = broken.deep_copy()

    monkeypatch.setattr(Matcher, "advance", breaks)
    done = llm.generate("x", asked)
    assert done.choices == plain.choices
    assert paused == [at]
    assert (done.usage.accepted_tokens > 20) == (mode == "ngram")
    llm.check()


@pytest.mark.parametrize("where", ["poll_mask", "advance"])
def test_a_failing_grammar_ends_only_its_own_request(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    plain = fake_llm().generate("neighbour", SamplingParams(max_tokens=30, seed=1))
    honest, calls = getattr(Matcher, where), 0

    def fails(self: Matcher, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 4:
            raise UnsupportedError("regex", "became too complex to follow")
        return honest(self, *args)

    monkeypatch.setattr(Matcher, where, fails)
    llm = fake_llm(speculate="off")
    bad, good = llm.generate(
        ["hello", "neighbour"],
        [SamplingParams(max_tokens=60, regex="[a-z]{50}"), SamplingParams(max_tokens=30, seed=1)],
    )
    assert bad.finish.reason == "error"
    assert "too complex" in bad.finish.detail
    assert good.choices == plain.choices
    llm.check()


def test_a_failing_grammar_in_a_step_of_one_sequence() -> None:
    """The step loses its only sequence after it was planned."""

    class Broken:
        field = "regex"

        def start(self) -> Any:
            return self

        def masks_along(self, drafts: Any) -> Any:
            raise UnsupportedError("regex", "no")

        def forced(self) -> tuple[int, ...]:
            return ()

    llm = fake_llm(speculate="off")
    request = llm.core.request("x", SamplingParams(max_tokens=5))
    object.__setattr__(request, "structure", Broken())
    llm.core.add(request)
    outs = [out for _ in range(3) for out in llm.core.step()]
    assert outs[-1].finish.reason == "error"
    assert not llm.core.busy
    llm.check()


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"regex": "["}, "regex"),
        ({"json_schema": {"type": "nothing"}}, "json_schema"),
        ({"grammar": "start: nothing"}, "grammar"),
    ],
)
def test_an_invalid_grammar_is_rejected_by_name_before_it_runs(
    asked: dict[str, Any], param: str
) -> None:
    llm = fake_llm()
    with pytest.raises((ParameterError, UnsupportedError)) as caught:
        llm.generate("x", SamplingParams(**asked))
    assert caught.value.param == param
    assert llm.stats()["requests_total"] == 0


NUMBERS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 400},
    "uniqueItems": True,
    "minItems": 3,
    "maxItems": 3,
}


@pytest.mark.parametrize("mode", ["off", "ngram"])
def test_other_sequences_continue_while_a_document_is_checked(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The check of alice's documents ends only after the others have: her sequence waits for its
    mask, bob's documents are checked meanwhile, and no step waits."""
    slow = {**NUMBERS, "maxItems": 4}
    asked = [
        ("slow", SamplingParams(max_tokens=150, seed=1, json_schema=slow), "alice"),
        ("also slow", SamplingParams(max_tokens=150, seed=2, json_schema=slow), "alice"),
        ("neighbour", SamplingParams(max_tokens=40, seed=1), "bob"),
        ("checked", SamplingParams(max_tokens=150, seed=3, json_schema=NUMBERS), "bob"),
    ]
    plain = [fake_llm().generate(name, params).choices for name, params, _ in asked]
    engine, go, honest = threading.current_thread(), threading.Event(), DocumentCheck.filter
    checks = []

    def checked(self: DocumentCheck, mask: bytes, state: CheckState) -> Any:
        assert threading.current_thread() is not engine, "a step must not wait for a check"
        checks.append(self)
        if self._schema["maxItems"] == 4:
            assert go.wait(HANG_SECONDS)
        return honest(self, mask, state)

    core = fake_llm(speculate=mode).core
    core.drafting.adaptive = False
    requests = [
        core.request(name, params, request_id=name, tenant=tenant) for name, params, tenant in asked
    ]
    monkeypatch.setattr(DocumentCheck, "filter", checked)
    for request in requests:
        core.add(request)
    ended: dict[str, Any] = {}
    while core.busy:
        ended |= {out.request_id: out for out in core.step() if isinstance(out, Completion)}
        assert go.is_set() or not {"slow", "also slow"} & set(ended)
        if {"neighbour", "checked"} <= set(ended):
            go.set()
    core.check()
    assert len(checks) > 3
    assert [ended[name].choices for name, _, _ in asked] == plain


def test_a_document_that_the_check_cannot_follow_ends_its_own_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error of a check in another thread reaches the request."""
    neighbour = SamplingParams(max_tokens=40, seed=1)
    plain = fake_llm().generate("neighbour", neighbour)
    llm = fake_llm()
    first = llm.generate("x", SamplingParams(max_tokens=150, seed=1, json_schema=NUMBERS))
    assert first.finish.reason == "stop"

    def fails(self: DocumentCheck, mask: bytes, state: CheckState) -> Any:
        raise UnsupportedError("json_schema", "the document is too complex to check")

    monkeypatch.setattr(DocumentCheck, "filter", fails)
    bad, good = llm.generate(
        ["x", "neighbour"], [SamplingParams(max_tokens=150, seed=1, json_schema=NUMBERS), neighbour]
    )
    assert bad.finish == Finish("error", "json_schema: the document is too complex to check")
    assert good.choices == plain.choices
    llm.check()


def test_names_do_not_repeat_with_and_without_drafts() -> None:
    """Short names of two letters, so that a model that draws at random repeats most of them."""
    schema = {
        "type": "object",
        "patternProperties": {"^[ab]+$": {"enum": [0, 1]}},
        "additionalProperties": False,
    }
    asked = [SamplingParams(max_tokens=300, seed=seed, json_schema=schema) for seed in range(8)]
    found = {}
    for mode in ("off", "ngram", "suffix"):
        llm = fake_llm(speculate=mode, context=512)
        llm.core.drafting.adaptive = False
        found[mode] = [done.choices for done in llm.generate(["x"] * len(asked), asked)]
        llm.check()
    assert found["ngram"] == found["suffix"] == found["off"]
    most = 0
    for (choice,) in found["off"]:
        names = re.findall(r'"([ab]+)"', choice.text)
        assert len(set(names)) == len(names), choice.text
        most = max(most, len(names))
    assert most > 5
