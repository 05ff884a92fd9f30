"""What the scripts of the course share: the flag --plot, and axes without a frame."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

BLUE, GREY, ORANGE, GREEN = "#3f51b5", "#9aa0b5", "#e07b39", "#3c8d5a"


def arguments(description: str | None, words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", type=Path, help="write the plot, .svg or .png")
    given = parser.parse_args(words)
    if given.plot is not None and not given.plot.absolute().parent.is_dir():
        parser.error(f"--plot {given.plot}: there is no directory {given.plot.parent}")
    return given


def panels(count: int = 1, height: float = 2.8) -> tuple[Any, list[Any]]:
    """A figure and its axes. matplotlib is imported here: without --plot it is not needed."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install matplotlib, or run without --plot")
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "verbatim", "svg.fonttype": "none", "font.size": 9})
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, count, figsize=(7.5, height), layout="constrained", squeeze=False
    )
    for one in axes[0]:
        one.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def save(figure: Any, path: Path) -> None:
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, metadata=metadata)
