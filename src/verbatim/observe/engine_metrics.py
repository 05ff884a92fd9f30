"""Metrics of the engine and of the server: counters, gauges, histograms, and their Prometheus text.

In: events (a step, a request accepted, a request finished). Out: `values()` returns plain numbers,
`render()` the Prometheus text format, version 0.0.4. There is no global registry: each process part
has its own. One thread counts; another thread may render at the same time.

prometheus-client is not used: docs/adr/0025-our-own-metrics-registry.md compares the two.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import TypeVar

from verbatim.base.errors import NOT_FINITE
from verbatim.base.records import Completion, StepPlan, Usage

# Bucket bounds: seconds, seconds of planning, rows.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PLAN_SECONDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class Number:
    """A counter or a gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, amount: float = 1) -> None:
        self.value += amount

    def samples(self, name: str, labels: str) -> list[str]:
        return [f"{name}{labels} {show_value(self.value)}"]


class Histogram:
    """Observations per bucket; the upper bound `le` is inclusive, as in Prometheus."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def samples(self, name: str, labels: str) -> list[str]:
        inner = labels[1:-1] + "," if labels else ""
        out, below = [], 0
        bounds = (*map(show_value, self.bounds), "+Inf")
        for bound, count in zip(bounds, list(self.counts), strict=True):
            below += count
            out.append(f'{name}_bucket{{{inner}le="{bound}"}} {below}')
        out.append(f"{name}_sum{labels} {show_value(self.total)}")
        return [*out, f"{name}_count{labels} {below}"]


M = TypeVar("M", Number, Histogram)


class Registry:
    """Metrics by name and labels. A number whose name ends in _total is a counter, any other a
    gauge."""

    def __init__(self) -> None:
        # name -> (help, labels as text -> metric)
        self._metrics: dict[str, tuple[str, dict[str, Number | Histogram]]] = {}

    def number(self, name: str, help: str, **labels: str) -> Number:
        return self._keep(name, help, labels, Number())

    def histogram(self, name: str, help: str, bounds: Sequence[float] = SECONDS) -> Histogram:
        return self._keep(name, help, {}, Histogram(bounds))

    def _keep(self, name: str, help: str, labels: dict[str, str], metric: M) -> M:
        inner = ",".join(f'{k}="{escape(v)}"' for k, v in sorted(labels.items()))
        series = self._metrics.setdefault(name, (help, {}))[1]
        kept = series.setdefault(f"{{{inner}}}" if inner else "", metric)
        assert isinstance(kept, type(metric)), f"{name} is a {type(kept).__name__} already"
        return kept

    def values(self) -> dict[str, float]:
        """Plain numbers by name, without the prefix `verbatim_`; histograms as _count and _sum."""
        out: dict[str, float] = {}
        for name, (_, series) in self._metrics.items():
            short = name.removeprefix("verbatim_")
            for labels, metric in series.items():
                if isinstance(metric, Histogram):
                    out[f"{short}_count{labels}"] = sum(metric.counts)
                    out[f"{short}_sum{labels}"] = metric.total
                else:
                    value = metric.value
                    out[short + labels] = int(value) if value == int(value) else value
        return out

    def render(self) -> str:
        lines: list[str] = []
        for name, (help, series) in self._metrics.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            if isinstance(next(iter(series.values())), Histogram):
                kind = "histogram"
            lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
            for labels, metric in series.items():
                lines += metric.samples(name, labels)
        return "\n".join(lines) + "\n"


def show_value(value: float) -> str:
    """The value as text. Nothing is rounded: tests compare counters to the last unit."""
    return str(int(value)) if value == int(value) else repr(value)


def escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class EngineMetrics:
    """All metrics of the engine, in base units. Tokens are counted when their request finishes."""

    def __init__(self) -> None:
        r = self.registry = Registry()

        def number(name: str, help: str, **labels: str) -> Number:
            return r.number(f"verbatim_{name}", help, **labels)

        def histogram(name: str, help: str, bounds: Sequence[float] = SECONDS) -> Histogram:
            return r.histogram(f"verbatim_{name}_seconds", help, bounds)

        self.requests = number("requests_total", "requests accepted")
        self.refused = number(
            "requests_refused_total", "requests refused because the queue was full"
        )
        self.finished = {
            reason: number(
                "requests_finished_total",
                "requests ended, by the reason of their first choice",
                reason=reason,
            )
            for reason in ("stop", "length", "loop", "cancel", "error")
        }
        self.not_finite = number(
            "requests_not_finite_total",
            "requests ended with an error because the model computed NaN or infinity",
        )
        self.prompt_tokens = number("prompt_tokens_total", "prompt tokens of requests that ended")
        self.output_tokens = number("output_tokens_total", "output tokens of requests that ended")
        self.cached_tokens = number(
            "cached_tokens_total", "prompt tokens found in the prefix cache, of requests that ended"
        )
        self.drafted = number("drafted_tokens_total", "tokens drafted by speculation")
        self.accepted_drafts = number("accepted_tokens_total", "drafted tokens accepted")
        self.accepted_length = number(
            "mean_accepted_length", "mean tokens per sequence and step; 1 without speculation"
        )
        self.saved = number(
            "speculation_saved_seconds", "estimated time saved by speculation; below zero: lost"
        )
        self.steps = number("steps_total", "steps of the engine")
        self.rows = number("computed_tokens_total", "tokens computed by the model")
        self.step_seconds = histogram("step", "time of a whole step")
        self.plan_seconds = histogram("plan", "time to plan a step", PLAN_SECONDS)
        self.compute_seconds = histogram("compute", "time of a step in the backend")
        self.step_rows = r.histogram("verbatim_step_tokens", "tokens computed in one step", ROWS)
        self.first_token = histogram("first_token", "from arrival to the first token")
        self.between = histogram("between_tokens", "mean time between the tokens of a request")
        self.queued = histogram("queue", "from arrival to the first step")
        self.total = histogram("request", "from arrival to the end")
        self._sampled = {name: r.number(f"verbatim_{name}", help) for name, help in SAMPLED.items()}

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
        details = [choice.finish.detail for choice in completion.choices]
        self.not_finite.add(any(detail.startswith(NOT_FINITE) for detail in details))
        self.prompt_tokens.add(usage.prompt_tokens)
        self.output_tokens.add(usage.output_tokens)
        self.cached_tokens.add(usage.cached_tokens)
        self.drafted.add(usage.drafted_tokens)
        self.accepted_drafts.add(usage.accepted_tokens)
        if self.output_tokens.value:
            written = Usage(
                output_tokens=int(self.output_tokens.value),
                accepted_tokens=int(self.accepted_drafts.value),
            )
            self.accepted_length.value = written.mean_accepted_length
        self.saved.add(times.saved)
        self.queued.observe(times.queued)
        self.total.observe(times.total)
        if usage.output_tokens:
            self.first_token.observe(times.first_token)
            steps = max(len(choice.token_ids) for choice in completion.choices) - 1
            if steps > 0:
                self.between.observe((times.total - times.first_token) / steps)

    def sample(self, **values: float) -> None:
        """Set the values that the scheduler and the block pools count themselves."""
        for name, value in values.items():
            self._sampled[name].value = value


SAMPLED = {
    "requests": "requests in the engine",
    "requests_running": "requests with a running sequence (vllm:num_requests_running)",
    "running": "running sequences",
    "waiting": "waiting sequences",
    "blocks": "KV cache blocks, all groups",
    "blocks_used": "KV cache blocks that sequences use",
    "blocks_cached": "KV cache blocks kept for reuse",
    "kv_cache_usage_ratio": (
        "share of the KV cache blocks that sequences use, 0 to 1 (vllm:kv_cache_usage_perc)"
    ),
    "preemptions_total": "sequences preempted: their KV cache blocks were released",
    "evictions_total": "cached blocks evicted",
    "prefix_queries_total": "prompt tokens looked up in the prefix cache",
    "prefix_hits_total": "prompt tokens found in the prefix cache",
    "disk_cache_bytes": "bytes in --cache-dir",
    "disk_cache_loaded_total": "KV cache blocks loaded from --cache-dir",
    "disk_cache_stored_total": "KV cache blocks stored in --cache-dir",
    "disk_cache_dropped_total": "KV cache blocks not stored: the disk is too slow or was cleared",
    "disk_cache_damaged_total": "stored KV cache blocks rejected: damaged or of the wrong size",
}
