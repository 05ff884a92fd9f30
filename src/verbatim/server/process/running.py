"""One running request in the HTTP process: deltas arrive from the engine process, and a handler
takes them when it can write to its client.

Each request has one buffer for deltas that the handler has not taken yet. A request whose buffer
exceeds `max_stream_bytes` is aborted, so that a slow client cannot use more memory than that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from verbatim.base.json_io import JsonObject
from verbatim.base.records import Usage
from verbatim.server.problem import Problem
from verbatim.server.process.messages import Generated, Result, WireDelta

log = logging.getLogger("verbatim.server")
DELTA_COST = 64  # approximate bytes of a delta without its text


def _explain_bytes(record: JsonObject) -> int:
    """Approximate bytes of an explanation: its candidates, and its row and mask if present."""
    return 512 + 160 * len(record["top"]) + len(record["row"] or "") + len(record["mask"] or "")


class Signal:
    """An event that wakes one handler, which may wait for several requests (a list of prompts). If
    set() comes before wait(), that wait() returns at once."""

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
    """A handler calls `take()` until `ended`, and `close()` when the client disconnects. close()
    may be called twice, and after the end."""

    def __init__(
        self,
        request_id: str,
        tenant: str,
        abort: Callable[[Running], None],
        max_bytes: int,
        signal: Signal,
    ) -> None:
        self.id = request_id
        self.tenant = tenant
        self.text = ""  # the echoed prompt
        self.prompt_tokens = 0  # known once the engine has accepted the request
        self.done: Result | None = None
        self.problem: Problem | None = None
        self.accepted = False
        self.closed = False  # the client has disconnected
        self.on_usage: Callable[[Usage], None] | None = None
        self.on_fail: Callable[[], None] | None = None
        # Replaces our parameter names in a problem with those of the client's protocol.
        self.localize: Callable[[Problem], Problem] | None = None
        self._abort = abort
        self._deltas: list[WireDelta] = []
        self._bytes = 0
        self._max_bytes = max_bytes
        self._signal = signal

    # ------------------------------------------------------------------- called by the supervisor

    def accept(self, text: str, prompt_tokens: int) -> None:
        self.accepted, self.text, self.prompt_tokens = True, text, prompt_tokens
        self.wake()

    def push(self, delta: WireDelta) -> None:
        if self.closed or self.problem is not None:
            return
        self._deltas.append(delta)
        self._bytes += DELTA_COST + len(delta.text) * 4
        if delta.logprobs or delta.explain:
            self._bytes += sum(64 + 48 * len(item.top or ()) for item in delta.logprobs)
            self._bytes += sum(map(_explain_bytes, delta.explain))
        if self._bytes > self._max_bytes:
            message = "the stream was not read fast enough and its buffer is full"
            self.fail(Problem("slow_reader", message))
            self._abort(self)
        else:
            self.wake()

    def finish(self, done: Result) -> None:
        if self.on_usage is not None and isinstance(done, Generated):
            self.on_usage(done.usage)  # also of a request that failed or was abandoned
        if self.problem is None:
            self.done = done
            self.wake()

    def fail(self, problem: Problem) -> None:
        """The handler gets the deltas so far, then the problem. Only the first problem counts."""
        if self.problem is None and self.done is None:
            self.problem = problem if self.localize is None else self.localize(problem)
            self.wake()
            if self.on_fail is not None:
                try:
                    self.on_fail()
                except Exception:  # must not end the supervisor, nor keep it from failing the rest
                    log.exception("request %s: its failure could not be handled", self.id)

    def wake(self) -> None:
        self._signal.set()

    # ---------------------------------------------------------------------- called by the handler

    @property
    def ended(self) -> bool:
        return self.done is not None or self.problem is not None

    @property
    def generated(self) -> Generated | None:
        """The result, if this is a generation that has ended without a problem."""
        return self.done if isinstance(self.done, Generated) else None

    async def wait_accepted(self) -> None:
        """Wait until the engine accepts the request. Raises the Problem if it fails, while an
        HTTP status can still be sent."""
        while not self.accepted and not self.ended:
            await self._signal.wait()
        if self.problem is not None and not self._deltas:
            raise self.problem

    def take(self) -> list[WireDelta]:
        """All deltas since the last call."""
        deltas, self._deltas, self._bytes = self._deltas, [], 0
        return deltas

    async def result(self) -> Result:
        while not self.ended:
            await self._signal.wait()
        if self.done is None:
            assert self.problem is not None
            raise self.problem
        return self.done

    def close(self) -> None:
        """The client has disconnected: drop the deltas and abort the request, once."""
        if not self.closed:
            self.closed = True
            self._deltas = []
            self.wake()
            if not self.ended:
                self._abort(self)
