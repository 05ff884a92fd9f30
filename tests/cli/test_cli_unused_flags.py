"""Flags that a command has no use for, and flags of other programs: refused or answered by name,
before a model loads."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import click
import pytest

from cli_result import Call
from verbatim.base.errors import ParameterError
from verbatim.cli.commands.batch import in_and_out
from verbatim.cli.commands.serve import read_models
from verbatim.cli.lib import texts
from verbatim.cli.lib.command_class import AnsweredFlag, Option
from verbatim.cli.main import COMMANDS

NONE = ("-m", "no/such/model")


@pytest.mark.parametrize(
    ("args", "answer"),
    [
        (("run", "--pooling", "mean", "hi"), "makes no embeddings"),
        (("chat", "--suffix-tenants", "x"), "has no tenants"),
        (("replay", "--defaults", "greedy", "x"), "takes no sampling parameters"),
        (("score", "--speculate", "off", "hi"), "nothing that could be drafted"),
        (("embed", "--max-waiting", "5", "hi"), "has no queue"),
        (("rerank", "--pooling", "cls", "q", "d"), "makes no embeddings"),
        (("compare", "--adapter", "a=b", "hi"), "verbatim merge"),
        (("compare", "--use-adapter", "a", "hi"), "no adapter is loaded"),
        (("compare", "-s", "adapter=a", "hi"), "runs the base model"),
        (("run", "--use-adapter", "a", "hi"), "add --adapter NAME=PATH"),
        (("run", "--mirostat", "2", "hi"), "this sampler does not exist here"),
        (("run", "--samplers", "top_k", "hi"), "the order of the samplers is fixed"),
        (("run", "-s", "3", "hi"), "write --seed N"),
        (("run", "--max-tokens", "-1", "hi"), "leave it out: up to the context's end"),
        (("run-batch", "-i", "in.jsonl"), "in.jsonl"),
    ],
)
def test_a_flag_without_effect_is_refused_by_name(
    verbatim: Call, args: tuple[str, ...], answer: str
) -> None:
    result = verbatim(*args, *NONE)
    assert (result.code, result.out) == (2, "")
    assert answer in result.err


@pytest.mark.parametrize(
    ("args", "answer"),
    [
        (("run", "-m", "a", "-m", "b", "hi"), "-m: is given twice, as 'a' and 'b'"),
        (("batch", "-m", "a", "--model=b", "in.jsonl"), "-m: is given twice, as 'a' and 'b'"),
        (("run", "--temp", "0", "--temperature", "1", "hi"), "--temp: is given twice"),
        (("run", "--seed", "1", "--seed", "2", "--seed", "1", "hi"), "--seed: is given twice"),
        (("run", "--think", "--think", "low", "hi"), "--think: is given twice"),
        (("serve", "--port", "1", "--port", "2"), "--port: is given twice"),
        (("bench", "--speculate", "--speculate", "ngram"), "as 'suffix' and 'ngram'"),
        (("doctor", "--live", "--no-live"), "--live and --no-live contradict each other"),
        (("models", "--json", "show", "--json", "--json", "no/such/model"), "no/such/model"),
    ],
)
def test_a_flag_with_one_value_is_not_given_twice_with_two(
    verbatim: Call, args: tuple[str, ...], answer: str
) -> None:
    result = verbatim(*args)
    assert (result.code, result.out) == (3 if args[0] == "models" else 2, "")
    assert answer in result.err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_is_of_the_class_that_refuses_two_values(name: str) -> None:
    for param in import_module(f"verbatim.cli.commands.{name}").command.params:
        assert isinstance(param, click.Argument | Option | AnsweredFlag), param.name


def test_the_same_value_twice_repeated_flags_and_a_default_are_accepted(
    verbatim: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERBATIM_MODEL", "no/such/other")
    same = ("--seed", "1", "--seed=1", "--stop", "a", "--stop", "b", "--raw", "--raw")
    result = verbatim("run", *NONE, "--model", NONE[1], *same, "hi")
    assert result.code == 3
    assert NONE[1] in result.err


def test_batch_takes_its_files_as_arguments_or_as_flags(tmp_path: Path) -> None:
    given = tmp_path / "in.jsonl"
    given.write_text("{}\n")
    one = str(given)
    assert in_and_out((one, "out"), None, None) == (one, "out")
    assert in_and_out((), one, "out") == (one, "out")
    assert in_and_out(("out",), one, None) == (one, "out")
    for files, source, target in [((one,), None, None), ((one, "b", "c"), None, None)]:
        with pytest.raises(ParameterError, match=r"OUT: is missing|is a third file"):
            in_and_out(files, source, target)
    with pytest.raises(ParameterError, match="is not a file"):
        in_and_out((), str(tmp_path / "none"), "out")


def test_a_model_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ParameterError, match="two models have the name 'a'"):
        read_models(None, ("a=smollm2", "a=smollm2"), (), ())
    assert [m.model for m in read_models("smollm2", ("smollm2",), (), ())] == ["smollm2"]


def test_a_pipe_beside_an_argument_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    with os.fdopen(reads) as stdin, os.fdopen(writes, "wb", 0) as out:
        monkeypatch.setattr("sys.stdin", stdin)
        assert not texts.stdin_has_text()
        out.write(b"text")
        assert texts.stdin_has_text()
