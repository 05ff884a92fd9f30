"""docs/loop-in-numbers.md is current, and the loop by hand in its example draws the engine's
tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.model
def test_the_tour_is_current(default_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location(
        "loop_in_numbers", ROOT / "examples" / "loop_in_numbers.py"
    )
    assert spec is not None
    assert spec.loader is not None
    tour = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tour)
    by_hand, engine = tour.main(["--model", str(default_model)])
    assert by_hand == engine
    text = (ROOT / "docs" / "loop-in-numbers.md").read_text()
    for block in capsys.readouterr().out.split("\n\n"):
        lines = [line.rstrip() for line in block.strip().splitlines()]
        assert "\n".join(lines) in text
