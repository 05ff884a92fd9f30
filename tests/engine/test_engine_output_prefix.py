"""output_prefix: tokens that are given in the prompt and count as output. A request that continues
an output after k of its tokens writes the rest of it, whatever counts output tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from patient_compiles import patience, patient_pool  # noqa: F401
from verbatim.base.errors import ParameterError
from verbatim.base.params import SamplingParams
from verbatim.engine.calls.llm import LLM
from verbatim.testing.fakes import fake_parts

PROMPT = list(b"the cat sat on the mat and the ")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["left", "right"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM.from_loaded(fake_parts(canary=True), kv_blocks=64) as made:
        yield made


@pytest.mark.parametrize(
    "values",
    [
        {"regex": "([a-f]{3}-){3}[xyz]+[0-9]{9}"},
        {"json_schema": SCHEMA},
        {"json_schema": {"type": "array", "items": {"enum": [1, 22, 333]}, "uniqueItems": True}},
        {"choice": ["left-handed", "right-handed"]},
        {"frequency_penalty": 2.0, "allowed_token_ids": list(range(97, 103)), "ignore_eos": True},
        {"presence_penalty": 2.0, "allowed_token_ids": list(range(97, 103)), "ignore_eos": True},
        {"min_tokens": 9, "stop_token_ids": list(range(32, 127))},
    ],
    ids=lambda values: next(iter(values)),
)
@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_an_output_continues_as_if_it_had_not_been_interrupted(
    llm: LLM, values: dict[str, Any], speculate: str
) -> None:
    params = SamplingParams(max_tokens=24, seed=5, temperature=1.2, **values)
    whole = llm.generate(PROMPT, params).choices[0]
    cuts = range(1, len(whole.token_ids))
    continued = llm.generate(
        [[*PROMPT, *whole.token_ids[:cut]] for cut in cuts],
        [params.with_(output_prefix=cut, max_tokens=24 - cut, speculate=speculate) for cut in cuts],
    )
    for cut, done in zip(cuts, continued, strict=True):
        assert done.choices[0].token_ids == whole.token_ids[cut:], cut
        assert done.choices[0].finish == whole.finish


@pytest.mark.parametrize("include_stop", [True, False])
@pytest.mark.parametrize(
    "values",
    [
        {"stop": ["abba", "bbb"], "allowed_token_ids": [97, 98]},
        {"stop": ["a"], "min_tokens": 9, "allowed_token_ids": [97, 98]},
        {"stop": ["éé"], "allowed_token_ids": [*"é".encode()]},
    ],
    ids=lambda values: str(values["stop"]),
)
def test_stop_strings_and_characters_continue(
    llm: LLM, values: dict[str, Any], include_stop: bool
) -> None:
    """The text is that of the new tokens: none of the prefix, and whole characters."""
    ended = 0
    for seed in range(4):
        params = SamplingParams(max_tokens=24, seed=seed, include_stop=include_stop, **values)
        whole = llm.generate(PROMPT, params).choices[0]
        ended += whole.finish.reason == "stop"
        cuts = range(1, len(whole.token_ids))
        early = llm.generate(
            [PROMPT for _ in cuts],
            [params.with_(max_tokens=cut, min_tokens=min(cut, params.min_tokens)) for cut in cuts],
        )
        continued = llm.generate(
            [[*PROMPT, *whole.token_ids[:cut]] for cut in cuts],
            [params.with_(output_prefix=cut, max_tokens=24 - cut, logprobs=0) for cut in cuts],
        )
        for cut, first, rest in zip(cuts, early, continued, strict=True):
            assert rest.token_ids == whole.token_ids[cut:] == tuple(t.token for t in rest.logprobs)
            assert rest.finish == whole.finish
            assert rest.text == whole.text[len(first.text) :]
            assert rest.text == "" or first.text + rest.text == whole.text
    assert ended > 1


def test_a_loop_continues(llm: LLM) -> None:
    params = SamplingParams(max_tokens=80, allowed_token_ids=[97], on_loop="stop")
    whole = llm.generate(PROMPT, params)
    assert (len(whole.token_ids), whole.finish.reason) == (64, "loop")
    for cut in (7, 40, 63):
        continued = params.with_(output_prefix=cut, max_tokens=80 - cut)
        rest = llm.generate([*PROMPT, *whole.token_ids[:cut]], continued)
        assert (rest.text, rest.finish) == ("a" * (64 - cut), whole.finish)


def test_without_it_the_structure_starts_again(llm: LLM) -> None:
    params = SamplingParams(seed=5, regex="abc[0-9]{3}", max_tokens=9)
    assert llm.generate([*PROMPT, *b"ab"], params).choices[0].text.startswith("abc")
    assert llm.generate([*PROMPT, *b"ab"], params.with_(output_prefix=2)).choices[0].text[0] == "c"


def test_all_choices_continue_the_structure(llm: LLM) -> None:
    params = SamplingParams(seed=5, regex="ab(c[0-9]{3})+x", max_tokens=9, n=3, output_prefix=2)
    assert all(c.text[0] == "c" for c in llm.generate([*PROMPT, *b"ab"], params).choices)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"output_prefix": 3, "regex": "abx[0-9]"}, "regex does not allow 'c' (id 99) as token 3"),
        ({"output_prefix": 3, "choice": ["abc"]}, "choice is complete"),
        ({"output_prefix": 99}, "more than the prompt's 34 tokens"),
        ({"output_prefix": 1, "num_beams": 2}, "beam search"),
    ],
    ids=str,
)
def test_what_cannot_continue_is_refused(llm: LLM, values: dict[str, Any], word: str) -> None:
    with pytest.raises(ParameterError) as error:
        llm.generate([*PROMPT, *b"abc"], SamplingParams(max_tokens=4, **values))
    assert error.value.param == "output_prefix"
    assert word in str(error.value)
