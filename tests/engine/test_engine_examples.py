"""The examples run on the default model and print what they promise."""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pytestmark = pytest.mark.model


def test_batch(default_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = example("batch").main(["--model", str(default_model), "--max-tokens", "8"])
    assert len(texts) == 6
    assert "the same tokens" in capsys.readouterr().out


def test_stream(default_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = example("stream").main(["--model", str(default_model), "--max-tokens", "12"])
    out = capsys.readouterr().out
    assert text in out
    assert "0 cache blocks in use" in out


def test_chat_prefix(default_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = example("chat_prefix").main(["--model", str(default_model), "--max-tokens", "24"])
    capsys.readouterr()
    assert turns[0][1] == 0
    for (before, _), (_, reused) in pairwise(turns):
        assert reused >= before // 16 * 16  # all of the turn before, and what was answered


def test_async_clients(default_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = example("async_clients").main(
        ["--model", str(default_model), "--clients", "6", "--max-tokens", "10"]
    )
    assert [d.finish_reason for d in done].count("cancel") <= 2
    assert all(d.usage.output_tokens > 0 for d in done)
    assert "for 6 requests" in capsys.readouterr().out
