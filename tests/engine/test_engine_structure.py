"""Structured answers in the engine: the mask is one more stage, whatever else goes on; and a structure that fails ends
only its own request."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from verbatim import LLM, SamplingParams
from verbatim.base.errors import ParameterError, UnsupportedError
from verbatim.sampling import grammar
from verbatim.sampling.grammar import Matcher
from verbatim.testing import fake_parts

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
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
    return LLM.from_parts(fake_parts(canary=True), **{"kv_blocks": 200, "check": True, **options})


def params() -> list[SamplingParams]:
    return [SamplingParams(**{"max_tokens": 150, "seed": i, "logprobs": 1, **asked}) for i, asked in enumerate(ASKED)]


def test_every_answer_has_its_structure() -> None:
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
def test_the_same_in_every_mode(mode: dict[str, Any]) -> None:
    plain = fake_llm().generate(["hello"] * len(ASKED), params())
    other = fake_llm(**mode).generate(["hello"] * len(ASKED), params())
    assert [c.choices for c in other] == [c.choices for c in plain]


def test_streamed_is_whole() -> None:
    for asked in params():
        stream = fake_llm().stream("hello", asked)
        deltas = list(stream)
        for choice in stream.completion.choices:
            assert "".join(d.text for d in deltas if d.index == choice.index) == choice.text


@pytest.mark.parametrize("mode", ["ngram", "suffix"])
def test_a_guess_that_runs_into_a_limit_does_not_end_the_answer(mode: str) -> None:
    """An ambiguous grammar becomes too complex after some 146 tokens. Guesses get there first; the answer must not notice, alone or with others."""
    deep = 'start: s\ns: "ab" | s s | s s s | s s s s | s s s s s'
    stops = SamplingParams(max_tokens=300, min_tokens=130, grammar=deep, stop="ab" * 66, seed=1)
    fails = SamplingParams(max_tokens=300, min_tokens=250, grammar=deep, seed=1, n=2)
    found = []
    for way in ("off", mode):
        llm = fake_llm(speculate=way, context=512, kv_blocks=200)
        llm.core.drafting.adaptive = False
        done = [llm.generate("ab", asked) for asked in (stops, fails)]
        found.append([[(c.token_ids, c.finish) for c in d.choices] for d in done])
        llm.core.check()
    assert found[1] == found[0]
    assert [c[1].reason for d in found[0] for c in d] == ["stop", "error", "error"]


@pytest.mark.parametrize("mode", ["ngram", "suffix", "auto"])
@pytest.mark.parametrize("states", [150, 25_000])
def test_guesses_use_up_nothing_of_what_answers_share(monkeypatch: pytest.MonkeyPatch, mode: str, states: int) -> None:
    """A structure whose texts need ever more states of a lexer: an answer that ends for it ends at the same token with drafts, and no earlier."""
    monkeypatch.setitem(grammar.LIMITS, "max_lexer_states", states)
    monkeypatch.setattr(grammar, "AGAIN", 0.0)  # made anew once, whatever the time
    asked = [SamplingParams(regex="([ab]*a[ab]{9}c)|d", max_tokens=200, seed=i, logit_bias={99: -100}) for i in range(3)]
    found = []
    for way in ("off", mode):
        answers, drafted = [], 0
        for params in asked:
            llm = fake_llm(speculate=way)
            llm.core.drafting.adaptive = False
            done = llm.generate("ab", params)
            drafted += done.usage.drafted_tokens
            answers.append([(c.token_ids, c.finish) for c in done.choices])
        found.append(answers)
    assert drafted > 100
    assert found[0] == found[1]
    assert {finish.reason for (choice,) in found[0] for _, finish in (choice,)} == ({"error"} if states == 150 else {"length"})


@pytest.mark.parametrize("where", ["mask", "advance"])
def test_a_structure_that_fails_ends_its_own_request_alone(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
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
        ["hello", "neighbour"], [SamplingParams(max_tokens=60, regex="[a-z]{50}"), SamplingParams(max_tokens=30, seed=1)]
    )
    assert bad.finish.reason == "error"
    assert "too complex" in bad.finish.detail
    assert good.choices == plain.choices
    llm.check()


def test_alone_and_failing() -> None:
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
def test_refused_by_name_before_it_runs(asked: dict[str, Any], param: str) -> None:
    llm = fake_llm()
    with pytest.raises((ParameterError, UnsupportedError)) as caught:
        llm.generate("x", SamplingParams(**asked))
    assert caught.value.param == param
    assert llm.stats()["requests_total"] == 0
