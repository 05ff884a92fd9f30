"""Every field of the parameter table against values it must refuse, generated from the table itself; and the advice."""

from __future__ import annotations

import math
from typing import Any

import pytest

from verbatim.base.errors import ParameterError
from verbatim.base.params import FIELDS, Field, SamplingParams
from verbatim.sampling.advice import warnings_for

WRONG_KIND: dict[str, list[Any]] = {
    "int": [1.5, "3", True, [], {}, b"1", math.nan],
    "float": ["0.5", True, [], {}, b"1", math.nan, math.inf, -math.inf, 10**400],
    "bool": [1, 0, "true", [], 1.0],
    "str": [1, True, [], b"x", "\ud800"],
    "ids": [1, "abc", [1.5], ["1"], [-1], [True], [None], [2**31], {"a": 1}],
    "strings": [1, [1], [b"x"], [""], [None], ["\ud800"], ["x" * 1025], {"a": 1}],
    "bias": [1, "abc", {"x": 1.0}, {1: "2"}, {1: math.nan}, {1: 1000.0}, {-1: 1.0}, {True: 1.0}, {1.5: 1.0}, [1]],
    "choice": ["no such", 5, None, [], 1.0],
    "schema": [5, [], "{", "[1]", {"a": math.nan}, {"a": {1, 2}}],
}


def refused(rule: Field) -> list[Any]:
    out = list(WRONG_KIND[rule.kind])
    if not rule.optional:
        out.append(None)
    if rule.kind in ("int", "float"):
        if rule.low is not None:
            out.append(rule.low - 1)
        if rule.high is not None:
            out.append(rule.high + 1)
        if rule.above is not None:
            out.append(rule.above)
    return out


CASES = [(name, value) for name, rule in FIELDS.items() for value in refused(rule)]


@pytest.mark.parametrize(("name", "value"), CASES, ids=lambda v: repr(v)[:30])
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams.from_mapping({name: value})
    assert caught.value.param == name
    assert caught.value.status == 400
    assert str(caught.value).startswith(f"{name}:")


def test_unknown_names_are_refused() -> None:
    for name in ("temprature", "Temperature", "top-p", "", "params", "with_"):
        with pytest.raises(ParameterError) as caught:
            SamplingParams.from_mapping({name: 1})
        assert caught.value.param == name
    with pytest.raises(TypeError):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


def test_defaults_are_accepted_and_silent() -> None:
    for name, rule in FIELDS.items():
        assert getattr(SamplingParams.from_mapping({name: rule.default}), name) == getattr(SamplingParams(), name)
    assert warnings_for(SamplingParams()) == ()
    assert warnings_for(SamplingParams(temperature=0.7, top_p=0.9, max_tokens=10, stop="x", seed=3)) == ()


@pytest.mark.parametrize("name", [n for n, r in FIELDS.items() if r.low is not None or r.high is not None])
def test_the_ends_of_a_range_are_inside_it(name: str) -> None:
    rule = FIELDS[name]
    if rule.kind in ("int", "float"):
        for end in (rule.low, rule.high):
            if end is not None:
                try:
                    SamplingParams.from_mapping({name: end})
                except ParameterError as error:
                    # another rule may speak (beam search fields need num_beams), but never the range
                    assert not any(word in str(error) for word in ("is below", "is above", "must be above"))  # noqa: PT017


WARNED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0, "n": 3}, "equal"),
    ({"temperature": 0, "best_of": 2}, "best_of=2"),
    ({"temperature": 0, "top_p": 0.5, "xtc_probability": 0.5}, "top_p, xtc_probability"),
    ({"temperature": 1.5, "top_p": 0.2}, "flattens"),
    ({"temperature": 3.0}, "noise"),
    ({"repetition_penalty": 1.4}, "over 1.3"),
    ({"repetition_penalty": 0.9}, "rewards"),
    ({"xtc_probability": 0.5, "xtc_threshold": 0.6}, "never acts"),
    ({"xtc_threshold": 0.2}, "no effect"),
    ({"dry_base": 2.0}, "dry_base"),
    ({"top_k": 1}, "temperature 0"),
    ({"no_repeat_ngram": 1}, "twice"),
    ({"regex": "a", "frequency_penalty": 1.0}, "frequency_penalty with regex"),
    ({"choice": ["a"], "stop": ["b"]}, "stop"),
    ({"choice": ["a"], "min_tokens": 3}, "min_tokens"),
    ({"json_schema": {}, "ignore_eos": True}, "ignore_eos"),
    ({"include_stop": True}, "include_stop"),
    ({"logprobs_mode": "processed"}, "logprobs_mode"),
]


@pytest.mark.parametrize(("setting", "said"), WARNED, ids=str)
def test_risky_mixes_are_said_and_not_changed(setting: dict[str, Any], said: str) -> None:
    params = SamplingParams.from_mapping(setting)
    before = params.to_mapping()
    assert any(said in line for line in warnings_for(params)), warnings_for(params)
    assert params.to_mapping() == before
