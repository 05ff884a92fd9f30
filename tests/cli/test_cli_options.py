"""Flags come from the tables: every sampling parameter and engine setting has one, with the same
meaning as in the library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from verbatim.base.config import SETTINGS, parse_size
from verbatim.base.errors import ParameterError
from verbatim.base.params import FIELDS, SamplingParams
from verbatim.cli.lib import options, sampling_options

# Per parameter: a valid value other than its default as typed, and the value the library gets.
TYPED: dict[str, tuple[list[str], Any]] = {
    "max_tokens": (["7"], 7),
    "min_tokens": (["3"], 3),
    "stop": (["END", "--stop", "two words"], ("END", "two words")),
    "stop_token_ids": (["5,9"], (5, 9)),
    "on_loop": (["stop"], "stop"),
    "logit_bias": (["42=-5", "--logit-bias", "7=2.5"], ((7, 2.5), (42, -5.0))),
    "allowed_token_ids": (["1,2,3"], (1, 2, 3)),
    "banned_token_ids": (["4"], (4,)),
    "repetition_penalty": (["1.1"], 1.1),
    "frequency_penalty": (["0.5"], 0.5),
    "presence_penalty": (["-0.5"], -0.5),
    "penalty_range": (["64"], 64),
    "dry_multiplier": (["0.8"], 0.8),
    "dry_base": (["2"], 2.0),
    "dry_allowed_length": (["4"], 4),
    "dry_range": (["128"], 128),
    "dry_breakers": (["."], (".",)),
    "no_repeat_ngram": (["3"], 3),
    "temperature": (["0.7"], 0.7),
    "top_k": (["40"], 40),
    "top_p": (["0.9"], 0.9),
    "min_p": (["0.05"], 0.05),
    "typical_p": (["0.95"], 0.95),
    "top_n_sigma": (["1.5"], 1.5),
    "xtc_probability": (["0.5"], 0.5),
    "xtc_threshold": (["0.2"], 0.2),
    "seed": (["12345"], 12345),
    "n": (["2"], 2),
    "best_of": (["4"], 4),
    "num_beams": (["4"], 4),
    "num_return_sequences": (["2", "--num-beams", "4"], 2),
    "length_penalty": (["0.6", "--num-beams", "4"], 0.6),
    "early_stopping": (["true", "--num-beams", "4"], True),
    "num_beam_groups": (["2", "--num-beams", "4"], 2),
    "diversity_penalty": (["0.5", "--num-beams", "4", "--num-beam-groups", "2"], 0.5),
    "json_schema": (['{"type": "object"}'], '{"type": "object"}'),
    "regex": (["[ab]+"], "[ab]+"),
    "grammar": (['start: "a"'], 'start: "a"'),
    "choice": (["yes", "--choice", "no"], ("yes", "no")),
    "output_prefix": (["3"], 3),
    "logprobs": (["5"], 5),
    "prompt_logprobs": (["2"], 2),
    "logprobs_mode": (["processed"], "processed"),
    "explain": (["3"], 3),
    "priority": (["-1"], -1),
    "cache_salt": (["me"], "me"),
    "adapter": (["sql", "--adapter", "sql=x"], "sql"),
    "thinking_budget": (["64"], 64),
}


@click.command(cls=options.Command)
@options.engine_options
@sampling_options.sampling_options
def probe(**flags: Any) -> None:
    params = sampling_options.sampling_of(flags)
    click.echo(
        json.dumps(
            {"params": {f: getattr(params, f) for f in FIELDS}, "engine": options.engine_of(flags)},
            default=str,
        )
    )


def call(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(probe, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


@pytest.mark.parametrize("name", [n for n in FIELDS if n not in sampling_options.NOT_FLAGS])
def test_every_parameter_is_a_flag(name: str) -> None:
    flag = options.flag_name(name)
    if FIELDS[name].kind == "bool":
        words, wanted = (
            ([flag] if not FIELDS[name].default else [f"--no-{flag[2:]}"]),
            not FIELDS[name].default,
        )
    else:
        assert name in TYPED, f"add {name!r} to TYPED: words after {flag}, and their value"
        rest, wanted = TYPED[name]
        words = [flag, *rest]
    got = call(*words)["params"][name]
    assert json.loads(json.dumps(wanted)) == got
    assert got != json.loads(json.dumps(FIELDS[name].default)), (
        "the test must type something that is not the default"
    )


def test_without_flags_the_defaults_and_a_fixed_seed_apply() -> None:
    assert call()["params"] == json.loads(
        json.dumps(
            {f: getattr(SamplingParams(seed=0, on_loop="stop"), f) for f in FIELDS},
            default=str,
        )
    )
    assert call()["engine"] == {}


def test_one_loaded_adapter_is_used_and_of_several_one_is_named() -> None:
    assert call("--adapter", "sql=x")["params"]["adapter"] == "sql"
    assert call("--lora", "some/sql.gguf")["params"]["adapter"] == "sql"
    two = ["--adapter", "a=x", "--lora-modules", "b=y"]
    with pytest.raises(ParameterError, match=r"use_adapter.*a, b"):
        call(*two)
    assert call(*two, "--use-adapter", "b")["params"]["adapter"] == "b"
    assert call(*two, "--use-adapter", "")["params"]["adapter"] == ""


def test_beam_search_needs_no_temperature() -> None:
    assert call("--num-beams", "2")["params"]["temperature"] == 1.0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--top-p", "1.5"], "top_p"),
        (["--temperature", "nan"], "temperature"),
        (["--stop-token-ids", "1,x"], "stop_token_ids"),
        (["--logit-bias", "1:2"], "logit_bias"),
        (["--json-schema", "{"], "json_schema"),
        (["--json-schema", "@/no/such/file"], "json_schema"),
        (["--min-tokens", "5", "--max-tokens", "4"], "min_tokens"),
        (["--kv-memory", "much"], "kv_memory"),
        (["--step-tokens", "0"], "step_tokens"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_it(words: list[str], named: str) -> None:
    with pytest.raises(ParameterError) as caught:
        call(*words)
    assert caught.value.param == named


def test_a_schema_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "string"}')
    assert call("--json-schema", f"@{file}")["params"]["json_schema"] == '{"type": "string"}'


def test_every_engine_setting_is_a_flag_with_help() -> None:
    flags = {flag for param in probe.params for flag in param.opts}
    assert {options.flag_name(name) for name in SETTINGS} <= flags
    assert all(rule.help for rule in SETTINGS.values())
    assert call("--threads", "3", "--kv-memory", "1.5G", "--no-prefix-cache", "--speculate", "off")[
        "engine"
    ] == {
        "threads": 3,
        "kv_memory": 3 << 29,
        "prefix_cache": False,
        "speculate": "off",
    }


@settings(derandomize=True, max_examples=200)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["", "k", "K", "M", "m", "G", "T"]),
    st.sampled_from(["", "B", "iB"]),
)
def test_sizes_parse_to_bytes(number: int, unit: str, tail: str) -> None:
    assert parse_size(
        "x", f"{number}{unit}{tail if unit else ''}"
    ) == number * 1024 ** " kmgt".index(unit.lower() or " ")


@pytest.mark.parametrize("text", ["", "1.2.3M", "-1", "1X", "G", "1e9", "0x10"])
def test_invalid_sizes_are_rejected(text: str) -> None:
    with pytest.raises(ParameterError):
        parse_size("x", text)


def test_parse_parameter() -> None:
    assert sampling_options.parse_parameter("top-p", "0.5") == 0.5
    assert sampling_options.parse_parameter("top_k", "5") == 5
    assert sampling_options.parse_parameter("ignore_eos", "true") is True
    assert sampling_options.parse_parameter("early_stopping", "never") == "never"
    assert sampling_options.parse_parameter("early_stopping", "true") is True
    assert sampling_options.parse_parameter("max_tokens", "none") is None
    assert sampling_options.parse_parameter("stop_token_ids", "1,2") == [1, 2]
    assert sampling_options.parse_parameter("logit_bias", "3=1") == {3: 1.0}
    for name, text in (
        ("top_q", "1"),
        ("top_k", "many"),
        ("ignore_eos", "perhaps"),
        ("logit_bias", "3"),
    ):
        with pytest.raises(ParameterError) as caught:
            sampling_options.parse_parameter(name, text)
        assert caught.value.param == name


def test_help_lists_every_flag_once() -> None:
    text = CliRunner().invoke(probe, ["--help"]).output
    for name in FIELDS:
        if name not in sampling_options.NOT_FLAGS:
            assert f"--{name.replace('_', '-')}" in text
    assert "--kv-blocks" not in text  # hidden: for tests only
