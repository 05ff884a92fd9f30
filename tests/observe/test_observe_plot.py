"""Plots: every curve is drawn, and the file has the kind that its name says."""

from __future__ import annotations

from pathlib import Path

import pytest

from verbatim.observe.plot import Chart, Line, draw, figure

CHARTS = [
    Chart(
        "t",
        "x",
        "y",
        (
            Line("a <b> & c", ((32, 100.0), (512, 90.0), (2000, 50.0))),
            Line("limit", ((32, 387.0), (2000, 263.0)), dashed=True),
        ),
        log_x=True,
    ),
    Chart("one point", "x", "y", (Line("z", ((4, 0.0),)),)),
]


def test_a_plot_shows_every_curve_from_zero() -> None:
    left, right = figure(CHARTS).axes
    curves = {line.get_label(): line for axis in (left, right) for line in axis.get_lines()}
    assert list(curves) == ["a <b> & c", "limit", "z"]
    assert curves["a <b> & c"].get_xydata().tolist() == [[32, 100], [512, 90], [2000, 50]]
    assert [c.get_linestyle() for c in curves.values()] == ["-", "--", "-"], "a limit is dashed"
    assert [axis.get_ylim()[0] for axis in (left, right)] == [0, 0]
    assert (left.get_xscale(), right.get_xscale()) == ("log", "linear")
    assert (left.get_title(), left.get_xlabel(), left.get_ylabel()) == ("t", "x", "y")


@pytest.mark.parametrize(("ending", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_a_plot_is_a_file_of_the_named_kind(tmp_path: Path, ending: str, start: bytes) -> None:
    path = tmp_path / f"p.{ending}"
    draw(CHARTS, str(path))
    assert path.read_bytes().startswith(start)
