"""Threads for work that callers wait for, with the callers in turns: whoever asks for much delays himself.

    workers = Workers(4, "verbatim-compile")
    future = workers.submit("tenant", work)

A caller's pieces begin in order; of several callers, each has one begun in turn. One caller never has all threads: another, who comes while long ones
run, finds one free.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_Piece = tuple[Callable[[], Any], Future[Any]]


class Workers:
    def __init__(self, threads: int, name: str) -> None:
        self._most = max(1, threads - 1)  # of one caller at once
        self._queues: OrderedDict[str, deque[_Piece]] = OrderedDict()  # the first caller is next
        self._running: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, caller: str, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                future.cancel()
            else:
                self._queues.setdefault(caller, deque()).append((work, future))
                self._changed.notify()
        return future

    def close(self) -> None:
        """What has not begun is cancelled, what has is waited for: a thread that Python's end finds in foreign code takes the process down with
        it. So work that is submitted here must end by itself. Not from one of these threads."""
        with self._changed:
            self._closed = True
            for queue in self._queues.values():
                for _, future in queue:
                    future.cancel()
            self._queues.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            caller, (work, future) = taken
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del work, future, taken  # an answer's memory does not wait here for the next piece
            with self._changed:
                self._running[caller] -= 1
                if not self._running[caller]:
                    del self._running[caller]
                self._changed.notify()

    def _take(self) -> tuple[str, _Piece] | None:
        with self._changed:
            while not self._closed:
                for caller, queue in self._queues.items():
                    if self._running[caller] < self._most:
                        piece = queue.popleft()
                        self._queues.move_to_end(caller)
                        if not queue:
                            del self._queues[caller]
                        self._running[caller] += 1
                        return caller, piece
                self._changed.wait()
            return None
