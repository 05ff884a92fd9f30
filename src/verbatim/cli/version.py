"""`verbatim version`: what runs here, and what does not and why."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import click

from verbatim import __version__
from verbatim.cli.options import Command, Option
from verbatim.cli.screen import write_json


@click.command(cls=Command)
@click.option("--json", "as_json", cls=Option, is_flag=True, help="print one JSON object")
def command(as_json: bool) -> None:
    """Print versions, the backends with the instruction set in use, and why a backend is missing."""
    found = facts()
    if as_json:
        write_json(found)
        return
    lines = [
        f"verbatim {found['version']}",
        f"python {found['python']}, numpy {found['numpy']}, {found['machine']}",
        *(f"backend {name}: {text}" for name, text in found["backends"].items()),
        f"default backend: {found['default_backend']}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def facts() -> dict[str, Any]:
    import numpy

    cpu_ok, cpu = cpu_facts()
    return {
        "version": __version__,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "backends": {"cpu": cpu, "cuda": cuda_facts(), "reference": "ready (NumPy; slow, the specification)"},
        "default_backend": "cpu" if cpu_ok else "reference",
    }


def cpu_facts() -> tuple[bool, str]:
    """Whether the native kernels are there, and the instruction set or the reason."""
    from importlib import import_module

    try:
        native: Any = import_module("verbatim.backend.cpu._native")
    except ImportError as error:
        return False, f"not built: {_reason() or error}; install a C++ compiler and install verbatim again"
    forced = os.environ.get("VERBATIM_ISA", "")
    chosen = f"{forced} by VERBATIM_ISA" if forced else native.best_isa()
    return True, f"ready ({chosen}; this machine runs {', '.join(native.isas())})"


def _reason() -> str:
    from importlib import import_module

    try:
        return str(import_module("verbatim.backend.cpu._build").REASON)
    except ImportError:
        return ""


def cuda_facts() -> str:
    """Without importing PyTorch: that takes seconds, and `version` should not."""
    from importlib.util import find_spec

    try:
        present = find_spec("verbatim.backend.cuda") is not None
    except ModuleNotFoundError:
        present = False
    if not present:
        return "not part of this release"
    return (
        "PyTorch is installed; opened on demand" if find_spec("torch") else "PyTorch is missing; pip install verbatim-llm[cuda]"
    )
