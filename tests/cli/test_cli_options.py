"""Flags come from the tables: every sampling parameter and engine setting has one, with the same
meaning as in the library."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from verbatim.base.config import SETTINGS, TYPES, parse_size
from verbatim.base.errors import ParameterError
from verbatim.base.param_checks import Field
from verbatim.base.params import FIELDS, SamplingParams
from verbatim.cli.lib import options, sampling_options
from verbatim.cli.lib.command_class import Command

# Flags that a parameter needs beside it.
COMPANIONS = {
    "num_return_sequences": ["--num-beams", "4"],
    "length_penalty": ["--num-beams", "4"],
    "early_stopping": ["--num-beams", "4"],
    "num_beam_groups": ["--num-beams", "4"],
    "diversity_penalty": ["--num-beams", "4", "--num-beam-groups", "2"],
    "adapter": ["--adapter", "sql=x"],
}


def typed(flag: str, rule: Field) -> tuple[list[str], Any]:
    """Words after a flag, and the value that the library gets: valid, and not the default."""
    match rule.kind:
        case "int":
            number = (rule.default or 0) + 3
            return [str(number)], number
        case "float":
            default = rule.default or 0.0
            up, down = default + 0.5, default - 0.5
            value = up if rule.high is None or up <= rule.high else down
            return [str(value)], value
        case "choice":
            other = next(choice for choice in rule.choices if choice != rule.default)
            return [str(other).lower()], other
        case "strings":
            return ["END", flag, "two words"], ("END", "two words")
        case "ids":
            return ["5,9"], (5, 9)
        case "bias":
            return ["42=-5", flag, "7=2.5"], ((7, 2.5), (42, -5.0))
        case "schema":
            return ['{"type": "object"}'], '{"type": "object"}'
        case "str":
            return ["sql"], "sql"
    raise AssertionError(rule.kind)


@click.command(cls=Command)
@options.engine_options()
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
    flag, rule = options.flag_name(name), FIELDS[name]
    if rule.kind == "bool":
        words, wanted = [f"--no-{flag[2:]}" if rule.default else flag], not rule.default
    else:
        rest, wanted = typed(flag, rule)
        words = [flag, *rest]
    got = call(*words, *COMPANIONS.get(name, ()))["params"][name]
    assert json.loads(json.dumps(wanted)) == got
    assert got != json.loads(json.dumps(rule.default))


def test_without_flags_the_defaults_apply() -> None:
    assert call()["params"] == json.loads(
        json.dumps({f: getattr(SamplingParams(on_loop="stop"), f) for f in FIELDS}, default=str)
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


@pytest.mark.parametrize("name", SETTINGS)
def test_every_engine_setting_is_a_flag_with_help(name: str) -> None:
    rule, flag = SETTINGS[name], options.flag_name(name)
    words, value = [flag, "off"], "off"  # a name: speculate and cache_dir take this one
    if rule.size:
        words, value = [flag, "1.5G"], 3 << 29
    elif rule.metavar == "HOST:PORT":
        words, value = [flag, "10.0.0.1:29500"], "10.0.0.1:29500"
    elif rule.choices:
        value = next(choice for choice in rule.choices if choice != rule.default)
        words = [flag, value]
    elif TYPES[name] == "bool":
        words, value = [f"--no-{flag[2:]}" if rule.default else flag], not rule.default
    elif TYPES[name].startswith("int"):
        words, value = [flag, "3"], 3
    elif TYPES[name].startswith("tuple"):
        words, value = [flag, "a=x", flag, "b=y"], ["a=x", "b=y"]
    use = ["--use-adapter", "a"] if name == "adapters" else []
    needs = {
        "cache_dir_size": ["--cache-dir", "kept"],
        "pipeline_parallel": ["--backend", "cpu"],
        "rank_address": ["--tensor-parallel", "2"],
    }
    kept = needs.get(name, [])
    assert call(*words, *use, *kept)["engine"][name] == value
    assert value != rule.default
    assert rule.help


@pytest.mark.parametrize("name", [name for name, rule in SETTINGS.items() if rule.choices])
def test_a_shell_completes_the_values_of_a_setting(name: str) -> None:
    flag = next(param for param in probe.params if options.flag_name(name) in param.opts)
    for choice in SETTINGS[name].choices:
        found = flag.shell_complete(click.Context(probe), choice[:2])
        assert choice in [item.value for item in found]
    assert not flag.shell_complete(click.Context(probe), "?")


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
    text = CliRunner().invoke(probe, ["--help-all"]).output
    for name in FIELDS:
        if name not in sampling_options.NOT_FLAGS:
            assert f"--{name.replace('_', '-')}" in text
    assert "--kv-blocks" not in text  # hidden: for tests only


@pytest.mark.parametrize("name", ["run", "chat", "serve", "bench"])
def test_help_lists_about_fifteen_flags(name: str) -> None:
    command = import_module(f"verbatim.cli.commands.{name}").command
    short, whole = ({line.strip().split(" ")[0] for line in _help(command, flag)} for flag in HELPS)
    assert {"--help-all", "-m,"} <= short < whole
    assert 12 <= len(short) <= 20
    listed = next(line for line in _help(command, "--help") if "--help-all" in line)
    assert f"the other {len(whole - short)} flags" in listed


HELPS = ("--help", "--help-all")


def _help(command: click.Command, flag: str) -> list[str]:
    text = CliRunner().invoke(command, [flag], terminal_width=10_000).output
    return [line for line in text.splitlines() if line.startswith("  -")]
