"""Numbers about the engine: counters, gauges and histograms, and their text in the format that Prometheus reads.

What happened comes in (a step, a request accepted, a request done); `values()` gives plain numbers, `render()` the
exposition text. No dependency, no global registry: an engine has one EngineMetrics, and another thread may render while
it counts.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from verbatim.base.records import Completion, StepPlan, Usage

if TYPE_CHECKING:
    from verbatim.base.params import SamplingParams

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class Counter:
    """Only grows."""

    kind = "counter"

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1) -> None:
        self.value += amount

    def samples(self, name: str, labels: str) -> list[str]:
        return [f"{name}{labels} {_show(self.value)}"]


class Gauge(Counter):
    """Whatever it is now."""

    kind = "gauge"

    def set(self, value: float) -> None:
        self.value = value


class Tally(Gauge):
    """A count that somebody else keeps: only grows, and is told whole."""

    kind = "counter"


class Histogram:
    """How many observations were at most each bound; `le` is inclusive, as Prometheus has it."""

    kind = "histogram"

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def samples(self, name: str, labels: str) -> list[str]:
        inner = labels[1:-1] + "," if labels else ""
        out, sum_ = [], 0
        counts = list(self.counts)
        for bound, number in zip((*map(_show, self.bounds), "+Inf"), counts, strict=True):
            sum_ += number
            out.append(f'{name}_bucket{{{inner}le="{bound}"}} {sum_}')
        return [*out, f"{name}_sum{labels} {_show(self.total)}", f"{name}_count{labels} {sum_}"]


Metric = Counter | Gauge | Histogram
M = TypeVar("M", Counter, Gauge, Tally, Histogram)


class Registry:
    def __init__(self) -> None:
        self._metrics: dict[str, tuple[str, dict[str, Metric]]] = {}  # name -> (help, labels -> metric)

    def counter(self, name: str, help: str, **labels: str) -> Counter:
        return self._keep(name, help, labels, Counter())

    def gauge(self, name: str, help: str, **labels: str) -> Gauge:
        return self._keep(name, help, labels, Gauge())

    def tally(self, name: str, help: str, **labels: str) -> Tally:
        return self._keep(name, help, labels, Tally())

    def histogram(self, name: str, help: str, bounds: Sequence[float] = SECONDS, **labels: str) -> Histogram:
        return self._keep(name, help, labels, Histogram(bounds))

    def _keep(self, name: str, help: str, labels: dict[str, str], metric: M) -> M:
        text = "{" + ",".join(f'{k}="{_escape(v)}"' for k, v in sorted(labels.items())) + "}" if labels else ""
        kept = self._metrics.setdefault(name, (help, {}))[1].setdefault(text, metric)
        assert isinstance(kept, type(metric)), f"{name} is a {kept.kind} already"
        return kept

    def values(self) -> dict[str, float]:
        """Plain numbers: counters and gauges by name, histograms as _count and _sum. Without the common `verbatim_` prefix."""
        out: dict[str, float] = {}
        for name, (_, series) in self._metrics.items():
            short = name.removeprefix("verbatim_")
            for labels, metric in series.items():
                if isinstance(metric, Histogram):
                    out[f"{short}_count{labels}"], out[f"{short}_sum{labels}"] = metric.count, metric.total
                else:
                    out[short + labels] = int(metric.value) if metric.value == int(metric.value) else metric.value
        return out

    def render(self) -> str:
        lines: list[str] = []
        for name, (help, series) in self._metrics.items():
            kind = next(iter(series.values())).kind
            lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
            for labels, metric in series.items():
                lines += metric.samples(name, labels)
        return "\n".join(lines) + "\n"


def _show(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class EngineMetrics:
    """Everything the engine counts. Names follow Prometheus: base units, _total for counters."""

    def __init__(self) -> None:
        r = self.registry = Registry()
        self.requests = r.counter("verbatim_requests_total", "requests accepted")
        self.refused = r.counter("verbatim_requests_refused_total", "requests refused because the queue was full")
        self.finished = {
            reason: r.counter(
                "verbatim_requests_finished_total", "requests ended, by the reason of their first choice", reason=reason
            )
            for reason in ("stop", "length", "loop", "cancel", "error")
        }
        self.prompt_tokens = r.counter("verbatim_prompt_tokens_total", "prompt tokens of requests that ended")
        self.output_tokens = r.counter("verbatim_output_tokens_total", "tokens written by requests that ended")
        self.cached_tokens = r.counter("verbatim_cached_tokens_total", "prompt tokens taken from the prefix cache")
        self.drafted = r.counter("verbatim_drafted_tokens_total", "tokens guessed by speculation")
        self.accepted_drafts = r.counter("verbatim_accepted_tokens_total", "guesses that came true")
        self.accepted_length = r.gauge(
            "verbatim_mean_accepted_length", "tokens that a step gave a text on average so far; 1 without speculation"
        )
        self.saved = r.gauge("verbatim_speculation_saved_seconds", "time saved by guesses so far, estimated; below zero: lost")
        self.steps = r.counter("verbatim_steps_total", "steps of the engine")
        self.rows = r.counter("verbatim_computed_tokens_total", "tokens that went through the model")
        self.step_seconds = r.histogram("verbatim_step_seconds", "a whole step, bookkeeping included")
        self.plan_seconds = r.histogram("verbatim_plan_seconds", "planning a step", (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2))
        self.compute_seconds = r.histogram("verbatim_compute_seconds", "the backend's part of a step")
        self.step_rows = r.histogram("verbatim_step_tokens", "tokens computed in one step", ROWS)
        self.first_token = r.histogram("verbatim_first_token_seconds", "from arrival to the first token")
        self.between = r.histogram("verbatim_between_tokens_seconds", "mean time between the tokens of a request")
        self.queued = r.histogram("verbatim_queue_seconds", "from arrival to the first step")
        self.total = r.histogram("verbatim_request_seconds", "from arrival to the end")
        self._gauges: dict[str, Gauge] = {}

    def accepted(self, params: SamplingParams) -> None:
        self.requests.add()

    def step(self, plan: StepPlan, began: float, planned: float, executed: float) -> None:
        rows = plan.rows
        self.steps.value += 1
        self.rows.value += rows
        self.step_rows.observe(rows)
        self.plan_seconds.observe(planned - began)
        self.compute_seconds.observe(executed - planned)
        self.step_seconds.observe(time.perf_counter() - began)

    def completed(self, completion: Completion) -> None:
        usage, times = completion.usage, completion.timings
        self.finished[completion.finish.reason].add()
        self.prompt_tokens.add(usage.prompt_tokens)
        self.output_tokens.add(usage.output_tokens)
        self.cached_tokens.add(usage.cached_tokens)
        self.drafted.add(usage.drafted_tokens)
        self.accepted_drafts.add(usage.accepted_tokens)
        if self.output_tokens.value:
            written = Usage(output_tokens=int(self.output_tokens.value), accepted_tokens=int(self.accepted_drafts.value))
            self.accepted_length.set(written.mean_accepted_length)
        self.saved.set(self.saved.value + times.saved)
        self.queued.observe(times.queued)
        self.total.observe(times.total)
        if usage.output_tokens:
            self.first_token.observe(times.first_token)
            steps = max(len(choice.token_ids) for choice in completion.choices) - 1
            if steps > 0:
                self.between.observe((times.total - times.first_token) / steps)

    def gauges(self, **values: float) -> None:
        for name, value in values.items():
            if name not in self._gauges:
                make = self.registry.tally if name in _TALLIES else self.registry.gauge
                self._gauges[name] = make(f"verbatim_{name}", (_GAUGES | _TALLIES)[name])
            self._gauges[name].set(value)


_GAUGES = {
    "requests": "requests in the engine",
    "running": "sequences that run",
    "waiting": "sequences that wait",
    "blocks_total": "cache blocks, all groups",
    "blocks_used": "cache blocks that sequences refer to",
    "blocks_cached": "cache blocks kept for reuse",
}
_TALLIES = {
    "preemptions": "sequences that gave up their blocks since the start",
    "evictions": "cached blocks given to others since the start",
    "prefix_queries": "prompt tokens looked up in the prefix cache since the start",
    "prefix_hits": "prompt tokens found there since the start",
}
