"""Where the time of a crowd goes on the GPU: host time per step by phase, device time per kernel.

    python bench/cuda_profile.py [--shape qwen3-0.6b] [--requests 256] [--cprofile]

Three equal crowds of bench/cuda.py: a warm-up, one with timers around the host's phases, one with
the device's kernels recorded (CUPTI). A step is "prefill" if any sequence has more than one token.
Idle is the time in which no kernel runs, while the host is in steps of that kind.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from cuda import crowd  # bench/cuda.py
from cuda_models import SHAPES, open_shape

from verbatim import LLM, SamplingParams
from verbatim.backend.cuda.runtime.step_graph import GraphInputs, StepGraph
from verbatim.backend.cuda.runtime.step_inputs import PaddedInputs
from verbatim.backend.cuda.sampler.pending_tokens import PendingTokens
from verbatim.base.config import CHOICES

KERNELS = {  # a part of a kernel's name -> its row in the table
    "matmul": "products",
    "merge_spans": "attention",
    "attend": "attention",
    "add_norm": "norms and residual",
    "qkv_rope_cache": "norm of heads, rotation, cache",
    "mlp_activation": "activation",
    "chunk_top2|select_token|resolve_ties|list|process_logits|reduce|fill": "sampling",
    "Memcpy|Memset": "copies",
}


class Step(NamedTuple):
    kind: str
    began: int  # nanoseconds of time.time_ns
    ended: int
    phases: dict[str, float]  # seconds


class Timers:
    """Wraps methods, and sums the time inside each of them per step."""

    def __init__(self) -> None:
        self.now: dict[str, float] = defaultdict(float)
        self.steps: list[Step] = []
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, label: str) -> None:
        inner = getattr(owner, name)
        own = name in vars(owner)

        def timed(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*args, **named)
            finally:
                self.now[label] += time.perf_counter() - began

        setattr(owner, name, timed)
        self._undo.append(lambda: setattr(owner, name, inner) if own else delattr(owner, name))

    def undo(self) -> None:
        for undo in self._undo:
            undo()


@contextmanager
def step_timers(llm: LLM, phases: bool) -> Iterator[Timers]:
    """Records every step of the engine while the block runs; `phases`: with timers inside it."""
    core, timers = llm.core, Timers()
    if phases:
        backend = core.backend
        timers.wrap(core.scheduler, "plan", "plan")
        timers.wrap(core.scheduler, "commit", "commit")
        timers.wrap(core, "_outputs", "outputs")
        timers.wrap(backend, "execute", "execute without overlap")
        if core._overlap is not None:
            timers.wrap(core._overlap, "launch", "match, or launch")
            timers.wrap(core._overlap, "launch_next", "launch next")
            timers.wrap(core._overlap, "collect", "collect")
        timers.wrap(backend, "_forward", ". forward")
        timers.wrap(GraphInputs, "fill", ". . fill decode inputs")
        timers.wrap(PaddedInputs, "fill", ". . fill padded inputs")
        timers.wrap(StepGraph, "replay", ". . graph replay")
        timers.wrap(backend.gpu_sampler, "_launch", ". sampler launch")
        timers.wrap(PendingTokens, "wait", ". wait for tokens")
    step, commit = core.step, core.scheduler.commit
    kind = ["none"]

    def seen(plan: Any, *rest: Any) -> Any:
        most = max((len(s.tokens) for s in plan.sequences), default=0)
        size = 1 << max(0, len(plan.sequences) - 1).bit_length()
        kind[0] = "prefill" if most > 1 else f"decode <= {size:3d}"
        return commit(plan, *rest)

    def timed() -> Any:
        timers.now.clear()
        began = time.time_ns()
        out = step()
        timers.steps.append(Step(kind[0], began, time.time_ns(), dict(timers.now)))
        return out

    core.step, core.scheduler.commit = timed, seen
    try:
        yield timers
    finally:
        del core.step
        core.scheduler.commit = commit
        timers.undo()


def kernel_events(profile: Any) -> list[tuple[int, int, str]]:
    """(start, end, name) of all work on the device in nanoseconds, in order."""
    events = [
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.name())
        for e in profile.profiler.kineto_results.events()
        if e.device_type() == torch.autograd.DeviceType.CUDA
    ]
    return sorted(events)


def label_of(name: str) -> str:
    for part, label in KERNELS.items():
        if re.search(part, name):
            return label
    return "other"


def print_host(steps: list[Step]) -> None:
    kinds: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        kinds[step.kind].append(step)
    names = list(dict.fromkeys(name for step in steps for name in step.phases))
    print("\nhost, ms per step")
    print(f"{'':28}" + "".join(f"{kind:>15}" for kind in sorted(kinds)))
    print(f"{'steps':28}" + "".join(f"{len(kinds[kind]):15d}" for kind in sorted(kinds)))
    whole = [sum(s.ended - s.began for s in kinds[kind]) for kind in sorted(kinds)]
    print(f"{'total s':28}" + "".join(f"{t / 1e9:15.3f}" for t in whole))
    counts = [len(kinds[kind]) for kind in sorted(kinds)]
    each = [total / 1e6 / n for total, n in zip(whole, counts, strict=True)]
    print(f"{'whole step':28}" + "".join(f"{ms:15.3f}" for ms in each))
    for name in sorted(names, key=lambda n: (n.startswith("."), n)):
        sums = [sum(s.phases.get(name, 0.0) for s in kinds[kind]) for kind in sorted(kinds)]
        each = [total * 1e3 / n for total, n in zip(sums, counts, strict=True)]
        print(f"{name:28}" + "".join(f"{ms:15.3f}" for ms in each))


def print_device(steps: list[Step], events: list[tuple[int, int, str]]) -> None:
    """Device time by kernel and idle time, by the kind of the step that the host is in."""
    busy: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    at, reached = 0, 0
    for step in steps:
        row, idle_from = busy[step.kind], max(step.began, reached)
        while at < len(events) and events[at][0] < step.ended:
            start, end, name = events[at]
            row["idle"] += max(0, start - idle_from)
            row[label_of(name)] += end - start
            idle_from = reached = max(idle_from, end)
            at += 1
        row["idle"] += max(0, step.ended - idle_from)
        row["steps"] += 1
        row["wall"] += step.ended - step.began
    labels = list(dict.fromkeys(label for row in busy.values() for label in row))
    print("\ndevice, ms per step (the last column: seconds in all)")
    print(f"{'':32}" + "".join(f"{kind:>15}" for kind in sorted(busy)))
    for label in labels:
        if label == "steps":
            print(f"{label:32}" + "".join(f"{busy[k][label]:15.0f}" for k in sorted(busy)))
            continue
        total = sum(row[label] for row in busy.values()) / 1e9
        cells = [busy[k][label] / 1e6 / busy[k]["steps"] for k in sorted(busy)]
        print(f"{label:32}" + "".join(f"{cell:15.3f}" for cell in cells) + f"{total:10.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--kv-type", choices=CHOICES["kv_type"], default="f16")
    parser.add_argument("--cprofile", action="store_true", help="and a fourth run under cProfile")
    args = parser.parse_args()
    llm = open_shape(args.shape, max_running=256, step_tokens=4096, kv_type=args.kv_type)
    vocab = llm.core.backend.spec.vocab

    def run(seed: int) -> None:
        prompts, _ = crowd(vocab, args.requests, seed)
        _, lengths = crowd(vocab, args.requests)
        params = [
            SamplingParams(temperature=0.6, seed=i, max_tokens=n, ignore_eos=True, speculate="off")
            for i, n in enumerate(lengths)
        ]
        began = time.perf_counter()
        llm.generate(prompts, params)
        took = time.perf_counter() - began
        print(
            f"crowd {seed}: {took:.2f} s, {sum(lengths) / took:.0f} tokens per second", flush=True
        )

    run(1)
    run(2)
    with step_timers(llm, phases=True) as timers:
        run(3)
    print_host(timers.steps)
    slow = sorted(timers.steps, key=lambda s: s.began - s.ended)[:8]
    print("slowest steps:", [(s.kind, round((s.ended - s.began) / 1e6, 1)) for s in slow])
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with (
        step_timers(llm, phases=False) as timers,
        torch.profiler.profile(activities=activities) as profile,
    ):
        run(4)
    print_device(timers.steps, kernel_events(profile))
    gc.collect()
    gc.disable()
    print("without Python's garbage collector:", end=" ")
    run(6)
    gc.enable()
    run(7)
    if args.cprofile:
        recorded = cProfile.Profile()
        recorded.runcall(run, 5)
        pstats.Stats(recorded).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
