"""`verbatim version`: versions, the backends of this machine, and why one is not usable."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

from verbatim import __version__
from verbatim.base.json_io import JsonObject
from verbatim.cli.lib.command_class import as_command
from verbatim.cli.lib.options import JSON
from verbatim.cli.lib.terminal import write_json
from verbatim.observe.namesakes import conflict


@as_command()
def command(as_json: bool = JSON) -> None:
    """Print versions, backends with the instruction set in use, and why a backend is missing."""
    found = facts()
    if as_json:
        write_json(found)
        return
    lines = [
        f"verbatim {found['version']}",
        f"python {found['python']}, numpy {found['numpy']}, {found['machine']}",
        *(f"backend {name}: {text}" for name, text in found["backends"].items()),
        f"default backend: {found['default_backend']}",
        *([found["conflict"]] if found["conflict"] else ()),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def facts() -> JsonObject:
    import numpy

    from verbatim.backend import gpu

    state, cpu = cpu_facts()
    reference = "ready (NumPy; slow, the specification)"
    on_gpu = gpu.present() and not gpu.missing()
    return {
        "version": __version__,
        "conflict": conflict(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "backends": {"cpu": cpu, "cuda": cuda_facts(), "reference": reference},
        "default_backend": "cuda" if on_gpu else "reference" if state == "note" else "cpu",
    }


def cuda_facts() -> str:
    """The state of the CUDA backend, without importing PyTorch, which takes seconds."""
    from verbatim.backend import gpu

    lacks = gpu.missing()
    if not gpu.present():
        installed = "" if lacks else "; PyTorch and Triton are installed"
        return f"not usable: {gpu.hidden_or_absent()}{installed}"
    if lacks:
        return f"not usable: there is an NVIDIA GPU, but {lacks}"
    return (
        "there is an NVIDIA GPU, and PyTorch and Triton are installed;"
        " `verbatim doctor` runs a test kernel"
    )


def cpu_facts() -> tuple[str, str]:
    """State and text of the CPU backend. good: the native kernels work, with their instruction set;
    note: they are not built, so the reference backend runs; bad: VERBATIM_ISA names an instruction
    set that this machine lacks."""
    from importlib import import_module

    from verbatim.backend.cpu import not_built

    try:
        native: Any = import_module("verbatim.backend.cpu._native")
    except ImportError as error:
        return "note", not_built(str(error))
    forced, runs = os.environ.get("VERBATIM_ISA", ""), native.isas()
    if forced and forced not in runs:
        why = f"VERBATIM_ISA={forced} is not one of {', '.join(runs)}, which this machine runs"
        return "bad", f"{why}; unset it, or set it to one of those"
    chosen = f"{forced} by VERBATIM_ISA" if forced else native.best_isa()
    return "good", f"ready ({chosen}; this machine runs {', '.join(runs)})"
