"""The examples of the tools run, and print what they promise."""

from __future__ import annotations

import importlib.util
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


def test_plan_table(capsys: pytest.CaptureFixture[str]) -> None:
    plans = example("plan_table").main(["--context", "4096"])
    assert len(plans) == 4 * 6
    assert " 1.34 GB" in capsys.readouterr().out


def test_check_models(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert all(f.state == "good" for f in example("check_models").main([str(tiny)])[str(tiny)])
    assert capsys.readouterr().out == f"{tiny}: no fault found\n"


def test_needle(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert example("needle").main(["--model", str(tiny)])
    assert "the same" in capsys.readouterr().out


def test_vote(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(tiny), "--samples", "2", "--max-tokens", "4"]
    result = example("vote").main(words)
    assert result == example("vote").main(words)
    assert "majority of 2" in capsys.readouterr().out


def test_exposure_bias(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = example("exposure_bias").main(["--model", str(tiny), "--tokens", "16"])
    assert [len(series.token_ids) for series in found] == [16, 16, 16]
    assert "teacher-forced" in capsys.readouterr().out
