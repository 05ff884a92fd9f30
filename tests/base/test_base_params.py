"""Every parameter against invalid values generated from its rule."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from typing import Any

import numpy as np
import pytest

from sampling_rows import processed
from verbatim.base.errors import ParameterError, UnknownParameterError
from verbatim.base.param_checks import Field
from verbatim.base.params import FIELDS, FILTERS, SamplingParams
from verbatim.sampling.warnings import warnings_for

WRONG_KIND: dict[str, list[Any]] = {
    "int": [1.5, "3", True, [], {}, b"1", math.nan, 2**63, -(2**64), 10**30, 10**5000],
    "float": ["0.5", True, [], {}, b"1", math.nan, math.inf, -math.inf, 10**400],
    "bool": [1, 0, "true", [], 1.0],
    "str": [1, True, [], b"x", "\ud800"],
    "ids": [1, "abc", [1.5], ["1"], [-1], [True], [None], [2**31], {"a": 1}],
    "strings": [1, [1], [b"x"], [""], [None], ["\ud800"], ["x" * 1025], {"a": 1}],
    "bias": [
        1,
        "abc",
        {5: 1.0, "5": 2.0},
        [(5, 1.0), (5, 1.0)],
        {"x": 1.0},
        {1: "2"},
        {1: math.nan},
        {1: 1000.0},
        {-1: 1.0},
        {True: 1.0},
        {1.5: 1.0},
        [1],
    ],
    "choice": ["no such", 5, [], 1.0],
    "schema": [
        5,
        [],
        "{",
        "[1]",
        {"a": math.nan},
        {"a": {1, 2}},
        {"a": "\ud800"},
        '{"a": "\\ud800"}',
        '{"a":' * 10_000,
    ],
}
CYCLE: dict[str, Any] = {"type": "object", "properties": {}}
CYCLE["properties"]["next"] = CYCLE
WRONG_KIND["schema"].append(CYCLE)


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


@pytest.mark.parametrize(
    ("name", "value"), CASES, ids=lambda v: repr(v)[:30] if v != 10**5000 else "1e5000"
)
def test_an_invalid_value_is_refused_and_the_parameter_named(name: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams.from_mapping({name: value})
    assert caught.value.param == name
    assert caught.value.status == 400
    assert str(caught.value).startswith(f"{name}:")


def test_unknown_names_are_refused_with_a_suggestion() -> None:
    """As a keyword, in with_ and in a mapping: UnknownParameterError, also a TypeError, with the
    closest known name."""
    near = {
        "temprature": "temperature",
        "top-p": "top_p",
        "max_token": "max_tokens",
        "params": None,
        "with_": None,
        "": None,
    }
    for name, meant in near.items():
        for make in (
            SamplingParams,
            SamplingParams().with_,
            lambda **values: SamplingParams.from_mapping(values),
        ):
            with pytest.raises(UnknownParameterError) as caught:
                make(**{name: 1})
            assert caught.value.param == name
            assert caught.value.status == 400
            assert isinstance(caught.value, TypeError)
            assert str(caught.value) == f"{name}: no such parameter" + (
                f"; did you mean {meant}?" if meant else ""
            )


def test_signature_copy_and_pickle_keep_all_fields() -> None:
    assert list(inspect.signature(SamplingParams).parameters) == list(FIELDS)
    params = SamplingParams(seed=3, top_p=0.5, json_schema={"type": "null"})
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params == params.with_()


def test_error_texts_show_the_exact_limits() -> None:
    for name, value, message in (
        ("seed", 2**63, "seed: 9223372036854775808 is above 9223372036854775807"),
        ("stop_token_ids", [2**31], "stop_token_ids: 2147483648 is above 2147483647"),
        ("top_p", 0.0, "top_p: 0.0 must be above 0"),
        ("repetition_penalty", 5e-324, "repetition_penalty: 5e-324 is below 1e-06"),
        ("top_k", 10**5000, "top_k: a number of thousands of digits is above 2147483647"),
        (
            "json_schema",
            CYCLE,
            "json_schema: contains itself, and so has no end; it cannot be written as JSON",
        ),
        (
            "json_schema",
            '{"type": "object", "properties": {"a": {"type": "null", "type": "string"}}}',
            "json_schema: is not valid JSON: the key 'type' appears twice in one object",
        ),
    ):
        with pytest.raises(ParameterError) as caught:
            SamplingParams.from_mapping({name: value})
        assert str(caught.value) == message


def test_every_integer_range_fits_64_bits() -> None:
    for name, rule in FIELDS.items():
        if rule.kind == "int":
            assert rule.low is not None, name
            assert rule.high is not None, name
            assert -(2**63) <= rule.low <= rule.high < 2**63, name


def test_defaults_are_accepted_without_a_warning() -> None:
    for name, rule in FIELDS.items():
        assert getattr(SamplingParams.from_mapping({name: rule.default}), name) == getattr(
            SamplingParams(), name
        )
    assert warnings_for(SamplingParams()) == ()
    assert (
        warnings_for(SamplingParams(temperature=0.7, top_p=0.9, max_tokens=10, stop="x", seed=3))
        == ()
    )


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_declares_values_for_tests_the_strongest_first(name: str) -> None:
    rule = FIELDS[name]
    assert len(rule.trials) >= 3
    assert rule.slider is not None
    assert rule.slider[0] <= rule.default <= rule.slider[1]
    for value in rule.trials:
        assert getattr(SamplingParams(**{name: value}), name) == value != rule.default
    row = 4 * np.random.default_rng(1).normal(size=300)
    left = [len(processed(row, SamplingParams(**{name: value})).ids) for value in rule.trials]
    assert left == sorted(left)
    assert left[0] < 300


@pytest.mark.parametrize(
    "name", [n for n, r in FIELDS.items() if r.low is not None or r.high is not None]
)
def test_the_ends_of_a_range_are_allowed(name: str) -> None:
    rule = FIELDS[name]
    if rule.kind in ("int", "float"):
        for end in (rule.low, rule.high):
            if end is not None:
                try:
                    SamplingParams.from_mapping({name: end})
                except ParameterError as error:
                    # another rule may raise (beam search fields need num_beams), but not the range
                    range_words = ("is below", "is above", "must be above")
                    assert not any(word in str(error) for word in range_words)  # noqa: PT017
