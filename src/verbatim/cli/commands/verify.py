"""`verbatim verify MODEL`: does one request give the same tokens on this machine, whatever runs
beside it and however the engine is set?"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from verbatim.base.json_io import JsonObject
from verbatim.cli.lib.command_class import argument, as_command, flag
from verbatim.cli.lib.open_model import refuse_encoder
from verbatim.cli.lib.options import (
    BASE_MODEL,
    JSON,
    OFFLINE,
    REVISION,
    Values,
    engine_of,
    engine_options,
    model_or_default,
)
from verbatim.cli.lib.tables import console, section
from verbatim.cli.lib.terminal import Progress, write_json

if TYPE_CHECKING:
    from verbatim.diagnose.needle import CaseResult
    from verbatim.engine.calls.llm import LLM

VARIED = (
    *("backend", "threads", "tensor_parallel", "step_tokens", "prefix_cache", "speculate"),
    *("kv_blocks", "pipeline_parallel", "rank_address"),
)


@as_command(engine_options(VARIED, unused=BASE_MODEL))
def command(
    model: str | None = argument("[MODEL]"),
    backends: str = flag(
        "backends to verify, each by itself: cpu, cuda, reference",
        default="auto",
        metavar="NAME,NAME",
    ),
    as_json: bool = JSON,
    revision: str | None = REVISION,
    offline: bool = OFFLINE,
    **flags: Any,
) -> int:
    """Run one request alone, among others, in chunks, from the cache, preempted, with other
    threads, instruction sets and proposers, and compare every token and every bit of its
    log-probabilities. About a minute. Exit code 1 if anything differs.
    """
    from verbatim.hub.catalog import resolve

    settings = engine_of(flags)
    name = model_or_default(model)
    where = resolve(name, revision=revision, offline=offline)
    refuse_encoder(name, where)
    path = str(where)
    began = time.perf_counter()
    names = backends.split(",")
    results = {backend: _verify(path, backend, settings, as_json) for backend in names}
    rows = [row for found in results.values() for row in found["rows"]]
    same = all(row.same for row in rows)
    if as_json:
        out = {name: {**f, "rows": list(map(asdict, f["rows"]))} for name, f in results.items()}
        write_json({"model": name, "identical": same, "backends": out})
    else:
        _print_verdict(rows, time.perf_counter() - began)
    return 0 if same else 1


def _verify(path: str, backend: str, settings: Values, quiet: bool) -> JsonObject:
    from verbatim.diagnose.needle import verify
    from verbatim.engine.calls.llm import LLM

    about: dict[str, str] = {}
    progress = Progress(quiet=quiet)

    def open_llm(changes: Values) -> LLM:
        llm = LLM(path, **{**settings, **changes})
        info = llm.loaded.backend.info
        about.setdefault("backend", f"{info.name} {info.detail}".strip())
        about.setdefault("fingerprint", llm.fingerprint)
        return llm

    rows: list[CaseResult] = []
    for row in verify(open_llm, backend):
        rows.append(row)
        if progress.live:
            progress(f"verified {row.group}: {row.detail}")
    progress.clear()
    if not quiet:
        _print(rows, about)
    return {**about, "rows": rows}


def _print(rows: list[CaseResult], about: dict[str, str]) -> None:
    from rich.text import Text

    out = console()
    shown = []
    for row in rows:
        mark = Text("same", style="green") if row.same else Text("DIFFERS", style="bold red")
        text = Text(row.evidence, style="dim")
        if row.difference:
            text = Text(row.difference, style="red")
        shown.append((mark, row.group, row.detail, f"{row.tokens:,}", text))
    header = ("", "circumstance", "", "tokens", "evidence")
    title = f"backend {about['backend']}, fingerprint {about['fingerprint']}"
    section(out, title, shown, right=(3,), header=header, wide=4)


def _print_verdict(rows: list[CaseResult], seconds: float) -> None:
    wrong = sum(not row.same for row in rows)
    tokens = sum(row.tokens for row in rows)
    verdict = "identical" if not wrong else "NOT IDENTICAL"
    out = console()
    out.print()
    same = f"{len(rows) - wrong} of {len(rows)} runs gave the same {tokens // max(1, len(rows))}"
    text = f"{verdict}: {same} tokens and bits, in {seconds:.0f} s"
    out.print(text, style="bold red" if wrong else "bold green")
