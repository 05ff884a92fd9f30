"""Structured output around a step: resume paused sequences before the plan, add masks after it.

In: the running requests and a StepPlan. Out: the plan with one mask per draw of each structured
sequence. A sequence pauses while another thread compiles its private matcher or checks its document
under a schema: a step waits MASK_SECONDS for new work of this kind, all sequences together, and
then runs without them. When a mask is ready decides when its token is drawn, never which. A grammar
error ends its own request and never the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any

from verbatim.base.errors import VerbatimError
from verbatim.base.records import Finish, SeqStep, StepPlan
from verbatim.engine.running_request import RunningRequest

# Seconds that a step waits for matchers when no sequence can run. New requests join between steps,
# so this bounds the delay of their first step.
WAIT_SECONDS = 0.05
# Seconds that a step waits for masks that other threads began since the step before. Most are ready
# within one, so their sequences lose no step.
MASK_SECONDS = 0.005


class GrammarSteps:
    """`requests` and `by_seq` are the engine's own tables; `flush` queues a request's outputs."""

    def __init__(
        self,
        requests: Mapping[str, RunningRequest],
        by_seq: Mapping[int, RunningRequest],
        flush: Callable[[RunningRequest], None],
    ) -> None:
        self._requests = requests
        self._by_seq = by_seq
        self._flush = flush
        self._structured = 0  # running requests with a grammar; 0 makes every method free
        self._waited: set[int] = set()  # paused sequences that a step has waited for

    def add(self, running: RunningRequest) -> None:
        self._structured += bool(running.matchers)

    def remove(self, running: RunningRequest) -> None:
        self._structured -= bool(running.matchers)

    def resume(self) -> None:
        """Resume, or end, the paused sequences whose matchers are ready."""
        if not self._structured:
            return
        paused = [r for r in self._requests.values() if r.paused]
        if new := [r.matchers[i].pending for r in paused for i in r.paused - self._waited]:
            wait(new, MASK_SECONDS)
        for running in paused:
            if running.resume():
                self._flush(running)
        self._waited = {seq_id for running in paused for seq_id in running.paused}

    def wait(self) -> None:
        """Wait for a paused sequence, when no sequence can run."""
        pending: list[Future[Any]] = [
            running.matchers[seq_id].pending
            for running in self._requests.values()
            for seq_id in running.paused
        ]
        assert pending or not self._requests, "no remaining request can advance"
        wait(pending, WAIT_SECONDS, FIRST_COMPLETED)

    def add_masks(self, plan: StepPlan) -> StepPlan:
        """Add the masks of all draws. Drops the sequences of requests whose grammar fails."""
        if not self._structured:
            return plan
        steps: list[SeqStep] = []
        for step in plan.sequences:
            running = self._by_seq.get(step.seq_id)
            if running is None:  # another choice of the same request has just failed
                continue
            matcher = running.matchers.get(step.seq_id)
            if matcher is None or not step.draws or step.draw is None:
                steps.append(step)
                continue
            drafts = step.tokens[len(step.tokens) - step.draws + 1 :]
            try:
                masks = tuple(matcher.masks_along(drafts))
            except VerbatimError as error:
                running.error = error
                running.end(Finish("error", error.message))
                self._flush(running)
                continue
            steps.append(step._replace(draw=replace(step.draw, masks=masks)))
        return plan._replace(sequences=tuple(step for step in steps if step.seq_id in self._by_seq))
