"""`verbatim bench`: measures throughput on this machine. Prints the hardware limits first, then
each result beside its limit and, with --against, beside another engine; the last line is JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from verbatim.backend import gpu
from verbatim.base.errors import ParameterError, UnsupportedError
from verbatim.cli.lib.bench_report import (
    WHY_ABOVE,
    BenchProgress,
    above_limit,
    measure_again,
    plot_rows,
    print_header,
    print_limits,
    print_row,
    summary,
)
from verbatim.cli.lib.command_class import answered, as_command, flag
from verbatim.cli.lib.open_model import open_llm
from verbatim.cli.lib.options import BASE_MODEL, PLOT, Values, engine_options, model_options
from verbatim.cli.lib.texts import check_plot

if TYPE_CHECKING:
    from verbatim.bench.measure import JobRow, Runner
    from verbatim.bench.rivals.client import Rival
    from verbatim.engine.calls.llm import LLM
    from verbatim.observe.roofline import CostCard, MachineLimits


def measured(help: str, **rule: Any) -> Any:
    return flag(help, section="What to measure", common=True, **rule)


@as_command(
    answered(
        *("-p", "--n-prompt", "-n", "--n-gen"),
        answer="--prefills N,N sets the prompt lengths, --contexts N,N the lengths at which"
        " decoding is measured; how many tokens it decodes is fixed",
    ),
    answered("-r", "--repetitions", answer="rounds are --repeats N"),
    model_options,
    engine_options(("speculate",), unused=BASE_MODEL),
)
def command(
    quick: bool = measured("fewer sizes and rounds: one minute instead of several"),
    against: str | None = measured(
        "another engine to compare with, in alternating rounds",
        type=click.Choice(["llama.cpp", "transformers", "vllm"]),
    ),
    rival_python: str | None = measured(
        "the Python in which the other engine is installed", metavar="PATH"
    ),
    rival_model: str | None = measured(
        "model file of the other engine, if not the same: its best format", metavar="FILE"
    ),
    prefills: str | None = measured("prompt lengths [32,512,2000]", metavar="N,N"),
    contexts: str | None = measured("context lengths of decoding [32,512,2000]", metavar="N,N"),
    batches: str | None = measured("sequences at once [1,4,16,32]", metavar="N,N"),
    repeats: int | None = measured("rounds; the median is reported [5]", least=1, most=1000),
    plot: str | None = measured(**PLOT.rule),
    speculate: str | None = measured(
        "measure speculative decoding instead: time and tokens per pass against draft length"
        " [suffix]",
        is_flag=False,
        flag_value="suffix",
        type=click.Choice(["ngram", "suffix", "mtp"]),
    ),
    **flags: Any,
) -> int:
    """Measure throughput and compare it with the limits of this machine. In a pipe or a file the
    last line is JSON.

    Speculative decoding is off, and so is the prefix cache unless given: the numbers are those of
    plain decoding.
    """
    sizes = _sizes(quick, prefills=prefills, contexts=contexts, batches=batches)
    rounds = repeats or (2 if quick else 5)
    check_plot(plot)
    _choose_device(flags, against, rival_python=rival_python, rival_model=rival_model)
    flags["e_speculate"] = speculate if speculate == "mtp" else "off"
    flags["e_prefix_cache"] = bool(flags["e_prefix_cache"])
    if speculate:
        _check_speculate(against, prefills=prefills, contexts=contexts, batches=batches)
        with open_llm(flags, generates=True) as llm:
            return _speculation(llm, speculate, rounds, plot)
    with open_llm(flags, generates=True) as llm:
        model = rival_model or flags["model"]
        rival = _open_rival(against, rival_python, model, flags, llm) if against else None
        out = _run(llm, rival, sizes, rounds, quick, plot)
    _write_result({**out, "cold_start_s": _cold_start(flags, rounds)})
    return 0


def _sizes(quick: bool, **given: str | None) -> dict[str, list[int]]:
    """prefills, contexts and batches: as given, or the default of each."""
    default = {"batches": "1,4" if quick else "1,4,16,32"}
    lengths = "32,512" if quick else "32,512,2000"
    return {
        name: _numbers(name, text or default.get(name, lengths)) for name, text in given.items()
    }


def _choose_device(flags: Values, against: str | None, **rival: str | None) -> None:
    on_gpu = flags["e_backend"] == "cuda"
    for name, value in rival.items():
        if value and not against:
            raise ParameterError(name, "needs --against, which names the other engine")
    if against:
        _check_rival(against, on_gpu)
    if not on_gpu:
        if gpu.present():
            print("this measures the CPU; --backend cuda measures the GPU", file=sys.stderr)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # auto selects the cpu backend, even with a GPU


def _check_speculate(against: str | None, **sizes: str | None) -> None:
    if against:
        why = "--speculate compares with plain decoding; leave out --against"
        raise ParameterError("against", why)
    for name, given in sizes.items():
        if given:
            why = f"--speculate measures fixed sizes of one sequence; leave out --{name}"
            raise ParameterError(name, why)


def _run(
    llm: LLM,
    rival: Rival | None,
    sizes: dict[str, list[int]],
    rounds: int,
    quick: bool,
    plot: str | None,
) -> Values:
    """Measure and print every row; returns the summary, and draws it with `plot`."""
    from verbatim.bench.measure import first_token

    theirs = None
    try:
        limits, card, rows = _measure(llm, rival, sizes, rounds, quick)
        if rival and rival.name == "vllm":
            theirs = _rival_crowd(llm, rival, quick)
    finally:
        if rival:
            rival.close()
    ready = first_token(llm, rounds)
    print(f"{'first token':16} {ready * 1000:8.1f} ms")
    out = summary(llm, limits, card, rows, rival)
    if llm.loaded.backend.info.name == "cuda":
        out["crowd"] = _crowd(llm, limits, card, quick, theirs)
    if plot:
        plot_rows(plot, rows, card, limits, rival)
    return {**out, "first_token_s": ready}


def _measure(
    llm: LLM, rival: Rival | None, sizes: dict[str, list[int]], rounds: int, quick: bool
) -> tuple[MachineLimits, CostCard, list[JobRow]]:
    """Measure the limits, then every size in alternating rounds with the rival; print each row."""
    from verbatim.bench.measure import GPU_WARM_UPS, Ours, jobs, measure

    limits, card = print_limits(llm, quick)
    runners: list[Runner] = [Ours(llm), *([rival] if rival else [])]
    warm_ups = GPU_WARM_UPS if llm.loaded.backend.info.name == "cuda" else 1
    steps, step_tokens = 16 if quick else 32, llm.config.step_tokens
    assert step_tokens is not None, "an opened engine has resolved it"
    todo = jobs(**sizes, steps=steps, step_tokens=step_tokens, limit=llm.context)
    progress = BenchProgress(todo, card, limits, len(runners) * (rounds + warm_ups))
    print_header(rival)
    rows = []
    for job in todo:
        progress.start(job)
        rows.append(measure(job, runners, rounds, warm_ups))
        progress.clear()
        print_row(rows[-1], card, limits, rival)
    if above_limit(rows, card, limits) and limits.method != "gpu":
        limits = measure_again(limits)
    if over := above_limit(rows, card, limits):
        print(f"share above 100 % ({over}): {WHY_ABOVE}")
    return limits, card, rows


def _rival_crowd(llm: LLM, rival: Rival, quick: bool) -> float:
    """Seconds that another engine takes for the requests of _crowd, after a warm-up."""
    from verbatim.bench.crowd import make_crowd

    for seed in (1, 0):
        requests = make_crowd(llm, _requests(quick), seed)
        seconds = rival.crowd([len(p) for p in requests.prompts], requests.lengths)
    return seconds


def _requests(quick: bool) -> int:
    return 32 if quick else 256


def _crowd(
    llm: LLM, limits: MachineLimits, card: CostCard, quick: bool, theirs: float | None = None
) -> dict[str, float]:
    """nano-vllm's benchmark, beside its limit and the seconds of another engine."""
    from verbatim.bench.crowd import make_crowd, run_crowd

    requests = make_crowd(llm, _requests(quick))
    run_crowd(llm, make_crowd(llm, len(requests.lengths), seed=1))  # compiles and captures
    seconds = run_crowd(llm, requests)
    limit = requests.least_seconds(limits, card)
    rate = requests.tokens / seconds
    label = f"{len(requests.lengths)} requests"
    row = f"{label:16} {rate:10.1f} {requests.tokens / limit:8.0f} {limit / seconds:6.0%}"
    if theirs is not None:
        row += f"   {requests.tokens / theirs:18.1f} {theirs / seconds:6.2f}x"
    print(row)
    rival = {} if theirs is None else {"rival_rate": requests.tokens / theirs}
    more = {"seconds": seconds, "rate": rate, "ceiling": requests.tokens / limit}
    return {**rival, "requests": len(requests.lengths), **more}


