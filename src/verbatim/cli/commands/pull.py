"""`verbatim pull MODEL`: downloads a model into the cache, so that later runs need no network; with
--warm-up also compiles its GPU kernels, so that later starts need not."""

from __future__ import annotations

import sys
import time

from verbatim.cli.lib.command_class import argument, as_command, flag
from verbatim.cli.lib.options import DEFAULT_MODEL, REVISION
from verbatim.cli.lib.terminal import Progress, note


@as_command()
def command(
    model: str = argument(required=False, default=DEFAULT_MODEL),
    revision: str | None = REVISION,
    warm_up: bool = flag(
        "also compile the GPU kernels of the model into Triton's cache; needs a GPU"
    ),
    quiet: bool = flag("no progress", "-q", "--quiet"),
) -> None:
    """Download MODEL (a catalog name or org/name on the hub) into the cache and print its path.

    A name without a size, such as qwen3, is the newest of that name. A file that is already in the
    cache is verified, and downloaded again if it is damaged.
    """
    from verbatim.hub.catalog import pull

    progress = Progress(quiet=quiet)
    try:
        path = pull(model, revision=revision, progress=progress)
    finally:
        progress.clear()
    if warm_up:
        compile_kernels(str(path), progress)
    sys.stdout.write(f"{path}\n")


def compile_kernels(path: str, progress: Progress) -> None:
    """Open the model on the GPU once, with the default settings."""
    from verbatim.engine.calls.llm import LLM

    if progress.live:
        progress("compiling GPU kernels")
    began = time.perf_counter()
    try:
        with LLM(path, backend="cuda", warm_up=True, offline=True):
            pass
    finally:
        progress.clear()
    if not progress.quiet:
        note(f"the GPU kernels are compiled ({time.perf_counter() - began:.1f} s)")
