"""Figures of a simulated run, and the smallest fleet that meets a target.

In: the Served requests of a Fleet. Out: a FleetReport. Percentiles are over requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from verbatim.base.errors import ParameterError
from verbatim.scale.simulate.costs import ReplicaCosts
from verbatim.scale.simulate.fleet import Fleet, Served
from verbatim.scale.simulate.traffic import Arrival

MOST_REPLICAS = 1 << 14


@dataclass(frozen=True, slots=True)
class Target:
    """Largest latencies, in ms, of `percentile` per cent of the requests. None: no limit."""

    first: float | None = None
    between: float | None = None
    percentile: float = 99.0


@dataclass(frozen=True, slots=True)
class FleetReport:
    replicas: int
    requests: int
    refused: int
    seconds: float  # from the first arrival to the last token
    output_rate: float  # tokens per second
    request_rate: float  # requests per second
    first_ms: tuple[float, float]  # p50, p99
    between_ms: tuple[float, float]
    busy: float  # share of the time that the replicas compute
    prefix_hits: float  # share of the prompt tokens found in a prefix cache
    preemptions: int
    wall: float  # seconds that the simulation took

    def meets(self, target: Target, served: Sequence[Served]) -> bool:
        done = [s for s in served if not s.refused]
        limits = (
            (target.first, [s.wait for s in done]),
            (target.between, [b for s in done if (b := s.between) is not None]),
        )
        return all(
            limit is None or 1000 * percentile(values, target.percentile) <= limit
            for limit, values in limits
        )


def percentile(values: Sequence[float], p: float) -> float:
    """The value that p per cent of the values do not exceed (nearest rank); 0 of none.

    >>> percentile([3, 1, 2, 4], 50), percentile([3, 1, 2, 4], 99)
    (2, 4)
    """
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[min(max(-int(-p * len(ordered) // 100), 1), len(ordered)) - 1]


def simulate(
    costs: ReplicaCosts, replicas: int, arrivals: Iterable[Arrival], *, prefix_cache: bool = True
) -> tuple[FleetReport, list[Served]]:
    began = time.perf_counter()
    fleet = Fleet(costs, replicas, prefix_cache=prefix_cache)
    served = fleet.run(arrivals)
    done = [s for s in served if not s.refused]
    start = served[0].arrival.at if served else 0.0
    seconds = max((s.last for s in done), default=start) - start
    schedulers = [replica.scheduler for replica in fleet.replicas]
    queries = sum(s.prefix_queries for s in schedulers)
    per_second = 1 / seconds if seconds else 0.0
    waits, between = [s.wait for s in done], [b for s in done if (b := s.between) is not None]
    report = FleetReport(
        replicas,
        len(served),
        len(served) - len(done),
        seconds,
        sum(s.arrival.output for s in done) * per_second,
        len(done) * per_second,
        (1000 * percentile(waits, 50), 1000 * percentile(waits, 99)),
        (1000 * percentile(between, 50), 1000 * percentile(between, 99)),
        sum(r.busy for r in fleet.replicas) * per_second / replicas,
        sum(s.prefix_hits for s in schedulers) / queries if queries else 0.0,
        sum(s.preemptions for s in schedulers),
        time.perf_counter() - began,
    )
    return report, served


def smallest_fleet(
    costs: ReplicaCosts,
    arrivals: Callable[[], Iterable[Arrival]],
    target: Target,
    *,
    prefix_cache: bool = True,
    note: Callable[[FleetReport], None] = lambda report: None,
) -> FleetReport:
    """The fewest replicas that meet the target: doubling, then bisection."""

    def attempt(replicas: int) -> tuple[FleetReport, bool]:
        report, served = simulate(costs, replicas, arrivals(), prefix_cache=prefix_cache)
        note(report)
        return report, report.meets(target, served)

    high = 1
    best, met = attempt(high)
    while not met:
        high *= 2
        if high > MOST_REPLICAS:
            raise ParameterError(
                "ttft_ms", f"{MOST_REPLICAS} replicas do not meet it: one request alone is too slow"
            )
        best, met = attempt(high)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        report, met = attempt(middle)
        if met:
            best, high = report, middle
        else:
            low = middle
    return best
