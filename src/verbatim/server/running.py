"""One request as the HTTP side sees it: deltas arrive from the engine process, a handler takes them out when it can write.

Between the two lies one buffer a request. What is not taken is kept and merged by the handler; beyond `max_stream_bytes` the
request is ended, so that memory is bounded by the protocol and not by the client's patience.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from verbatim.server import wire
from verbatim.server.problems import Problem

DELTA_COST = 64  # bytes of bookkeeping a delta costs beside its text


def _weight(record: dict[str, Any]) -> int:
    """Bytes of an explanation, about: its candidates, and its row and mask where it has them."""
    return 512 + 160 * len(record["top"]) + len(record["row"] or "") + len(record["mask"] or "")


class Signal:
    """Wakes one handler, which may wait for several requests at once (a list of prompts). A wake-up while nobody waits is kept."""

    def __init__(self) -> None:
        self._set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        if not self._set:
            assert self._waiter is None, "one handler waits"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._set = False


class Running:
    """`take()` what has come until `ended`; `close()` whenever the client is gone. Closing twice, or after the end, is fine."""

    def __init__(self, request_id: str, tenant: str, abort: Callable[[Running], None], max_bytes: int, signal: Signal) -> None:
        self.id = request_id
        self.tenant = tenant
        self.text = ""  # the echoed prompt
        self.done: wire.Message | None = None
        self.problem: Problem | None = None
        self.accepted = False
        self.closed = False  # nobody reads any more
        self.on_fail: Callable[[], None] | None = None
        self.own: Callable[[Problem], Problem] | None = None  # puts the client's names in the place of the engine's
        self._abort = abort
        self._deltas: list[list[Any]] = []
        self._bytes = 0
        self._max_bytes = max_bytes
        self._signal = signal

    # ----------------------------------------------------------------------------------------------- the engine's side

    def accept(self, text: str) -> None:
        self.accepted, self.text = True, text
        self.wake()

    def push(self, delta: list[Any]) -> None:
        if self.closed or self.problem is not None:
            return
        self._deltas.append(delta)
        self._bytes += DELTA_COST + len(delta[1]) * 4
        if delta[4] or delta[5]:
            self._bytes += sum(64 + 48 * len(lp[3]) for lp in delta[4]) + sum(map(_weight, delta[5]))
        if self._bytes > self._max_bytes:
            self.fail(Problem("slow_reader", "the stream was not read fast enough and its buffer is full"))
            self._abort(self)
        else:
            self.wake()

    def finish(self, done: wire.Message) -> None:
        if self.problem is None:
            self.done = done
            self.wake()

    def fail(self, problem: Problem) -> None:
        """The reader gets what it had, then the problem. The first problem counts."""
        if self.problem is None and self.done is None:
            self.problem = problem if self.own is None else self.own(problem)
            self.wake()
            if self.on_fail is not None:
                self.on_fail()

    def wake(self) -> None:
        self._signal.set()

    # ----------------------------------------------------------------------------------------------- the handler's side

    @property
    def ended(self) -> bool:
        return self.done is not None or self.problem is not None

    async def wait_accepted(self) -> None:
        """Until the engine took the request. Raises the Problem where it refused: there is still time for an HTTP status."""
        while not self.accepted and not self.ended:
            await self._signal.wait()
        if self.problem is not None and not self._deltas:
            raise self.problem

    def take(self) -> list[list[Any]]:
        """All deltas since the last call."""
        deltas, self._deltas, self._bytes = self._deltas, [], 0
        return deltas

    async def result(self) -> wire.Message:
        while not self.ended:
            await self._signal.wait()
        if self.done is None:
            assert self.problem is not None
            raise self.problem
        return self.done

    def close(self) -> None:
        """The client is gone: nothing is kept, and the engine is told once."""
        if not self.closed:
            self.closed = True
            self._deltas = []
            self.wake()
            if not self.ended:
                self._abort(self)
