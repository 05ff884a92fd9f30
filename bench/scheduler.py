"""Scheduler cost: plan() and commit() of one step without a model, by running, waiting and context.

    python bench/scheduler.py [--steps 300] [--plot scheduler.svg]

The limit is printed first: 0.2 ms per step with 64 running sequences. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path

from verbatim.base.params import SamplingParams
from verbatim.base.records import CacheGroup, Drawn, SeqResult, StepPlan, StepResult
from verbatim.observe.plot import Chart, Line, draw, require_matplotlib
from verbatim.schedule.scheduler import Scheduler
from verbatim.schedule.sequence import Sequence

LIMIT_MS = 0.2  # per step with 64 running sequences
DRAWN = (Drawn(1, -1.0),)


def answer(plan: StepPlan) -> StepResult:
    """A backend without cost: every draw is token 1. Built outside the timed region."""
    return StepResult(
        plan.step, tuple([SeqResult(s.seq_id, DRAWN if s.draws else ()) for s in plan.sequences])
    )


def make(running: int, waiting: int, context: int, steps: int) -> Scheduler:
    length = context + steps + 64
    blocks = running * (length // 16 + 2)
    scheduler = Scheduler(
        (CacheGroup(None, (0,)),), (blocks,), step_tokens=running * context, max_running=running
    )
    params = SamplingParams()
    for i in range(running + waiting):
        prompt = [i % 997, *range(1, context)]
        scheduler.add(Sequence(i, prompt, params, limit=length, key=i, stop_ids={0: "eos"}))
    while len(scheduler.running) < running or any(s.computed < context for s in scheduler.running):
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, answer(plan))
    return scheduler


def measure(running: int, waiting: int = 0, context: int = 512, steps: int = 300) -> float:
    """CPU milliseconds of plan() + commit() while all sequences decode: the best of five
    medians, since other programs slow this one down and nothing speeds it up."""
    scheduler = make(running, waiting, context, steps)
    times = []
    gc.collect()
    for _ in range(steps):
        began = time.thread_time()
        plan = scheduler.plan()
        planned = time.thread_time()
        assert plan is not None
        assert len(plan.sequences) == running
        result = answer(plan)
        executed = time.thread_time()
        scheduler.commit(plan, result)
        times.append(planned - began + time.thread_time() - executed)
    fifth = max(steps // 5, 1)
    parts = [sorted(times[i : i + fifth]) for i in range(0, steps, fifth)]
    return min(part[len(part) // 2] for part in parts) * 1e3


def table(title: str, points: list[tuple[int, float]]) -> None:
    print(
        f"\n{title:>10}  ms per step   µs per sequence"
        if title == "running"
        else f"\n{title:>10}  ms per step"
    )
    for x, ms in points:
        print(f"{x:>10}  {ms:11.4f}" + (f"   {ms * 1e3 / x:15.2f}" if title == "running" else ""))


def charts(curves: dict[str, list[tuple[int, float]]]) -> list[Chart]:
    out = []
    for title, points in curves.items():
        limit = Line(
            "limit at 64 running",
            ((points[0][0], LIMIT_MS), (points[-1][0], LIMIT_MS)),
            dashed=True,
        )
        out.append(
            Chart(
                f"cost against {title}",
                title,
                "ms per step",
                (Line("plan + commit", tuple(points)), limit),
            )
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--plot", type=Path, help="write an SVG with the three curves")
    args = parser.parse_args()
    if args.plot:
        require_matplotlib()
    print(f"limit: {LIMIT_MS} ms per step with 64 running")
    curves = {
        "running": [(n, measure(n, steps=args.steps)) for n in (1, 4, 16, 64, 128, 256)],
        "waiting": [
            (n, measure(64, waiting=n, context=32, steps=args.steps)) for n in (0, 256, 1024, 4096)
        ],
        "context": [(n, measure(16, context=n, steps=args.steps)) for n in (64, 1024, 4096, 16384)],
    }
    for title, points in curves.items():
        table(title, points)
    if args.plot:
        draw(charts(curves), str(args.plot))
    at64 = dict(curves["running"])[64]
    print(
        json.dumps(
            {
                "bench": "scheduler",
                "limit_ms": LIMIT_MS,
                "ms_at_64": round(at64, 4),
                "within": at64 <= LIMIT_MS,
                "curves": curves,
            }
        )
    )


if __name__ == "__main__":
    main()
