"""What the engine does when a step runs out of device memory.

In: a scheduler whose sequences are all preempted, because a step raised a DeviceMemoryError. Out:
the same scheduler with half as many tokens per step. Chunks do not change tokens, so neither does
this.
"""

from __future__ import annotations

import logging

from verbatim.base.errors import DeviceMemoryError
from verbatim.schedule.scheduler import Scheduler

log = logging.getLogger("verbatim.engine")


def smaller_steps(scheduler: Scheduler, error: DeviceMemoryError) -> bool:
    """Halve the tokens per step. False: steps cannot be smaller, so the requests must end."""
    least = scheduler.max_running  # every running sequence fits every step
    if scheduler.step_tokens <= least:
        log.error("%s; all requests end", error.message)
        return False
    scheduler.step_tokens = max(least, scheduler.step_tokens // 2)
    log.warning("%s; steps have at most %d tokens now", error.message, scheduler.step_tokens)
    return True
