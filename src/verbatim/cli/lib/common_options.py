"""Flags that several commands share, and the check of an output file before any work is done."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from verbatim.base.errors import ParameterError
from verbatim.cli.lib.command_class import Option

F = TypeVar("F", bound=Callable[..., Any])


def json_option(help: str = "print one JSON object") -> Callable[[F], F]:
    """Add --json; arrives as `as_json`."""
    return click.option("--json", "as_json", cls=Option, is_flag=True, help=help)


def plot_option(**more: Any) -> Callable[[F], F]:
    """Add --plot; check_plot() checks its value."""
    text = "write a plot, .svg or .png; needs the extra 'bench'"
    return click.option("--plot", cls=Option, metavar="FILE", help=text, **more)


def revision_option(**more: Any) -> Callable[[F], F]:
    text = "revision of a model on the hub"
    return click.option("--revision", cls=Option, metavar="REV", help=text, **more)


def offline_option(**more: Any) -> Callable[[F], F]:
    text = "use the cache only, never the network"
    return click.option("--offline", cls=Option, is_flag=True, help=text, **more)


def check_output(name: str, file: str) -> None:
    """Raise if `file` cannot be written, before any work is done. Folders are not created."""
    path = Path(file)
    folder = path.parent
    if file == "-":
        raise ParameterError(name, "'-' is no file, and this output is not for a pipe; name a file")
    if path.is_dir():
        raise ParameterError(name, f"{file!r} is a folder; name a file in it")
    if not folder.is_dir():
        why = "is not a folder" if folder.exists() else "does not exist"
        raise ParameterError(
            name,
            f"cannot write {file!r}: {str(folder)!r} {why}; make it (mkdir -p), or choose another"
            " path",
        )
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ParameterError(name, f"cannot write {file!r}: permission denied; choose another path")


def check_plot(file: str | None) -> None:
    """check_output for --plot, whose file name decides the format. None: no plot was asked for."""
    if file is None:
        return
    from verbatim.observe.plot import require_matplotlib

    if Path(file).suffix not in (".svg", ".png"):
        raise ParameterError("plot", f"{file!r} ends in neither .svg nor .png; choose one of them")
    check_output("plot", file)
    require_matplotlib()
