"""`verbatim doctor`: what a bug report needs, and what a beginner trips over."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from verbatim.backend import gpu
from verbatim.cli.options import Command, Option
from verbatim.cli.terminal import GREEN, RED, YELLOW, paint, write_json
from verbatim.cli.version import cpu_facts, cuda_facts

EXTRAS = {
    "hub": "huggingface_hub",
    "server": "starlette",
    "grammar": "llguidance",
    "bench": "matplotlib",
}
Finding = tuple[str, str, str]  # good | note | bad, what, the finding


@click.command(cls=Command)
@click.option("--json", "as_json", cls=Option, is_flag=True, help="print one JSON array")
def command(as_json: bool) -> int:
    """Check the installation: Python, kernels, extras, cache, default model. Exit code 1 if something is broken."""
    found = list(findings())
    if as_json:
        rows = [{"state": state, "what": what, "finding": text} for state, what, text in found]
        write_json(rows)
    else:
        marks = {
            "good": paint("ok  ", GREEN, sys.stdout),
            "note": paint("note", YELLOW, sys.stdout),
        }
        for state, what, text in found:
            sys.stdout.write(
                f"{marks.get(state) or paint('BAD ', RED, sys.stdout)}  {what:12} {text}\n"
            )
    return int(any(state == "bad" for state, _, _ in found))


def findings() -> Iterator[Finding]:
    yield "good" if sys.version_info >= (3, 11) else "bad", "python", sys.version.split()[0]
    yield "good", "cores", f"{_cores()} usable"
    state, text = cpu_facts()
    yield state, "cpu kernels", text
    state, text = _cuda()
    yield state, "cuda", text
    for extra, package in EXTRAS.items():
        try:
            yield "good", extra, f"{package} {version(package)}"
        except PackageNotFoundError:
            yield (
                "note",
                extra,
                f"{package} is not installed; if you need it: pip install '.[{extra}]' in the checkout",
            )
    yield from _cache()


def _cuda() -> tuple[str, str]:
    """good only if a test kernel ran on a GPU and its result was right. PyTorch is imported only for that."""
    if not gpu.present() or gpu.missing() is not None:
        return "note", cuda_facts()
    from verbatim.base.errors import BackendError

    try:
        found = import_module("verbatim.backend.cuda").kernel_ran()
    except BackendError as error:
        state = "bad" if isinstance(error, gpu.WrongResult) else "note"
        return state, f"an NVIDIA GPU is here, but {error}; backend=auto uses the cpu"
    except Exception as error:  # a broken installation of PyTorch or Triton raises what it likes
        return (
            "bad",
            f"PyTorch or Triton cannot be imported: {error}; install verbatim-engine[cuda] again",
        )
    return "good", f"{found}: a test kernel ran and its result is right; backend=auto uses this GPU"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cache() -> Iterator[Finding]:
    from verbatim.weights.catalog import cache_dir, list_models

    place = cache_dir()
    there = next(folder for folder in (place, *place.parents) if os.path.exists(folder))
    default = list_models()[0]
    try:
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        lost = (
            "" if default.ready else "; set VERBATIM_CACHE to another place"
        )  # a cache that has it all may be read-only
        yield (
            "note" if default.ready else "bad",
            "cache",
            f"{place} (not writable: {error.strerror}{lost})",
        )
    else:
        short = (
            not default.ready and free < 3 * default.bytes
        )  # the download, the file, and room to breathe
        yield (
            "note" if short else "good",
            "cache",
            f"{place} ({free / 1e9:.1f} GB free{'; too little' if short else ''})",
        )
    if default.ready:
        yield "good", "model", f"{default.name} is here ({default.bytes / 1e6:.0f} MB)"
    else:
        yield "note", "model", f"{default.name} is not fetched yet; `verbatim pull {default.name}`"
    limits = Path(place, "limits.json")
    measured = os.path.exists(limits)
    yield (
        "good" if measured else "note",
        "limits",
        "measured" if measured else "not yet; `verbatim bench` measures them",
    )
