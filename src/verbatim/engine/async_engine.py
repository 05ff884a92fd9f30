"""AsyncEngine: many clients, one engine. Requests come in from coroutines; the engine's loop runs in a thread of its own.

    engine = AsyncEngine("smollm2")
    stream = await engine.submit("Once upon", SamplingParams(max_tokens=64))
    async for item in stream:                  # Delta, Delta, ..., and last the Completion
        ...

Three rules keep it calm. Only the engine's thread touches the core; others leave a note in an inbox. A reader that does
not keep up costs no memory beyond its own answer: what is not yet read is merged into one pending Delta a choice. A
failure of the loop ends every request with an error, and is kept in `error`.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np

from verbatim.base.config import EngineConfig
from verbatim.base.errors import (
    BackendError,
    OverloadedError,
    ParameterError,
    UnavailableError,
    VerbatimError,
)
from verbatim.base.params import STRUCTURE, SamplingParams
from verbatim.base.records import Completion, Finish
from verbatim.engine.async_stream import AsyncStream, OutputSink, SinkRequest
from verbatim.engine.core import EngineCore
from verbatim.engine.engine_base import EngineBase
from verbatim.engine.fair_pool import FairThreadPool
from verbatim.engine.loaded_model import LoadedModel
from verbatim.engine.request import Request
from verbatim.engine.running_request import Output
from verbatim.grammar.compile_pool import SIZE
from verbatim.grammar.matcher import ARRIVAL_TIMEOUT, busy, prepare

IDLE_CHECK_SECONDS = 0.2
T = TypeVar("T")
R = TypeVar("R", bound="AsyncStream | SinkRequest")


def _nobody() -> None:
    """In the place of a stream that is not made yet."""


def _same(value: T) -> T:
    return value


class AsyncEngine(EngineBase):
    """`options` are the fields of EngineConfig. The constructor loads the model (blocking: run it in a thread if that
    matters)."""

    def _open(self, parts: LoadedModel, config: EngineConfig) -> None:
        super()._open(parts, config)
        self._streams: dict[
            str, Callable[[], AsyncStream | SinkRequest | None]
        ] = {}  # weak: a stream that nobody holds any more is aborted
        self._encoders = ThreadPoolExecutor(4, "verbatim-encode")
        # As many threads as the pool has slots. Of two, one tenant has at most one at a time, so an
        # expensive structure delays another tenant's by one compile at most.
        self._compilers = FairThreadPool(SIZE, "verbatim-compile")
        self._compilers.submit(
            "", partial(prepare, parts.tokenizer)
        )  # now, while nobody's answer waits for it
        self._inbox: deque[tuple[str, Any]] = deque()
        self._dropped: deque[tuple[str, Any]] = (
            deque()
        )  # requests whose streams were collected, and what held those
        self._lock = threading.RLock()  # guards the inbox, the streams and the flags
        self._awake = threading.Event()
        self._arriving = 0  # accepted by submit() and not yet seen by the loop
        self._draining = self._closing = False
        self._error: BaseException | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="verbatim-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------------------- facts

    @property
    def alive(self) -> bool:
        """The loop runs and accepts requests (not draining, not failed, not closed)."""
        return not self._draining and not self._closing and self._error is None

    @property
    def step_thread(self) -> int | None:
        """The system's number of the thread that steps: the first of the backend's team."""
        return self._thread.native_id

    @property
    def error(self) -> BaseException | None:
        """What ended the loop, if it failed."""
        return self._error

    # ------------------------------------------------------------------------------------------------------- for clients

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        tenant: str = "",
    ) -> AsyncStream:
        """Accept a request or refuse it now: RequestError (400), OverloadedError (429, the queue is full),
        UnavailableError (503, draining or closed), BackendError (the engine died). Tokenising and grammar compilation run
        off the event loop and off the engine's thread."""
        return await self._submit(partial(_same, prompt), params, request_id, tenant, self._stream)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        tenant: str = "",
        template: Mapping[str, Any] | None = None,
    ) -> AsyncStream:
        """submit() of a conversation through the chat template; `template` holds its options (tools, ...)."""
        conversation = partial(self.encode_chat, messages, **(template or {}))
        return await self._submit(conversation, params, request_id, tenant, self._stream)

    async def submit_to(
        self,
        feed: OutputSink,
        request_id: str,
        prompt: str | Sequence[int] | None,
        params: SamplingParams | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
        tenant: str = "",
        hidden: bool = False,
    ) -> SinkRequest:
        """submit(), or chat() where there are messages, for a reader of many requests. hidden: the line gathers what embed() gives."""
        make: Callable[[], str | Sequence[int]]
        if messages is not None:
            make = partial(self.encode_chat, messages, **(template or {}))
        else:
            assert prompt is not None
            make = partial(_same, prompt)
        return await self._submit(
            make, params, request_id, tenant, partial(SinkRequest, feed), hidden
        )

    async def embed(
        self, prompt: str | Sequence[int], *, request_id: str | None = None, tenant: str = ""
    ) -> tuple[np.ndarray, int]:
        """One vector of the final hidden states, as LLM.embed() (float32 [hidden]), and how many tokens there were."""
        params = SamplingParams(max_tokens=0)
        stream = await self._submit(
            partial(_same, prompt), params, request_id, tenant, self._stream, hidden=True
        )
        completion = await stream.result()
        return stream._hidden.vector(), len(completion.prompt_ids)

    async def _submit(
        self,
        prompt: Callable[[], str | Sequence[int]],
        params: SamplingParams | None,
        request_id: str | None,
        tenant: str,
        reader_of: Callable[[str], R],
        hidden: bool = False,
    ) -> R:
        request_id = request_id or f"req-{secrets.token_hex(8)}"
        self._reserve(request_id)
        deadline = time.monotonic() + ARRIVAL_TIMEOUT

        def make() -> Request:
            named: dict[str, Any] = {"request_id": request_id, "tenant": tenant, "hidden": hidden}
            request = self.core.request(prompt(), params, **named, deadline=deadline)
            self.core.check_fits(request)
            return request

        try:
            request = await self._made(make, params, tenant)
            reader = reader_of(request_id)
            with self._lock:
                self._check_open()
                self._streams[request_id] = (
                    weakref.ref(reader, partial(self._drop, request_id))
                    if isinstance(reader, AsyncStream)
                    else partial(_same, reader)
                )
                self._inbox.append(
                    ("add", request)
                )  # in one go with the question whether anybody still reads it
        except BaseException as error:
            self._give_up(request_id)
            if isinstance(error, asyncio.CancelledError) and self._not_begun():
                raise UnavailableError("the engine is shutting down") from None
            raise
        self._awake.set()
        return reader

    async def _made(
        self, make: Callable[[], Request], params: SamplingParams | None, tenant: str
    ) -> Request:
        """Grammar compiles have threads of their own, so that no other prompt waits behind them.
        Waiting for a thread counts towards ARRIVAL_TIMEOUT."""
        if not (isinstance(params, SamplingParams) and params.structured):
            return await asyncio.get_running_loop().run_in_executor(self._encoders, make)
        try:
            return await asyncio.wait_for(
                asyncio.wrap_future(self._compilers.submit(tenant, make)), ARRIVAL_TIMEOUT + 0.1
            )
        except TimeoutError:
            field = next(name for name in STRUCTURE if getattr(params, name) is not None)
            raise busy(field) from None

    def _not_begun(self) -> bool:
        """A CancelledError that nobody asked this task for: close() came before its work began."""
        task = asyncio.current_task()
        return self._closing and task is not None and not task.cancelling()

    def _stream(self, request_id: str) -> AsyncStream:
        return AsyncStream(self, request_id)

    def _drop(self, request_id: str, held: object) -> None:
        """A stream was collected. That may come anywhere, in a thread that holds any lock: so none is taken here, and nobody woken. A request
        that can still be ended keeps the loop awake."""
        self._dropped.append((request_id, held))

    def _reserve(self, request_id: str) -> None:
        """A place in the queue, before any work is done for it."""
        with self._lock:
            self._check_open()
            if request_id in self._streams:
                raise ParameterError("request_id", f"{request_id!r} is already running")
            waiting = len(self.core.scheduler.waiting) + self._arriving
            if waiting >= self.config.max_waiting:
                self.core.metrics.refused.add()
                raise OverloadedError(
                    f"{waiting} requests are waiting, and the queue holds {self.config.max_waiting}"
                )
            self._streams[request_id] = _nobody
            self._arriving += 1
            self._idle.clear()

    def _give_up(self, request_id: str) -> None:
        with self._lock:
            self._streams.pop(request_id, None)
            self._arriving -= 1
        self._awake.set()

    def _check_open(self) -> None:
        if self._error is not None:
            raise BackendError(f"the engine has failed: {self._error}")
        if not self.alive:
            raise UnavailableError("the engine is shutting down")

    def abort(self, request_id: str) -> bool:
        """End a request now, from any thread; its stream ends with a Completion whose finish reason is "cancel". False:
        no such request."""
        with self._lock:
            known = self._streams.get(request_id, _nobody) is not _nobody
        if known:
            self._note("abort", request_id)
        return known

    def metrics(self) -> str:
        """stats() and the histograms, in the Prometheus text format."""
        self.core.stats()
        return self.core.metrics.registry.render()

    async def call(self, work: Callable[[EngineCore], Any]) -> Any:
        """Run a function of the core on the engine's thread, between two steps."""
        future: Future[Any] = Future()
        with self._lock:
            self._check_open()
            self._inbox.append(("call", (work, future)))
        self._awake.set()
        return await asyncio.wrap_future(future)

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests (UnavailableError) and wait for the running ones. False: some were cancelled at the timeout."""
        self._draining = True
        calm = await asyncio.to_thread(self._idle.wait, timeout)
        if not calm:
            self._note("cancel", Finish("cancel", "shutdown"))
            await asyncio.to_thread(self._idle.wait, 5.0)
        return calm

    def close(self) -> None:
        """Cancel what runs, end the thread, release the backend. Idempotent; from any thread but the engine's."""
        with self._lock:
            first, self._closing = not self._closing, True
        if first:
            self._note("cancel", Finish("cancel", "shutdown"))
            self._thread.join()
            # Both wait for work that has begun, and all of it ends: encoding takes as long as the text
            # is (the server bounds that), a compile ends within ARRIVAL_TIMEOUT and the CPU limit, and
            # prepare() walks the vocabulary once.
            self._encoders.shutdown(wait=True, cancel_futures=True)
            self._compilers.close()
            self.core.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # ------------------------------------------------------------------------------------------------ the engine's thread

    def _note(self, what: str, value: Any) -> None:
        with self._lock:
            self._inbox.append((what, value))
        self._awake.set()

    def _run(self) -> None:
        try:
            while True:
                self._read_inbox()
                if self.core.busy:
                    self._send(self.core.step())
                elif self._closing and not self._inbox:
                    break
                else:
                    self._rest()
        except BaseException as error:
            self._die(error)
        self._idle.set()

    def _rest(self) -> None:
        """Nothing runs: after a moment's calm prove the accounting, then sleep until somebody comes."""
        with self._lock:
            if not self._inbox and not self._arriving:
                self._idle.set()
        if not self._awake.wait(IDLE_CHECK_SECONDS):
            self.core.check()
            self._awake.wait()

    def _read_inbox(self) -> None:
        self._awake.clear()
        dropped = [
            self._dropped.popleft() for _ in range(len(self._dropped))
        ]  # first: what they asked for has come in by now
        for _ in range(len(self._inbox)):  # one by one: what is left when one fails is told so
            what, value = self._inbox.popleft()
            if what == "add":
                self._add(value)
            elif what == "abort":
                self.core.abort(value)
            elif what == "call":
                self._call(*value)
            else:
                for request_id in list(self.core.requests):
                    self.core.abort(request_id, value)
        for request_id, held in dropped:
            with self._lock:
                same = self._streams.get(request_id) is held  # not a later one of the same name
            if same:
                self.core.abort(request_id)

    def _add(self, request: Request) -> None:
        try:
            self.core.add(request, queued=True)
            stream = self._streams[request.id]()
            if stream is not None:
                stream._hidden = self.core.requests[request.id].hidden
        except VerbatimError as error:
            with self._lock:
                stream = self._streams.pop(request.id)()
            if stream is not None:
                stream._fail(error)
        finally:
            with self._lock:
                self._arriving -= 1

    def _call(self, work: Callable[[EngineCore], Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():  # who asked has left
            return
        try:
            future.set_result(work(self.core))
        except BaseException as error:  # the caller's, whatever it is: nobody else asked for it
            future.set_exception(error)

    def _send(self, outputs: Sequence[Output]) -> None:
        by_request: dict[str, list[Output]] = {}
        for output in outputs:
            by_request.setdefault(output.request_id, []).append(output)
        fed: dict[OutputSink, list[tuple[str, Output | VerbatimError]]] = {}
        for request_id, items in by_request.items():
            with self._lock:
                held = (
                    self._streams.pop(request_id, None)
                    if isinstance(items[-1], Completion)
                    else self._streams.get(request_id)
                )
            reader = held() if held is not None else None
            if isinstance(reader, SinkRequest):
                fed.setdefault(reader.feed, []).extend((request_id, item) for item in items)
            elif reader is not None:
                reader._put(items)
        for feed, news in fed.items():
            feed._put(news)

    def _die(self, error: BaseException) -> None:
        """The loop has failed: whoever waits is told, nobody hangs."""
        with self._lock:
            self._error = error
            streams, self._streams = [held() for held in self._streams.values()], {}
        while self._inbox:
            what, value = self._inbox.popleft()
            if what == "call" and value[1].set_running_or_notify_cancel():
                value[1].set_exception(BackendError(f"the engine has failed: {error}"))
        for stream in streams:
            if stream is not None:
                stream._fail(BackendError(f"the engine has failed: {error}"))
