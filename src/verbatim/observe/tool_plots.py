"""Figures of the tools `compare` and `drift`, drawn by matplotlib (the extra `bench`).

In: names and numbers. Out: an SVG or PNG file, by the suffix. Colours are those of plot.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verbatim.observe.plot import COLOURS, new_figure


@dataclass(frozen=True, slots=True)
class Panel:
    """Horizontal bars: one value per row, with an interval where one is known."""

    title: str
    values: tuple[float, ...]
    intervals: tuple[tuple[float, float], ...] = ()
    percent: bool = False


def draw_bars(rows: Sequence[str], panels: Sequence[Panel], path: str) -> None:
    figure = new_figure(2.0 + 2.6 * len(panels), 0.8 + 0.42 * len(rows))
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for number, (axis, panel) in enumerate(zip(axes, panels, strict=True)):
        error = None
        if panel.intervals:
            pairs = zip(panel.values, panel.intervals, strict=True)
            error = tuple(zip(*((v - low, high - v) for v, (low, high) in pairs), strict=True))
        look = {"capsize": 3, "height": 0.6, "alpha": 0.85}
        colour = COLOURS[number % len(COLOURS)]
        axis.barh(range(len(rows)), panel.values, xerr=error, color=colour, **look)
        axis.set(title=panel.title, yticks=range(len(rows)), yticklabels=rows)
        axis.title.set_fontsize(9)
        axis.tick_params(labelsize=8)
        if panel.percent:
            axis.set_xlim(0, 1)
            axis.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
        axis.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    _save(figure, path)


@dataclass(frozen=True, slots=True)
class Curve:
    """Values along a text. `mark`: token from which on the text loops, or None."""

    name: str
    values: tuple[float, ...]
    mark: int | None = None


def draw_curves(panels: Sequence[tuple[str, Sequence[Curve]]], x_label: str, path: str) -> None:
    """One row of axes per panel (title, curves); the region behind a curve's mark is shaded."""
    figure = new_figure(8.0, 2.7 * len(panels))
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)
    for axis, (title, curves) in zip(axes[:, 0], panels, strict=True):
        for number, curve in enumerate(curves):
            colour = COLOURS[number % len(COLOURS)]
            axis.plot(range(len(curve.values)), curve.values, label=curve.name, color=colour)
            if curve.mark is not None:
                axis.axvspan(curve.mark, len(curve.values), color=colour, alpha=0.12)
                axis.axvline(curve.mark, color=colour, linestyle=":")
        axis.set_ylabel(title)
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    axes[-1][0].set_xlabel(x_label)
    _save(figure, path)


def _save(figure: Any, path: str) -> None:
    """Write the figure without a date and with fixed ids: equal numbers give equal files."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "verbatim"}):
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.endswith(".svg") else None)
