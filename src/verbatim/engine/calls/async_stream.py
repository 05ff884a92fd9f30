"""Readers of engine outputs: AsyncStream for one request, OutputSink for many.

In: Deltas and Completions from the engine's thread, step by step. Out: an async iterator, or one
callback per batch of outputs, on the reader's event loop. A slow reader costs no more memory than
its unread output.
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
from verbatim.engine.embed_input import HiddenPool
from verbatim.engine.running_request import Output


class SupportsAbort(Protocol):
    def abort(self, request_id: str) -> bool: ...


class AsyncStream:
    """One running request: an async iterator of Deltas that ends with the Completion.

    If the engine fails, iteration raises the VerbatimError. `aclose()`, leaving `async with`, or
    dropping the last reference aborts a running request. Supports one reader.

    >>> async def main():
    ...     async with AsyncEngine("smollm2") as engine:
    ...         stream = await engine.submit("Hello", SamplingParams(max_tokens=4, seed=1))
    ...         return [type(item).__name__ async for item in stream][-1]
    >>> asyncio.run(main())
    'Completion'
    """

    def __init__(self, engine: SupportsAbort, request_id: str) -> None:
        self.request_id = request_id
        self.prompt_tokens = 0  # set when the request is accepted
        self.completion: Completion | None = None
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._pending: dict[int, Delta] = {}  # by choice: unread output, merged into one Delta
        self._error: VerbatimError | None = None
        self._over = False  # the reader has received the Completion or the error
        self._hidden = HiddenPool()
        self._waiter: asyncio.Future[None] | None = None
        self._wake_scheduled = False

    # ----------------------------------------------------------------------- engine's thread

    def _put(self, outputs: Sequence[Output]) -> None:
        with self._lock:
            for output in outputs:
                if isinstance(output, Completion):
                    self.completion = output
                else:
                    before = self._pending.get(output.index)
                    self._pending[output.index] = output if before is None else join(before, output)
        self._schedule_wake()

    def _fail(self, error: VerbatimError) -> None:
        with self._lock:
            if self.completion is None:
                self._error = error
        self._schedule_wake()

    def _schedule_wake(self) -> None:
        """Schedule at most one wake-up on the event loop, however many outputs arrive before it."""
        if not self._wake_scheduled:
            self._wake_scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # the reader's event loop is closed
                self._engine.abort(self.request_id)

    def _wake(self) -> None:
        self._wake_scheduled = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --------------------------------------------------------------------------- reader's side

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
        """Wait for the Completion and discard the Deltas."""
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
            await self.aclose()  # the reading task was cancelled
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
    """One reader of many requests: all outputs of a step arrive in one callback, on the event loop
    that created the sink.

    `receive` gets (request id, Delta | Completion | VerbatimError) pairs in order. The last item of
    a request is its Completion or its error. A sink is not closed; requests are aborted by id."""

    def __init__(self, receive: Callable[[list[tuple[str, Output | VerbatimError]]], None]) -> None:
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._pending: list[tuple[str, Output | VerbatimError]] = []

    def _put(self, items: Sequence[tuple[str, Output | VerbatimError]]) -> None:
        """On the engine's thread. One scheduled callback delivers everything that is pending."""
        with self._lock:
            wake = not self._pending
            self._pending += items
        if wake:
            # RuntimeError: the reader's event loop is closed, and no output can be delivered.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            items, self._pending = self._pending, []
        self._receive(items)


class SinkRequest:
    """One request whose outputs go to an OutputSink; what AsyncStream is for a single reader."""

    def __init__(self, sink: OutputSink, request_id: str) -> None:
        self.sink = sink
        self.prompt_tokens = 0  # set when the request is accepted
        self._id = request_id
        self._hidden = HiddenPool()

    def _fail(self, error: VerbatimError) -> None:
        self.sink._put([(self._id, error)])

    def embedding(self) -> np.ndarray:
        """float32 [hidden], once a request submitted with `hidden` has completed uncancelled."""
        return self._hidden.vector()


def join(first: Delta, second: Delta) -> Delta:
    """Merge two successive Deltas of one choice."""
    return Delta(
        first.request_id,
        first.index,
        first.text + second.text,
        first.token_ids + second.token_ids,
        first.logprobs + second.logprobs,
        first.explain + second.explain,
        second.finish,
        first.reasoning + second.reasoning,
        first.reasoning_tokens + second.reasoning_tokens,
        first.tool_calls + second.tool_calls,
    )
