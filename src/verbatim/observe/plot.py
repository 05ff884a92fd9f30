"""Line charts as SVG, written by hand: a benchmark should not need a plotting library to show its curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#0b6e99", "#d9730d", "#2b8a3e", "#9065b0", "#ad1a72", "#64748b")
LEFT, RIGHT, TOP, BOTTOM = 66, 16, 40, 48  # margins in pixels


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


def svg(charts: Sequence[Chart], *, width: int = 520, height: int = 340) -> str:
    """Charts side by side in one document. The y axis starts at 0, always: a cut axis is a lie about ratios."""
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width * len(charts)}" height="{height}" '
        f'viewBox="0 0 {width * len(charts)} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width * len(charts)}" height="{height}" fill="white"/>',
    ]
    for number, chart in enumerate(charts):
        body.append(f'<g transform="translate({number * width},0)">')
        body += _chart(chart, width, height)
        body.append("</g>")
    return "\n".join([*body, "</svg>"]) + "\n"


def _chart(chart: Chart, width: int, height: int) -> list[str]:
    xs = sorted({x for line in chart.lines for x, _ in line.points}) or [0.0, 1.0]
    top = _nice(max((y for line in chart.lines for _, y in line.points), default=1.0))
    inner_w, inner_h = width - LEFT - RIGHT, height - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        scale = (lambda v: math.log(max(v, 1e-9))) if chart.log_x else (lambda v: v)
        low, high = scale(xs[0]), scale(xs[-1])
        share = 0.5 if high == low else (scale(x) - low) / (high - low)
        return round(LEFT + share * inner_w, 1), round(TOP + inner_h * (1 - y / top), 1)

    out = [f'<text x="{width / 2}" y="20" text-anchor="middle" font-weight="bold">{escape(chart.title)}</text>']
    for i in range(6):
        value = top * i / 5
        _, y = at(xs[0], value)
        out.append(f'<line x1="{LEFT}" y1="{y}" x2="{width - RIGHT}" y2="{y}" stroke="#e2e8f0"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:g}</text>')
    for value in xs:
        x, y = at(value, 0)
        out.append(f'<text x="{x}" y="{y + 16}" text-anchor="middle">{value:g}</text>')
    out.append(f'<text x="{width / 2}" y="{height - 10}" text-anchor="middle">{escape(chart.x_label)}</text>')
    middle = TOP + inner_h / 2
    out.append(f'<text transform="translate(14,{middle}) rotate(-90)" text-anchor="middle">{escape(chart.y_label)}</text>')
    for number, line in enumerate(chart.lines):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x},{y}" for x, y in (at(*point) for point in line.points))
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        if not line.dashed:
            out += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in (at(*point) for point in line.points)]
        out.append(f'<text x="{LEFT + 10}" y="{TOP + 14 + 15 * number}" fill="{colour}">{escape(line.name)}</text>')
    return out


def _nice(value: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten: axis labels that can be read."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= value * 0.999)


def png(charts: Sequence[Chart], path: str) -> bool:
    """The same as PNG through matplotlib; False where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(charts), figsize=(5.2 * len(charts), 3.6), squeeze=False)
    for axis, chart in zip(axes[0], charts, strict=True):
        for number, line in enumerate(chart.lines):
            style = {"linestyle": "--"} if line.dashed else {"marker": "o"}
            axis.plot(*zip(*line.points, strict=True), label=line.name, color=COLOURS[number % len(COLOURS)], **style)
        if chart.log_x:
            axis.set_xscale("log", base=2)
        axis.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label, ylim=(0, None))
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
