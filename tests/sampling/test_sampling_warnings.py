"""Warnings: a risky combination of parameters warns and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from verbatim.base.params import SamplingParams
from verbatim.sampling.warnings import warnings_for

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
    ({"no_repeat_ngram": 1}, "any token twice"),
    ({"no_repeat_ngram": 2}, "pair of tokens twice"),
    ({"regex": "a", "frequency_penalty": 1.0}, "frequency_penalty with regex"),
    ({"choice": ["a"], "stop": ["b"]}, "stop"),
    ({"choice": ["a"], "min_tokens": 3}, "min_tokens"),
    ({"json_schema": {}, "ignore_eos": True}, "ignore_eos"),
    ({"include_stop": True}, "include_stop"),
    ({"logprobs_mode": "processed"}, "logprobs_mode"),
]


def test_include_stop_has_an_effect_with_stop_tokens_and_on_a_shown_end_token() -> None:
    for setting in ({"stop_token_ids": [5]}, {"skip_special": False}):
        assert warnings_for(SamplingParams.from_mapping({"include_stop": True, **setting})) == ()


@pytest.mark.parametrize(("setting", "message"), WARNED, ids=str)
def test_risky_combinations_warn_and_change_nothing(setting: dict[str, Any], message: str) -> None:
    params = SamplingParams.from_mapping(setting)
    before = params.to_mapping()
    assert any(message in line for line in warnings_for(params)), warnings_for(params)
    assert params.to_mapping() == before
