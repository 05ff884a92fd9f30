"""Flags that a command has no use for, and flags of other programs: refused or answered by name,
before a model loads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cli_result import Call
from verbatim.base.errors import ParameterError
from verbatim.cli import open_model
from verbatim.cli.batch import in_and_out
from verbatim.cli.serve import read_models

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
        assert not open_model.stdin_has_text()
        out.write(b"text")
        assert open_model.stdin_has_text()
