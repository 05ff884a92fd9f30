"""Who reads answers. In: what the engine's thread gives, step by step. Out: an async iterator for one request, or one call for many.

Both are written to from the engine's thread and read on an event loop; neither keeps more than what its reader has not taken yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, Self

import numpy as np

from verbatim.base.errors import UnavailableError, VerbatimError
from verbatim.base.records import Completion, Delta
from verbatim.engine.running_request import HiddenPool, Output


class SupportsAbort(Protocol):
    def abort(self, request_id: str) -> bool: ...


class AsyncStream:
    """One running request: an async iterator of Deltas that ends with the Completion.

    If the engine fails, iteration raises the VerbatimError. `aclose()` (or leaving `async with`) aborts what still runs; the engine
    notices one that nobody holds any more. One reader only."""

    def __init__(self, engine: SupportsAbort, request_id: str) -> None:
        self.request_id = request_id
        self.completion: Completion | None = None
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._pending: dict[int, Delta] = {}  # by choice: what the reader has not taken yet
        self._error: VerbatimError | None = None
        self._over = False  # the Completion has been handed out
        self._hidden = HiddenPool()
        self._waiter: asyncio.Future[None] | None = None
        self._woken = False

    # ------------------------------------------------------------------------------------------------- the engine's side

    def _put(self, outputs: Sequence[Output]) -> None:
        with self._lock:
            for output in outputs:
                if isinstance(output, Completion):
                    self.completion = output
                else:
                    before = self._pending.get(output.index)
                    self._pending[output.index] = output if before is None else join(before, output)
        self._wake()

    def _fail(self, error: VerbatimError) -> None:
        with self._lock:
            if self.completion is None:
                self._error = error
        self._wake()

    def _wake(self) -> None:
        """From the engine's thread: at most one call is on its way to the event loop, however many deltas came."""
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._rouse)
            except RuntimeError:  # the reader's event loop is closed: nobody will read this
                self._engine.abort(self.request_id)

    def _rouse(self) -> None:
        self._woken = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ------------------------------------------------------------------------------------------------- the reader's side

    def __aiter__(self) -> AsyncIterator[Delta | Completion]:
        return self

    async def __anext__(self) -> Delta | Completion:
        while True:
            with self._lock:
                if self._pending:
                    return self._pending.pop(next(iter(self._pending)))
                if self._over:
                    raise StopAsyncIteration
                if self._error is not None:
                    self._over = True
                    raise self._error
                if self.completion is not None:
                    self._over = True
                    return self.completion
            await self._wait()

    async def result(self) -> Completion:
        """Wait for the end, skipping the deltas."""
        async for item in self:
            if isinstance(item, Completion):
                return item
        if self.completion is None:
            raise UnavailableError("this stream was closed before its end")
        return self.completion

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            with self._lock:
                ready = (
                    bool(self._pending) or self.completion is not None or self._error is not None
                )
            if not ready:
                await self._waiter
        except asyncio.CancelledError:
            await self.aclose()  # the task that read this was cancelled: nobody wants the rest
            raise
        finally:
            self._waiter = None

    async def aclose(self) -> None:
        with self._lock:
            self._over = True
            self._pending.clear()
            running = self.completion is None and self._error is None
        if running:
            self._engine.abort(self.request_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class OutputSink:
    """One reader of many requests: what a step gives them all arrives in one call, on the event loop on which this was made.

    `take` gets (request id, Delta | Completion | VerbatimError), in order; a request's last item is its Completion or its error. There
    is nothing to collect or to close: a request that nobody wants any more is aborted by its id."""

    def __init__(self, take: Callable[[list[tuple[str, Output | VerbatimError]]], None]) -> None:
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._pending: list[tuple[str, Output | VerbatimError]] = []

    def _put(self, items: Sequence[tuple[str, Output | VerbatimError]]) -> None:
        """From the engine's thread: one call is on its way for all that comes before it arrives."""
        with self._lock:
            wake = not self._pending
            self._pending += items
        if wake:
            with contextlib.suppress(
                RuntimeError
            ):  # the reader's loop is closed: nobody will read this
                self._loop.call_soon_threadsafe(self._arrive)

    def _arrive(self) -> None:
        with self._lock:
            items, self._pending = self._pending, []
        self._take(items)


class SinkRequest:
    """One request of a OutputSink, in the place of a stream."""

    def __init__(self, feed: OutputSink, request_id: str) -> None:
        self.feed = feed
        self._id = request_id
        self._hidden = HiddenPool()

    def _fail(self, error: VerbatimError) -> None:
        self.feed._put([(self._id, error)])

    def embedding(self) -> np.ndarray:
        """After the end of a request that was submitted with hidden, unless it was cancelled: float32 [hidden]."""
        return self._hidden.vector()


def join(first: Delta, second: Delta) -> Delta:
    """Two successive Deltas of one choice as one."""
    return Delta(
        first.request_id,
        first.index,
        first.text + second.text,
        first.token_ids + second.token_ids,
        first.logprobs + second.logprobs,
        first.explain + second.explain,
        second.finish,
    )
