"""What the engine does when a step raises an exception, or ends a request with an error.

PreemptOnError preempts every sequence. After a DeviceMemoryError, smaller_steps halves the tokens
per step, and the engine continues; chunks do not change tokens, so neither does this. Values that
are not finite numbers end their own request; the other requests of the step keep their tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from verbatim.base.errors import NOT_FINITE, BackendError, DeviceMemoryError
from verbatim.base.records import Completion
from verbatim.schedule.scheduler import Scheduler

log = logging.getLogger("verbatim.engine")


class PreemptOnError:
    """Context manager around a step: if it raises, Ctrl-C included, the KV cache may be partly
    written, so every sequence is preempted. One object for all steps: a generator would cost 5 us
    per step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self._scheduler.preempt_all()


def smaller_steps(scheduler: Scheduler, error: DeviceMemoryError) -> bool:
    """Halve the tokens per step. False: steps cannot be smaller, so the requests must end."""
    least = scheduler.max_running  # every running sequence fits every step
    if scheduler.step_tokens <= least:
        log.error("%s; all requests end", error.message)
        return False
    scheduler.step_tokens = max(least, scheduler.step_tokens // 2)
    log.warning("%s; steps have at most %d tokens now", error.message, scheduler.step_tokens)
    return True


def log_not_finite(model: str, completion: Completion) -> None:
    """Log a request that ended because the model's values were not finite."""
    for detail in {choice.finish.detail for choice in completion.choices}:
        if detail.startswith(NOT_FINITE):
            log.error("%s: request %s: %s", model, completion.request_id, detail)


def raise_error(completions: Iterable[Completion]) -> None:
    """Raise the error of the first request that ended with one: a score, a diagnosis or a
    measurement of such a request means nothing."""
    for choice in [choice for completion in completions for choice in completion.choices]:
        if choice.finish.reason == "error":
            raise BackendError(choice.finish.detail)
