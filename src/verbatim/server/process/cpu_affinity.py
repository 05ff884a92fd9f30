"""Which processor a thread of the engine runs on. In: the threads that came with the model. Out: each on a processor of its own, where that helps.

All threads of a step wait for the slowest of them, some hundred times a step. Where they are as many as there are processors, and HTTP wakes up
beside them, the kernel now and then leaves two on one processor and another one idle until its next look, which takes milliseconds. Measured
on two processors with 16 streams, in turns: 768 tokens/s with places, 601 without (docs/serving.md).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verbatim.engine.async_engine import AsyncEngine


def native_threads() -> set[int]:
    """Of this process, those that Python did not start. Empty where there is no /proc."""
    try:
        every = {int(name) for name in os.listdir("/proc/self/task")}
    except OSError:
        return set()
    return every - {thread.native_id for thread in threading.enumerate()}


def give_places(engine: AsyncEngine, before: set[int]) -> bool:
    """`before`: native_threads() before the model was opened; what came since is the team. False: left to the kernel, which knows better
    when there is a processor to spare."""
    if sys.platform != "linux" or engine.step_thread is None:
        return False
    processors = sorted(os.sched_getaffinity(0))
    team = [engine.step_thread, *sorted(native_threads() - before)]
    if (
        len(team) != engine.parts.backend.info.threads
        or len(team) != len(processors)
        or len(team) < 2
    ):
        return False
    with contextlib.suppress(OSError):
        for thread, processor in zip(team, processors, strict=True):
            os.sched_setaffinity(thread, {processor})
        return True
    return False
