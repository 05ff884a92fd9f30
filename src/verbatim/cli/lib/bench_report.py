"""What `verbatim bench` prints and draws: the limits of the machine, a row per size beside its
limit, the JSON summary, and the plot.

In: measured rows (bench/measure.py), the limits and the model's cost card (observe/roofline.py).
"""

from __future__ import annotations

import platform
import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING

from verbatim.base.json_io import JsonObject
from verbatim.cli.lib.terminal import Progress, columns, note, use_colour
from verbatim.hub.catalog import cache_dir
from verbatim.observe.roofline import REPEATS, refresh_limits

if TYPE_CHECKING:
    from verbatim.bench.measure import Job, JobRow
    from verbatim.bench.rivals.client import Rival
    from verbatim.engine.calls.llm import LLM
    from verbatim.observe.roofline import CostCard, MachineLimits

USUAL_SHARE = 0.4  # of the limit that a measurement reaches, for the estimate of its time
WHY_ABOVE = (
    "the machine was slower while its limits were measured, or part of the model stayed in a"
    " cache; the limits are not exact here"
)


def print_limits(llm: LLM, quick: bool) -> tuple[MachineLimits, CostCard]:
    """Measure and print the limits of the machine, and the cost of the model's tokens."""
    from verbatim.observe.roofline import cost_card

    info = llm.loaded.backend.info
    limits = _gpu_limits() if info.name == "cuda" else _cpu_limits(info.threads, quick)
    card = cost_card(llm.loaded.backend.spec, info)
    _head(f"engine    {info.name} {info.detail}")
    _head(
        f"model     {llm.loaded.name}: {card.read_bytes() / 1e6:.1f} MB of weights read per token, "
        f"{card.kv_token_bytes / 1e3:.1f} kB of KV cache per token, "
        f"{card.ops_token / 1e9:.3f} GOP per token ({card.prompt_ops_token / 1e9:.3f} in prefill)"
    )
    prompt = card.prefill_ceiling(limits, 1)
    _head(
        f"ceiling   {card.decode_ceiling(limits, 0):.0f} tokens per second, decode of one sequence"
        + (f"; {prompt:.0f} tokens per second, prefill" if prompt else "")
    )
    return limits, card


def _head(text: str) -> None:
    """A line above the table: a word and its facts, wrapped below the facts on a terminal."""
    if use_colour(sys.stdout):
        import textwrap

        text = textwrap.fill(text, columns(), subsequent_indent=" " * 10)
    print(text)


def _cpu_limits(threads: int, quick: bool) -> MachineLimits:
    limits = refresh_limits(cache_dir(), threads, note, 3 if quick else REPEATS)
    one, peak = "", "integer peak not measured (no native kernels)"
    if limits.one_thread_bytes and threads > 1:
        one = f" ({limits.one_thread_bytes / 1e9:.1f} with one)"
    if limits.int8_ops:
        peak = f"{limits.int8_ops / 1e9:.0f} int8 GOP/s"
    _head(
        f"machine   {platform.system()} {platform.machine()}, {threads} threads: "
        f"reads {limits.read_bytes / 1e9:.1f} GB/s{one}; {peak}"
    )
    return limits


def measure_again(before: MachineLimits) -> MachineLimits:
    """The limits of the CPU again: a row above its limit says that these are too low."""
    limits = refresh_limits(cache_dir(), before.threads, note)
    note(f"a rate was above its limit; measured again: {limits.read_bytes / 1e9:.1f} GB/s")
    return limits


def _gpu_limits() -> MachineLimits:
    """The limits of the GPU. Its peak is that of half precision; they are not saved, because
    limits.json describes the CPU."""
    from verbatim.observe.roofline import MachineLimits

    gpu = import_module("verbatim.backend.cuda.runtime.gpu_limits").measure_gpu()
    _head(
        f"machine   {gpu.name}: reads {gpu.read_bytes / 1e9:.0f} GB/s; "
        f"{gpu.ops / 1e12:.0f} bfloat16 TFLOP/s; {gpu.memory / 1e9:.0f} GB of memory"
    )
    return MachineLimits(gpu.read_bytes, 1, "gpu", int8_ops=gpu.ops)


def print_header(rival: Rival | None) -> None:
    theirs = f"   {rival.name + ' ' + rival.version:>18} {'ratio':>7}" if rival else ""
    print(f"\n{'':16} {'tokens/s':>10} {'limit':>8} {'share':>6}{theirs}")


