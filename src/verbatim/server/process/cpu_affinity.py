"""CPU affinity of the engine: pins each compute thread to a core of its own, where that helps.

The threads of a step meet at a barrier some hundred times per step, so the slowest one sets the
speed. If there are as many threads as cores and the HTTP process wakes up beside them, the kernel
sometimes puts two threads on one core and leaves another core idle until its next rebalance, which
takes milliseconds. Measured on two cores with 16 streams, alternating: 768 tokens per second with
pinned threads, 601 without (docs/serving.md).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verbatim.engine.calls.async_engine import AsyncEngine


def native_threads() -> set[int]:
    """Ids of the threads of this process that Python did not start. Empty without /proc."""
    try:
        threads = {int(name) for name in os.listdir("/proc/self/task")}
    except OSError:
        return set()
    return threads - {thread.native_id for thread in threading.enumerate()}


def pin_threads(engine: AsyncEngine, before: set[int]) -> bool:
    """Pin the step thread and the kernel thread pool to one core each. The pool is native_threads()
    minus `before`, the threads that existed before the model was loaded. Returns False, and leaves
    the placement to the kernel, unless there are exactly as many threads as usable cores."""
    if sys.platform != "linux" or engine.step_thread is None:
        return False
    cores = sorted(os.sched_getaffinity(0))
    threads = [engine.step_thread, *sorted(native_threads() - before)]
    if not 2 <= len(threads) == len(cores) == engine.loaded.backend.info.threads:
        return False
    with contextlib.suppress(OSError):
        for thread, core in zip(threads, cores, strict=True):
            os.sched_setaffinity(thread, {core})
        return True
    return False