def _cold_start(flags: Values, rounds: int) -> float:
    from verbatim.bench.measure import cold_start
    from verbatim.hub.catalog import resolve

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


def _check_rival(name: str, on_gpu: bool) -> None:
    from verbatim.bench.rivals.client import DEVICES

    if (device := "cuda" if on_gpu else "cpu") not in DEVICES[name]:
        rule = "needs --backend cuda" if device == "cpu" else "runs on the CPU here"
        raise UnsupportedError("against", f"{name} {rule}")


def _open_rival(name: str, python: str | None, model: str, flags: Values, llm: LLM) -> Rival:
    from verbatim.bench.rivals.client import Rival, find_python
    from verbatim.files.split import with_siblings
    from verbatim.hub.catalog import resolve

    # llama.cpp takes the first part of a split file only.
    path = with_siblings(resolve(model, revision=flags.get("revision"), offline=True))[0]
    rival = Rival(name, find_python(name, python))
    try:
        info = llm.loaded.backend.info
        device = "cuda" if info.name == "cuda" else "cpu"
        rival.open(str(path), info.threads, min(llm.context, 2304), device)
    except BaseException:
        rival.close()
        raise
    return rival


def _speculation(llm: LLM, mode: str, rounds: int, plot: str | None) -> int:
    from verbatim.bench.speculation import LENGTHS, PROMPTS, curve
    from verbatim.observe.plot import Chart, Line, draw

    plan = f"{len(PROMPTS)} answers, then {4 * rounds} rounds of {len(LENGTHS)} draft lengths"
    print(plan, file=sys.stderr)
    found = curve(llm, mode, 4 * rounds)
    info = llm.loaded.backend.info
    print(
        f"engine    {info.name} {info.detail}; proposer {mode}; "
        "a pass with k drafts yields 1 to k + 1 tokens, and pays from break-even on"
    )
    names = list(found["tasks"])
    print(
        f"{'drafts':>6} {'ms/pass':>10} {'break-even':>10}   "
        + "   ".join(f"{name + ': tokens, ms/token':>26}" for name in names)
    )
    for i, cost in enumerate(found["pass_seconds"]):
        cells = [found["tasks"][name][i] for name in names]
        shown = "   ".join(
            f"{c['tokens_a_pass']:14.2f} {c['seconds_a_token'] * 1e3:11.2f}" for c in cells
        )
        start = f"{cost['drafts']:6} {cost['seconds'] * 1e3:10.2f} {cost['break_even']:10.2f}"
        print(f"{start}   {shown}")
    if plot:
        charts = []
        for title, unit, field, scale in (
            ("tokens per pass", "tokens", "tokens_a_pass", 1),
            ("time per token", "ms", "seconds_a_token", 1e3),
        ):
            tasks = found["tasks"].items()
            lines = [Line(n, tuple((r["drafts"], r[field] * scale) for r in t)) for n, t in tasks]
            charts.append(Chart(title, "drafts", unit, tuple(lines)))
        draw(charts, plot)
    _write_result({"model": llm.loaded.name, "fingerprint": llm.fingerprint, **found})
    return 0


def _write_result(result: Values) -> None:
    """All figures as one line of JSON; not on a terminal, which has shown the table."""
    if not sys.stdout.isatty():
        sys.stdout.write(json.dumps(result) + "\n")
