"""`verbatim bench`: measures throughput on this machine. Prints the hardware limits first, then
each result beside its limit and, with --against, beside another engine; the last line is JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from typing import TYPE_CHECKING, Any

import click

from verbatim.base.errors import ParameterError, UnsupportedError
from verbatim.cli.options import (
    BASE_MODEL,
    Command,
    Option,
    check_plot,
    engine_options_without,
    model_options,
)
from verbatim.cli.terminal import note

if TYPE_CHECKING:
    from verbatim.bench.measure import Row, Runner
    from verbatim.bench.rivals.client import Rival
    from verbatim.engine.llm import LLM
    from verbatim.observe.roofline import CostCard, Limits

SECTION = "What to measure"
ABOVE = (
    "the machine was slower while its limits were measured, or part of the model stayed in a"
    " CPU cache; the limits are not exact here"
)


@click.command(cls=Command)
@click.option(
    "--quick",
    cls=Option,
    section=SECTION,
    is_flag=True,
    help="fewer sizes and rounds: one minute instead of several",
)
@click.option(
    "--against",
    cls=Option,
    section=SECTION,
    type=click.Choice(["llama.cpp", "transformers"]),
    help="another engine to compare with, in alternating rounds",
)
@click.option(
    "--rival-python",
    cls=Option,
    section=SECTION,
    metavar="PATH",
    help="the Python in which the other engine is installed",
)
@click.option(
    "--rival-model",
    cls=Option,
    section=SECTION,
    metavar="FILE",
    help="model file of the other engine, if not the same: its best format",
)
@click.option(
    "--prefills", cls=Option, section=SECTION, metavar="N,N", help="prompt lengths [32,512,2000]"
)
@click.option(
    "--contexts",
    cls=Option,
    section=SECTION,
    metavar="N,N",
    help="context lengths of decoding [32,512,2000]",
)
@click.option(
    "--batches", cls=Option, section=SECTION, metavar="N,N", help="sequences at once [1,4,16,32]"
)
@click.option(
    "--repeats",
    cls=Option,
    section=SECTION,
    type=click.IntRange(1, 1000),
    metavar="N",
    help="rounds; the median is reported [5]",
)
@click.option(
    "--plot",
    cls=Option,
    section=SECTION,
    metavar="FILE",
    help="write a plot, .svg or .png; needs the extra 'bench'",
)
@click.option(
    "--speculate",
    cls=Option,
    section=SECTION,
    is_flag=False,
    flag_value="suffix",
    type=click.Choice(["ngram", "suffix"]),
    help="measure speculative decoding instead: time and tokens per pass against draft length"
    " [suffix]",
)
@model_options
@engine_options_without("speculate", unused=BASE_MODEL)
def command(
    quick: bool,
    against: str | None,
    rival_python: str | None,
    rival_model: str | None,
    prefills: str | None,
    contexts: str | None,
    batches: str | None,
    repeats: int | None,
    plot: str | None,
    speculate: str | None,
    **flags: Any,
) -> int:
    """Measure throughput and compare it with the limits of this machine. The last line is JSON.

    Speculative decoding is off, and so is the prefix cache unless given: the numbers are those of
    plain decoding.
    """
    from verbatim.bench.measure import first_token
    from verbatim.cli.open_model import open_llm

    sizes = {
        "prefills": _numbers("prefills", prefills or ("32,512" if quick else "32,512,2000")),
        "contexts": _numbers("contexts", contexts or ("32,512" if quick else "32,512,2000")),
        "batches": _numbers("batches", batches or ("1,4" if quick else "1,4,16,32")),
    }
    rounds = repeats or (2 if quick else 5)
    check_plot(plot)
    for name, value in (("rival_python", rival_python), ("rival_model", rival_model)):
        if value and not against:
            raise ParameterError(name, "needs --against, which names the other engine")
    if flags["e_backend"] == "cuda":
        raise UnsupportedError(
            "backend",
            "bench measures the limits of a CPU; bench/cuda.py in the sources measures a GPU",
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # auto selects the cpu backend, even with a GPU
    flags["e_speculate"] = "off"
    flags["e_prefix_cache"] = bool(flags["e_prefix_cache"])
    if speculate:
        if against:
            raise ParameterError(
                "against", "--speculate compares with plain decoding; leave out --against"
            )
        for name, sizes_given in (
            ("prefills", prefills),
            ("contexts", contexts),
            ("batches", batches),
        ):
            if sizes_given:
                raise ParameterError(
                    name, f"--speculate measures fixed sizes of one sequence; leave out --{name}"
                )
        with open_llm(flags) as llm:
            return _speculation(llm, speculate, rounds, plot)
    with open_llm(flags) as llm:
        rival = (
            _open_rival(against, rival_python, rival_model or flags["model"], flags, llm)
            if against
            else None
        )
        try:
            limits, card, rows = _measure(llm, rival, sizes, rounds, quick)
        finally:
            if rival:
                rival.close()
        ready = first_token(llm, rounds)
        print(f"{'first token':16} {ready * 1000:8.1f} ms")
        out = _summary(llm, limits, card, rows, rival)
    cold = _cold_start(flags, rounds)
    if plot:
        _plot(plot, rows, card, limits, rival)
    sys.stdout.write(json.dumps({**out, "first_token_s": ready, "cold_start_s": cold}) + "\n")
    return 0


def _measure(
    llm: LLM, rival: Rival | None, sizes: dict[str, list[int]], rounds: int, quick: bool
) -> tuple[Limits, CostCard, list[Row]]:
    """Measure the limits, then every size in alternating rounds with the rival; print each row."""
    from verbatim.bench.measure import Ours, jobs, measure

    limits, card = _print_limits(llm, quick)
    runners: list[Runner] = [Ours(llm), *([rival] if rival else [])]
    _header(rival)
    rows = []
    for job in jobs(
        **sizes, steps=16 if quick else 32, step_tokens=llm.config.step_tokens, limit=llm.context
    ):
        rows.append(measure(job, runners, rounds))
        _print_row(rows[-1], card, limits, rival)
    if over := above_limit(rows, card, limits):
        print(f"share above 100 % ({over}): {ABOVE}")
    return limits, card, rows


def above_limit(rows: list[Row], card: CostCard, limits: Limits) -> str:
    """Labels of the rows above their limit."""
    over = [
        row
        for row in rows
        if (ceiling := ceiling_of(row, card, limits)) and row.rate("verbatim") > ceiling
    ]
    return ", ".join(_label(row) for row in over)


def _cold_start(flags: dict[str, Any], rounds: int) -> float:
    from verbatim.bench.measure import cold_start
    from verbatim.weights.catalog import resolve

    path = str(resolve(flags["model"], revision=flags.get("revision"), offline=True))
    extra = [
        word
        for name in ("threads", "backend")
        if flags[f"e_{name}"]
        for word in (f"--{name}", str(flags[f"e_{name}"]))
    ]
    cold = cold_start(path, extra, min(rounds, 3))
    print(f"{'cold start':16} {cold * 1000:8.1f} ms   process start to first text, model on disk")
    return cold


def _numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ParameterError(name, f"{text!r} is not a list of numbers such as 32,512") from None
    if any(number < 1 for number in numbers):
        raise ParameterError(name, f"{min(numbers)} is below 1, the smallest size")
    return numbers


def _open_rival(
    name: str, python: str | None, model: str, flags: dict[str, Any], llm: LLM
) -> Rival:
    from verbatim.bench.rivals.client import Rival, find_python
    from verbatim.weights.catalog import resolve
    from verbatim.weights.split import with_siblings

    # llama.cpp takes the first part of a split file only.
    path = with_siblings(resolve(model, revision=flags.get("revision"), offline=True))[0]
    rival = Rival(name, find_python(name, python))
    try:
        rival.open(str(path), llm.parts.backend.info.threads, min(llm.context, 2304))
    except BaseException:
        rival.close()
        raise
    return rival


# --------------------------------------------------------------------------------------- printing


def _print_limits(llm: LLM, quick: bool) -> tuple[Limits, CostCard]:
    from verbatim.observe.roofline import (
        cost_card,
        forget_buffers,
        measure_limits,
        native_probes,
        save_limits,
    )
    from verbatim.weights.catalog import cache_dir

    info = llm.parts.backend.info
    read, ops = native_probes()
    limits = measure_limits(
        info.threads, native_read=read, native_ops=ops, repeats=3 if quick else 7
    )
    forget_buffers()
    card = cost_card(llm.parts.backend.spec, info)
    try:
        save_limits(cache_dir(), limits)
    except OSError as error:
        note(f"warning: the limits could not be saved: {error.strerror}")
    one = (
        f" ({limits.one_thread_bytes / 1e9:.1f} with one)"
        if limits.one_thread_bytes and info.threads > 1
        else ""
    )
    peak = (
        f"{limits.int8_ops / 1e9:.0f} int8 GOP/s"
        if limits.int8_ops
        else "integer peak not measured (no native kernels)"
    )
    print(
        f"machine   {platform.system()} {platform.machine()}, {info.threads} threads: "
        f"reads {limits.read_bytes / 1e9:.1f} GB/s{one}; {peak}"
    )
    print(f"engine    {info.name} {info.detail}")
    print(
        f"model     {llm.parts.name}: {card.weight_bytes / 1e6:.1f} MB of weights read per token, "
        f"{card.kv_token_bytes / 1e3:.1f} kB of KV cache per token, "
        f"{card.ops_token / 1e9:.3f} GOP per token ({card.prompt_ops_token / 1e9:.3f} in prefill)"
    )
    prompt = card.prefill_ceiling(limits, 1)
    print(
        f"ceiling   {card.decode_ceiling(limits, 0):.0f} tokens per second, decode of one sequence"
        + (f"; {prompt:.0f} tokens per second, prefill" if prompt else "")
    )
    return limits, card


def _header(rival: Rival | None) -> None:
    theirs = f"   {rival.name + ' ' + rival.version:>18} {'ratio':>7}" if rival else ""
    print(f"\n{'':16} {'tokens/s':>10} {'limit':>8} {'share':>6}{theirs}")


def _print_row(row: Row, card: CostCard, limits: Limits, rival: Rival | None) -> None:
    label = _label(row)
    rate = row.rate("verbatim")
    ceiling = ceiling_of(row, card, limits)
    share = f"{ceiling:8.0f} {rate / ceiling:6.0%}" if ceiling else f"{'-':>8} {'-':>6}"
    theirs = f"   {row.rate(rival.name):18.1f} {rate / row.rate(rival.name):6.2f}x" if rival else ""
    print(f"{label:16} {rate:10.1f} {share}{theirs}", flush=True)


def _label(row: Row) -> str:
    return {"prefill": "prefill", "decode": "decode at", "batch": "sequences"}[
        row.job.kind
    ] + f" {row.job.size}"


def ceiling_of(row: Row, card: CostCard, limits: Limits) -> float | None:
    match row.job.kind:
        case "prefill":
            return card.prefill_ceiling(limits, row.job.size)
        case "decode":
            return card.decode_ceiling(limits, row.job.size)
    return card.decode_ceiling(limits, 32, row.job.size)


def _summary(
    llm: LLM, limits: Limits, card: CostCard, rows: list[Row], rival: Rival | None
) -> dict[str, Any]:
    from dataclasses import asdict

    info = llm.parts.backend.info
    measured = []
    for row in rows:
        entry: dict[str, Any] = {
            "kind": row.job.kind,
            "size": row.job.size,
            "rate": row.rate("verbatim"),
        }
        entry["ceiling"] = ceiling_of(row, card, limits)
        entry["seconds"] = row.seconds["verbatim"]
        if rival:
            entry["rival_rate"], entry["rival_seconds"] = (
                row.rate(rival.name),
                row.seconds[rival.name],
            )
        measured.append(entry)
    return {
        "model": llm.parts.name,
        "fingerprint": llm.fingerprint,
        "backend": {"name": info.name, "detail": info.detail, "threads": info.threads},
        "limits": asdict(limits),
        "card": asdict(card),
        "rival": {"name": rival.name, "version": rival.version, "file": rival.file}
        if rival
        else None,
        "rows": measured,
    }


def _plot(path: str, rows: list[Row], card: CostCard, limits: Limits, rival: Rival | None) -> None:
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
        lines = [
            Line(name, tuple((row.job.size, row.rate(name)) for row in chosen)) for name in names
        ]
        roof = [(row.job.size, ceiling_of(row, card, limits)) for row in chosen]
        if all(y for _, y in roof):
            lines.append(
                Line(
                    "limit of the machine", tuple((x, float(y or 0)) for x, y in roof), dashed=True
                )
            )
        charts.append(Chart(title, label, "tokens/s", tuple(lines), log_x=True))
    draw(charts, path)


def _speculation(llm: LLM, mode: str, rounds: int, plot: str | None) -> int:
    from verbatim.bench.speculation import curve
    from verbatim.observe.plot import Chart, Line, draw

    found = curve(llm, mode, 4 * rounds)
    info = llm.parts.backend.info
    print(
        f"engine    {info.name} {info.detail}; proposer {mode}; "
        "a pass with k drafts yields 1 to k + 1 tokens"
    )
    names = list(found["tasks"])
    print(
        f"{'drafts':>6} {'ms/pass':>10}   "
        + "   ".join(f"{name + ': tokens, ms/token':>26}" for name in names)
    )
    for i, cost in enumerate(found["pass_seconds"]):
        cells = [found["tasks"][name][i] for name in names]
        shown = "   ".join(
            f"{c['tokens_a_pass']:14.2f} {c['seconds_a_token'] * 1e3:11.2f}" for c in cells
        )
        print(f"{cost['drafts']:6} {cost['seconds'] * 1e3:10.2f}   {shown}")
    if plot:
        passes = tuple(
            Line(n, tuple((r["drafts"], r["tokens_a_pass"]) for r in found["tasks"][n]))
            for n in names
        )
        times = tuple(
            Line(n, tuple((r["drafts"], r["seconds_a_token"] * 1e3) for r in found["tasks"][n]))
            for n in names
        )
        draw(
            [
                Chart("tokens per pass", "drafts", "tokens", passes),
                Chart("time per token", "drafts", "ms", times),
            ],
            plot,
        )
    sys.stdout.write(
        json.dumps({"model": llm.parts.name, "fingerprint": llm.fingerprint, **found}) + "\n"
    )
    return 0
