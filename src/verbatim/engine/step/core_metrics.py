"""CoreMetrics: the metrics of an EngineCore, and the log of its steps while a page watches.

In: an executed plan, its token events and times. Out: counters, histograms and one StepPart per
sequence. Only a watched log gets parts: those of 256 sequences take about 0.1 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from verbatim.base.records import StepPlan, TokenEvent
from verbatim.engine.running_request import RunningRequest
from verbatim.engine.step.drafting import Drafting
from verbatim.observe.engine_metrics import EngineMetrics
from verbatim.observe.step_log import StepLog, StepPart


class CoreMetrics(EngineMetrics):
    """`requests` is the engine's own table, by sequence id."""

    def __init__(self, requests: Mapping[int, RunningRequest], drafting: Drafting) -> None:
        super().__init__()
        self.step_log = StepLog()
        self._requests = requests
        self._drafting = drafting

    def log_step(
        self, plan: StepPlan, events: Sequence[TokenEvent], began: float, executed: float
    ) -> None:
        if self.step_log.watched:
            self.step_log.add(began, executed, self._parts(plan, events))

    def _parts(self, plan: StepPlan, events: Sequence[TokenEvent]) -> tuple[StepPart, ...]:
        """One StepPart per sequence of the plan."""
        drawn: dict[int, int] = {}
        for event in events:
            drawn[event.seq_id] = drawn.get(event.seq_id, 0) + (event.drawn is not None)
        parts = []
        for step in plan.sequences:
            running = self._requests[step.seq_id]
            request = running.request
            parts.append(
                StepPart(
                    request.id,
                    request.tenant,
                    step.start,
                    len(step.tokens),
                    step.draws,
                    drawn.get(step.seq_id, 0),
                    self._drafting.source(step.seq_id, request.params) if step.draws > 1 else "",
                    request.arrival,
                    running.preemptions,
                )
            )
        return tuple(parts)


def prefills(requests: Iterable[RunningRequest]) -> list[tuple[str, int, int]]:
    """(request id, computed tokens, prompt tokens) of the prefills in progress."""
    return [
        (running.request.id, seq.computed, seq.prompt_len)
        for running in requests
        for seq in running.sequences
        if 0 < seq.computed < seq.prompt_len - 1
    ]
