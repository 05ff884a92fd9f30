"""The HTTP side's numbers in the Prometheus text format; the engine's own text is appended as it came with the last heartbeat.

Histograms have fixed bounds; nothing is kept per request, so memory does not grow with traffic.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verbatim.server.state import State

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def lines(self, name: str, text: str) -> list[str]:
        out, below = [f"# HELP {name} {text}", f"# TYPE {name} histogram"], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            out.append(f'{name}_bucket{{le="{bound}"}} {below}')
        return [*out, f"{name}_sum {self.total:.6f}", f"{name}_count {below}"]


def _exact(value: float) -> str:
    """Counters are compared to the last unit: nothing is rounded to six digits."""
    return str(int(value)) if value == int(value) else repr(value)


class Metrics:
    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()  # (route, status)
        self.first_token = Histogram()
        self.between_tokens = Histogram()
        self.duration = Histogram()

    def text(self, state: State) -> str:
        ledger, out = state.supervisor.ledger, []

        def one(name: str, kind: str, help_text: str, values: list[tuple[str, float]]) -> None:
            out.extend([f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"])
            out.extend(f"{name}{labels} {_exact(value)}" for labels, value in values)

        one("verbatim_http_answers_total", "counter", "HTTP answers by route and status",
            [(f'{{route="{route}",status="{status}"}}', n) for (route, status), n in sorted(self.answers.items())])  # fmt: skip
        one("verbatim_http_open_requests", "gauge", "requests admitted and not yet answered", [("", state.open)])
        one("verbatim_requests_opened_total", "counter", "requests sent to the engine", [("", ledger.opened)])
        one("verbatim_requests_open", "gauge", "requests in the engine", [("", ledger.running)])
        one("verbatim_requests_ended_total", "counter", "requests by how they ended",
            [(f'{{state="{s}"}}', n) for s, n in sorted(ledger.states.items())])  # fmt: skip
        one("verbatim_usage_tokens_total", "counter", "tokens reported to clients",
            [(f'{{kind="{kind}"}}', n) for kind, n in sorted(ledger.usage.items())])  # fmt: skip
        one(
            "verbatim_engine_restarts_total", "counter", "times the engine was started again", [("", state.supervisor.restarts)]
        )
        one(
            "verbatim_engine_reports_total",
            "counter",
            "heartbeats that brought the engine's metrics",
            [("", state.supervisor.reports)],
        )
        one("verbatim_engine_up", "gauge", "1 when the engine is ready", [("", float(state.supervisor.ready.is_set()))])
        one("verbatim_http_tasks", "gauge", "asyncio tasks of the HTTP process", [("", len(asyncio.all_tasks()))])
        out += self.first_token.lines("verbatim_http_first_token_seconds", "arrival to first token, at the HTTP side")
        out += self.between_tokens.lines(
            "verbatim_http_between_tokens_seconds", "time between pieces of a stream, at the HTTP side"
        )
        out += self.duration.lines("verbatim_http_request_seconds", "arrival to last byte")
        return "\n".join(out) + "\n" + state.supervisor.metrics
