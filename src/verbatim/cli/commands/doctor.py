"""`verbatim doctor`: checks the installation and prints the facts that a bug report needs.
`verbatim doctor MODEL`: checks a model's files, its weights and its behaviour."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from verbatim.backend import gpu
from verbatim.cli.commands.version import cpu_facts, cuda_facts
from verbatim.cli.lib.command_class import argument, as_command, flag
from verbatim.cli.lib.options import BASE_MODEL, OFFLINE, REVISION, engine_options
from verbatim.cli.lib.terminal import GREEN, RED, YELLOW, paint, write_json

EXTRAS = {
    "hub": "huggingface_hub",
    "server": "starlette",
    "grammar": "llguidance",
    "bench": "matplotlib",
}
Finding = tuple[str, str, str]  # state (good | note | bad), subject, text


@as_command(engine_options(unused=BASE_MODEL))
def command(
    model: str | None = argument("[MODEL]"),
    live: bool = flag(
        "with MODEL: also run it: turns, loops, quiz, plain text, copies, rope, KV types",
        "--live/--no-live",
        default=True,
    ),
    seed: int = flag("seed of the live checks", default=0, least=0),
    as_json: bool = flag("print the result as JSON", "--json"),
    revision: str | None = REVISION,
    offline: bool = OFFLINE,
    **flags: Any,
) -> int:
    """Check Python, kernels, extras, cache and default model; with MODEL, check that model: end of
    sequence, special tokens, template, generation settings, rope and context, weights, how it
    answers, and what each 8-bit KV cache costs; of an encoder: special tokens, text length,
    pooling, weights, and its embeddings or scores. Exit code 1 if something is broken.
    """
    if model is not None:
        from verbatim.cli.lib.doctor.doctor_model import examine

        flags |= {"model": model, "revision": revision, "offline": offline}
        return examine(flags, live=live, seed=seed, as_json=as_json)
    found = list(findings())
    if as_json:
        rows = [{"state": state, "what": what, "finding": text} for state, what, text in found]
        write_json(rows)
    else:
        marks = {"good": ("ok  ", GREEN), "note": ("note", YELLOW), "bad": ("BAD ", RED)}
        for state, what, text in found:
            sys.stdout.write(f"{paint(*marks[state], sys.stdout)}  {what:12} {text}\n")
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
            remedy = f"if you need it: pip install '.[{extra}]' in the checkout"
            yield "note", extra, f"{package} is not installed; {remedy}"
    yield from _cache()


def _cuda() -> tuple[str, str]:
    """State "good" only if a test kernel ran on the GPU with the right result. Only this imports
    PyTorch."""
    if not gpu.present() or gpu.missing() is not None:
        return "note", cuda_facts()
    from verbatim.base.errors import BackendError

    try:
        found = import_module("verbatim.backend.cuda").kernel_ran()
    except BackendError as error:
        state = "bad" if isinstance(error, gpu.WrongResult) else "note"
        return state, f"there is an NVIDIA GPU, but {error}; backend=auto uses the cpu"
    except Exception as error:  # a broken installation of PyTorch or Triton can raise any type
        why = f"PyTorch or Triton cannot be imported: {error}"
        return "bad", f"{why}; install the extra 'cuda' again: {gpu.PIP}"
    return "good", f"{found}: a test kernel ran and its result is right; backend=auto uses this GPU"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cache() -> Iterator[Finding]:
    from verbatim.hub.catalog import cache_dir
    from verbatim.hub.model_list import list_models

    cache = cache_dir()
    existing = next(folder for folder in (cache, *cache.parents) if os.path.exists(folder))
    default = list_models()[0]
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        # A cache that already holds the model may be read-only.
        remedy = "" if default.ready else "; set VERBATIM_CACHE to another path"
        state = "note" if default.ready else "bad"
        yield state, "cache", f"{cache} (not writable: {error.strerror}{remedy})"
    else:
        # The partial download, the file, and a reserve of the same size.
        short = not default.ready and free < 3 * default.bytes
        room = f"{free / 1e9:.1f} GB free{'; too little' if short else ''}"
        yield "note" if short else "good", "cache", f"{cache} ({room})"
    if default.ready:
        yield "good", "model", f"{default.name} is downloaded ({default.bytes / 1e6:.0f} MB)"
    else:
        yield "note", "model", f"{default.name} is not downloaded; `verbatim pull {default.name}`"
    measured = os.path.exists(Path(cache, "limits.json"))
    text = "measured" if measured else "not yet; `verbatim bench` measures them"
    yield "good" if measured else "note", "limits", text
