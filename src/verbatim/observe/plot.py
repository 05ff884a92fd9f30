"""Line charts of benchmark results, drawn by matplotlib (the extra `bench`).

In: charts as data. Out: one figure with the charts side by side, SVG or PNG by the file suffix.
The y axis always starts at 0, so that the heights of two curves compare as their values do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verbatim.base.errors import UnsupportedError

COLOURS = ("#0b6e99", "#d9730d", "#2b8a3e", "#9065b0", "#ad1a72", "#64748b")


@dataclass(frozen=True, slots=True)
class Line:
    """One curve. A dashed one is a limit, not a measurement."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    log_x: bool = False


def require_matplotlib() -> None:
    """Raise UnsupportedError when matplotlib is missing; call it before a long measurement."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        remedy = "install the extra 'bench': pip install '.[bench]' in the checkout"
        raise UnsupportedError("plot", f"plots need matplotlib; {remedy}") from None


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib Figure. Without pyplot, which keeps global state."""
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="tight")


def figure(charts: Sequence[Chart]) -> Any:
    """A Figure with one axis per chart."""
    out = new_figure(5.2 * len(charts), 3.6)
    for axis, chart in zip(out.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
        for number, line in enumerate(chart.lines):
            style = {"linestyle": "--"} if line.dashed else {"marker": "o"}
            colour = COLOURS[number % len(COLOURS)]
            axis.plot(*zip(*line.points, strict=True), label=line.name, color=colour, **style)
        if chart.log_x:
            axis.set_xscale("log", base=2)
        axis.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label, ylim=(0, None))
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    return out


def draw(charts: Sequence[Chart], path: str) -> None:
    """Write the charts to `path` (.svg or .png)."""
    figure(charts).savefig(path, dpi=120)