class BenchProgress:
    """How long the measurements take, on stderr: an estimate from the limits before the first one,
    corrected by those that are done. Loading, limits and cold starts are not counted."""

    def __init__(
        self, todo: list[Job], card: CostCard, limits: MachineLimits, repeats: int
    ) -> None:
        self._todo = todo
        least = [least_seconds(job, card, limits) for job in todo]
        self._seconds = [repeats * seconds / USUAL_SHARE for seconds in least]
        self._began = time.perf_counter()
        self._line = Progress()
        note(f"{len(todo)} measurements, estimated: {_duration(sum(self._seconds))}")

    def start(self, job: Job) -> None:
        at = self._todo.index(job)
        if self._line.live:
            done = sum(self._seconds[:at])
            slower = (time.perf_counter() - self._began) / done if done else 1.0
            left = _duration(slower * sum(self._seconds[at:]))
            self._line(f"{at + 1} of {len(self._todo)}: {label(job)}, estimated: {left} left")

    def clear(self) -> None:
        self._line.clear()


def least_seconds(job: Job, card: CostCard, limits: MachineLimits) -> float:
    """Seconds of one round at the limits of the machine, with the prefill of what it decodes."""
    batch, context = (job.size, 32) if job.kind == "batch" else (1, job.size)
    rate = card.prefill_ceiling(limits, context) or card.decode_ceiling(limits, 0)
    steps = 0 if job.kind == "prefill" else job.tokens / batch
    return batch * context / rate + steps * card.step_seconds(limits, context, batch)


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(seconds, 1):.0f} s"


def print_row(row: JobRow, card: CostCard, limits: MachineLimits, rival: Rival | None) -> None:
    rate = row.rate("verbatim")
    ceiling = ceiling_of(row, card, limits)
    share = f"{ceiling:8.0f} {rate / ceiling:6.0%}" if ceiling else f"{'-':>8} {'-':>6}"
    theirs = f"   {row.rate(rival.name):18.1f} {rate / row.rate(rival.name):6.2f}x" if rival else ""
    print(f"{label(row.job):16} {rate:10.1f} {share}{theirs}", flush=True)


def label(job: Job) -> str:
    kinds = {"prefill": "prefill", "decode": "decode at", "batch": "sequences"}
    return f"{kinds[job.kind]} {job.size}"


def ceiling_of(row: JobRow, card: CostCard, limits: MachineLimits) -> float | None:
    match row.job.kind:
        case "prefill":
            return card.prefill_ceiling(limits, row.job.size)
        case "decode":
            return card.decode_ceiling(limits, row.job.size)
    return card.decode_ceiling(limits, 32, row.job.size)


def summary(
    llm: LLM, limits: MachineLimits, card: CostCard, rows: list[JobRow], rival: Rival | None
) -> JsonObject:
    from dataclasses import asdict

    info = llm.loaded.backend.info
    measured = []
    for row in rows:
        ours = {"rate": row.rate("verbatim"), "ceiling": ceiling_of(row, card, limits)}
        entry: JsonObject = {"kind": row.job.kind, "size": row.job.size, **ours}
        entry["seconds"] = row.seconds["verbatim"]
        if rival:
            entry["rival_rate"] = row.rate(rival.name)
            entry["rival_seconds"] = row.seconds[rival.name]
        measured.append(entry)
    return {
        "model": llm.loaded.name,
        "fingerprint": llm.fingerprint,
        "backend": {"name": info.name, "detail": info.detail, "threads": info.threads},
        "limits": asdict(limits),
        "card": asdict(card),
        "rival": rival and {"name": rival.name, "version": rival.version, "file": rival.file},
        "rows": measured,
    }


def plot_rows(
    path: str, rows: list[JobRow], card: CostCard, limits: MachineLimits, rival: Rival | None
) -> None:
    from verbatim.observe.plot import Chart, Line, draw

    charts = []
    for kind, title, label in (
        ("decode", "one sequence", "context, tokens"),
        ("batch", "several sequences", "sequences"),
        ("prefill", "prompt", "prompt tokens"),
    ):
        chosen = [row for row in rows if row.job.kind == kind]
        if not chosen:
            continue
        names = ["verbatim", *([rival.name] if rival else [])]
        rates = {name: tuple((row.job.size, row.rate(name)) for row in chosen) for name in names}
        lines = [Line(name, points) for name, points in rates.items()]
        roof = [(row.job.size, ceiling_of(row, card, limits)) for row in chosen]
        if all(y for _, y in roof):
            points = tuple((x, float(y or 0)) for x, y in roof)
            lines.append(Line("limit of the machine", points, dashed=True))
        charts.append(Chart(title, label, "tokens/s", tuple(lines), log_x=True))
    draw(charts, path)


def above_limit(rows: list[JobRow], card: CostCard, limits: MachineLimits) -> str:
    """Labels of the rows above their limit."""
    pairs = [(row, ceiling_of(row, card, limits)) for row in rows]
    over = [row for row, ceiling in pairs if ceiling and row.rate("verbatim") > ceiling]
    return ", ".join(label(row.job) for row in over)
