"""FairThreadPool: round robin over callers, first in, first out within one caller.

    pool = FairThreadPool(4, "verbatim-compile")
    future = pool.submit("tenant", work)

One caller never occupies all threads (unless there is only one), so another caller finds a free
thread while long work items of the first run.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from typing import TypeVar

from verbatim.schedule.fair_queue import FairQueue, Waiting

T = TypeVar("T")


@cache
def mask_threads() -> FairThreadPool:
    """The threads that check documents under schemas beside the steps, one per process. A tenant
    uses one of two, so its slow masks delay its own sequences only."""
    pool = FairThreadPool(2, "verbatim-masks")
    atexit.register(pool.close)
    return pool


class FairThreadPool:
    def __init__(self, threads: int, name: str) -> None:
        # Each work item claims one of `threads` tokens; one caller may claim all but one of them.
        self._queue = FairQueue(slots=threads, tokens=threads, share=(threads - 1) / threads)
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, caller: str, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                future.cancel()
            else:
                self._queue.add((work, future), tenant=caller, claim=1)
                self._changed.notify()
        return future

    def close(self) -> None:
        """Cancel queued work items and wait for running ones: a thread that is still in native code
        when Python exits crashes the process. So every work item must end by itself. Must not be
        called from a thread of this pool."""
        with self._changed:
            self._closed = True
            for entry in self._queue.clear():
                entry.item[1].cancel()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (entry := self._take()) is not None:
            work, future = entry.item
            entry.item = None
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del work, future  # release the result's memory before waiting for the next work item
            with self._changed:
                self._queue.release(entry)
                self._changed.notify()

    def _take(self) -> Waiting | None:
        with self._changed:
            entry: Waiting | None = None
            while not self._closed and (entry := self._queue.take()) is None:
                self._changed.wait()
            return entry
