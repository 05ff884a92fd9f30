"""AsyncEngine: many asyncio clients, one engine. The engine's loop runs in its own thread.

    async with AsyncEngine("smollm2") as engine:
        done = await engine.generate("Once upon", SamplingParams(max_tokens=64))
        async for delta in engine.stream("Once upon"):
            ...

Requests come in from coroutines; streams of Deltas go out. This file is the client's side: it
accepts a request, tokenises it in a thread pool, and posts it to the loop (async_loop.py). A slow
reader costs no memory beyond its own output, because unread Deltas of a choice are merged into one.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np

from verbatim.base.config import EngineConfig
from verbatim.base.errors import OverloadedError, ParameterError, UnavailableError
from verbatim.base.params import STRUCTURE, SamplingParams
from verbatim.base.records import Finish
from verbatim.engine.calls.async_loop import AsyncLoop
from verbatim.engine.calls.async_stream import AsyncStream, OutputSink, SinkRequest
from verbatim.engine.calls.call_inputs import one
from verbatim.engine.calls.chat_prompt import chat_prompt
from verbatim.engine.calls.fair_pool import FairThreadPool
from verbatim.engine.core import EngineCore
from verbatim.engine.embed_input import EmbedInput
from verbatim.engine.loaded_model import LoadedModel
from verbatim.engine.request import Request
from verbatim.engine.step.failed_step import raise_error
from verbatim.grammar.compile_pool import SIZE
from verbatim.grammar.compiler import ARRIVAL_TIMEOUT, busy, prepare

T = TypeVar("T")
R = TypeVar("R", bound="AsyncStream | SinkRequest")


def _no_reader() -> None:
    """Placeholder for the reader of a request that is still being tokenised."""


def _same(value: T) -> T:
    return value


class AsyncEngine(AsyncLoop):
    """A loaded model for asyncio: `generate`, `stream`, `chat`, `chat_stream`, `embed`,
    `rerank`, and `submit` for the stream of one request with an id and a tenant.

    The constructor takes the arguments of LLM, loads the model, and blocks meanwhile. Any number of
    coroutines may call it; their requests run in the same batch.

    >>> async def main():
    ...     async with AsyncEngine("smollm2") as engine:
    ...         return await engine.generate("Hello", SamplingParams(max_tokens=4, seed=1))
    >>> asyncio.run(main()).finish_reason in ("stop", "length")
    True
    """

    def _open(self, loaded: LoadedModel, config: EngineConfig) -> None:
        super()._open(loaded, config)
        self._encoders = FairThreadPool(4, "verbatim-encode")
        # One thread per slot of the compile pool. One tenant occupies at most one of two, so an
        # expensive grammar delays another tenant's by one compile at most.
        self._compilers = FairThreadPool(SIZE, "verbatim-compile")
        self._compilers.submit("", partial(prepare, loaded.tokenizer))  # before any request waits
        self._thread.start()

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        tenant: str = "",
    ) -> AsyncStream:
        """Accept a request, or raise RequestError (400), OverloadedError (429: the queue is full),
        UnavailableError (503: draining or closed) or BackendError (the engine failed).

        prompt: a string or a list of token ids
        params: a SamplingParams
        request_id: a name of your own, for abort()
        tenant: requests of different tenants share no cached prefix
        Returns an AsyncStream of Deltas that ends with the Completion. Tokenisation and grammar
        compiles run neither on the event loop nor on the engine's thread."""
        return await self._submit(partial(_same, prompt), params, request_id, tenant, self._stream)

    async def submit_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        tenant: str = "",
        template: Mapping[str, object] | None = None,
    ) -> AsyncStream:
        """submit() of a conversation, rendered by the chat template with the options in `template`
        and with the tools of LLM.chat() in it."""
        conversation, params = chat_prompt(self, messages, one(params), template or {})
        return await self._submit(conversation, params, request_id, tenant, self._stream)

    async def submit_to(
        self,
        sink: OutputSink,
        request_id: str,
        prompt: str | Sequence[int] | EmbedInput | None,
        params: SamplingParams | None = None,
        *,
        messages: Sequence[Mapping[str, object]] | None = None,
        template: Mapping[str, object] | None = None,
        tenant: str = "",
        hidden: bool = False,
    ) -> SinkRequest:
        """submit(), or submit_chat() with `messages`, for a reader of many requests. With `hidden`
        the returned SinkRequest has the embedding of the prompt."""
        make: Callable[[], str | Sequence[int] | EmbedInput]
        if messages is not None:
            make = partial(self.encode_chat, messages, **(template or {}))
        else:
            assert prompt is not None
            make = partial(_same, prompt)
        reader = partial(SinkRequest, sink)
        return await self._submit(make, params, request_id, tenant, reader, hidden)

    async def _vector(
        self, given: EmbedInput, request_id: str | None, tenant: str
    ) -> tuple[np.ndarray, int]:
        stream = await self._submit(
            partial(_same, given), given.params, request_id, tenant, self._stream, hidden=True
        )
        completion = await stream.result()
        raise_error([completion])
        return stream._hidden.vector(), len(completion.prompt_ids)

    async def _submit(
        self,
        prompt: Callable[[], str | Sequence[int] | EmbedInput],
        params: SamplingParams | None,
        request_id: str | None,
        tenant: str,
        make_reader: Callable[[str], R],
        hidden: bool = False,
    ) -> R:
        request_id = request_id or f"req-{secrets.token_hex(8)}"
        self._reserve(request_id, tenant)
        deadline = time.monotonic() + ARRIVAL_TIMEOUT

        def make() -> Request:
            named: dict[str, Any] = {"request_id": request_id, "tenant": tenant, "hidden": hidden}
            request = self.core.request(prompt(), params, **named, deadline=deadline)
            self.core.check_fits(request)
            return request

        try:
            request = await self._prepare(make, params, tenant)
            reader = make_reader(request_id)
            reader.prompt_tokens = len(request.prompt_ids)
            # One critical section: the loop must not fail or close between the check and the post.
            with self._lock:
                self._check_open()
                self._readers[request_id] = (
                    weakref.ref(reader, partial(self._drop, request_id))
                    if isinstance(reader, AsyncStream)
                    else partial(_same, reader)
                )
                self._inbox.append(("add", request))
        except BaseException as error:
            self._give_up(request_id, tenant)
            if isinstance(error, asyncio.CancelledError) and self._cancelled_by_close():
                raise UnavailableError("the engine is shutting down") from None
            raise
        self._awake.set()
        return reader

    async def _prepare(
        self, make: Callable[[], Request], params: SamplingParams | None, tenant: str
    ) -> Request:
        """Run `make` in a thread pool. Grammar compiles have their own, so that no plain prompt
        queues behind them. Waiting for a thread counts towards ARRIVAL_TIMEOUT."""
        if not (isinstance(params, SamplingParams) and params.structured):
            return await asyncio.wrap_future(self._encoders.submit(tenant, make))
        try:
            return await asyncio.wait_for(
                asyncio.wrap_future(self._compilers.submit(tenant, make)), ARRIVAL_TIMEOUT + 0.1
            )
        except TimeoutError:
            field = next(name for name in STRUCTURE if getattr(params, name) is not None)
            raise busy(field) from None

    def _cancelled_by_close(self) -> bool:
        """close() cancelled a queued work item; the client did not cancel its task."""
        task = asyncio.current_task()
        return self._closing and task is not None and not task.cancelling()

    def _stream(self, request_id: str) -> AsyncStream:
        return AsyncStream(self, request_id)

    def _drop(self, request_id: str, held: object) -> None:
        """Weakref callback of a garbage-collected stream. It may run in a thread that holds any
        lock, so it takes none and wakes nothing: a request that can still be aborted keeps the loop
        running anyway."""
        self._dropped.append((request_id, held))

    def _reserve(self, request_id: str, tenant: str) -> None:
        """Reserve a place in the queue of the tenant before any work is done for the request."""
        with self._lock:
            self._check_open()
            if request_id in self._readers:
                raise ParameterError("request_id", f"{request_id!r} is already running")
            queues = self.core.scheduler.tenants.get(tenant)
            waiting = len(queues.waiting if queues else ()) + self._arriving[tenant]
            if waiting >= self.config.max_waiting:
                self.core.metrics.refused.add()
                raise OverloadedError(
                    f"{waiting} requests are waiting, and the queue holds {self.config.max_waiting}"
                    "; send it again later, or raise max_waiting"
                )
            self._readers[request_id] = _no_reader
            self._arriving[tenant] += 1
            self._idle.clear()

    def _give_up(self, request_id: str, tenant: str) -> None:
        with self._lock:
            self._readers.pop(request_id, None)
            self._arriving[tenant] -= 1
        self._awake.set()

    def abort(self, request_id: str) -> bool:
        """End a request, from any thread. Its stream ends with a Completion whose finish reason is
        "cancel". False: there is no such request."""
        with self._lock:
            known = self._readers.get(request_id, _no_reader) is not _no_reader
        if known:
            self._post("abort", request_id)
        return known

    def metrics(self) -> str:
        """stats() and the histograms in the Prometheus text format."""
        self.core.stats()
        return self.core.metrics.registry.render()

    async def call(self, work: Callable[[EngineCore], object]) -> Any:
        """Run work(core) on the engine's thread, between two steps."""
        future: Future[Any] = Future()
        with self._lock:
            self._check_open()
            self._inbox.append(("call", (work, future)))
        self._awake.set()
        return await asyncio.wrap_future(future)

    async def drain(self, timeout: float | None = None) -> bool:
        """Reject new requests (UnavailableError) and wait for the running ones. False: the timeout
        cancelled some."""
        self._draining = True
        idle = await asyncio.to_thread(self._idle.wait, timeout)
        if not idle:
            self._post("cancel", Finish("cancel", "shutdown"))
            await asyncio.to_thread(self._idle.wait, 5.0)
        return idle

    def close(self) -> None:
        """Cancel running requests, end the thread, release the backend. Idempotent. Callable from
        any thread but the engine's."""
        with self._lock:
            first, self._closing = not self._closing, True
        if first:
            self._post("cancel", Finish("cancel", "shutdown"))
            self._thread.join()
            # Both wait for running work items, and all of them end: the server bounds the length of
            # a text, a compile ends within ARRIVAL_TIMEOUT and the CPU limit, and prepare() walks
            # the vocabulary once.
            self._encoders.close()
            self._compilers.close()
            self.core.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)
