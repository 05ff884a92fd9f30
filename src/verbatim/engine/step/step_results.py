"""Hand the results of a step to its requests, before the scheduler commits its tokens.

In: a plan and its StepResult. Out: start times, prompt log-probabilities and hidden states of the
requests. A request with a value that is not finite ends here, so the scheduler commits and
publishes nothing of it; a drawn token that is not finite ends its sequence in commit(), which knows
the drafts that were accepted before it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from verbatim.base.records import BROKEN, StepPlan, StepResult
from verbatim.engine.running_request import RunningRequest
from verbatim.schedule.no_token import not_finite


def store_results(
    plan: StepPlan, result: StepResult, requests: Mapping[int, RunningRequest], started: float
) -> list[RunningRequest]:
    """`requests`: by sequence id. `started`: time of the step. Returns the requests that ended."""
    failed = []
    for step, done in zip(plan.sequences, result.sequences, strict=True):
        running = requests[step.seq_id]
        if running.started_at is None:
            running.started_at = started
        broken: int | None = None
        for position, scored in enumerate(done.scored, step.start + 1):
            if scored.token == BROKEN:
                broken = position
                break
            running.scored[position] = scored
        if done.hidden is not None:
            rows = np.isfinite(done.hidden).all(1)
            if rows.all():
                running.hidden.add(step.start, done.hidden)
            else:
                broken = step.start + int(rows.argmin())
        if broken is not None and running not in failed:
            running.end(not_finite(broken, running.request.params.adapter), publish=False)
            failed.append(running)
    return failed
