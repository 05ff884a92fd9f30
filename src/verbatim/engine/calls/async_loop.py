"""AsyncLoop: the engine's thread. It reads its inbox, steps the core, and hands outputs to readers.

Messages come in from any thread; Deltas and Completions go out. Two invariants: only this thread
touches the core, and other threads post to its inbox; a failure of the loop ends every request with
an error, which `error` keeps.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from verbatim.base.config import EngineConfig
from verbatim.base.errors import BackendError, UnavailableError, VerbatimError
from verbatim.base.records import Completion
from verbatim.engine.calls.async_calls import AsyncCalls
from verbatim.engine.calls.async_stream import AsyncStream, OutputSink, SinkRequest
from verbatim.engine.core import EngineCore
from verbatim.engine.loaded_model import LoadedModel
from verbatim.engine.request import Request
from verbatim.engine.running_request import Output

# Idle seconds before the block accounting is checked, so that the check delays no burst of
# requests.
IDLE_CHECK_SECONDS = 0.2


class AsyncLoop(AsyncCalls):
    """The loop of AsyncEngine: its state, its thread, and the inbox between them."""

    def _open(self, loaded: LoadedModel, config: EngineConfig) -> None:
        super()._open(loaded, config)
        # Readers by request id. AsyncStreams are held weakly: a dropped one aborts its request.
        self._readers: dict[str, Callable[[], AsyncStream | SinkRequest | None]] = {}
        self._inbox: deque[tuple[str, Any]] = deque()
        self._dropped: deque[tuple[str, Any]] = deque()  # garbage-collected streams: id, weakref
        self._lock = threading.RLock()  # guards the inbox, the readers and the flags
        self._awake = threading.Event()
        # requests per tenant accepted by submit() that the loop has not added yet
        self._arriving: Counter[str] = Counter()
        self._draining = self._closing = False
        self._error: BaseException | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="verbatim-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """The loop accepts requests: it is not draining, failed or closed."""
        return not self._draining and not self._closing and self._error is None

    @property
    def step_thread(self) -> int | None:
        """OS thread id of the engine's thread, which is also thread 0 of the backend's pool."""
        return self._thread.native_id

    @property
    def error(self) -> BaseException | None:
        """The exception that ended the loop, if it failed."""
        return self._error

    def _check_open(self) -> None:
        if self._error is not None:
            raise BackendError(f"the engine has failed: {self._error}")
        if not self.alive:
            raise UnavailableError("the engine is shutting down")

    def _post(self, what: str, value: object) -> None:
        """Post a message to the engine's thread, from any thread."""
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
                    self._wait_for_work()
        except BaseException as error:
            self._die(error)
        self._idle.set()

    def _wait_for_work(self) -> None:
        """Sleep until a message arrives. After IDLE_CHECK_SECONDS, check the block accounting."""
        with self._lock:
            if not self._inbox and not self._arriving.total():
                self._idle.set()
        if not self._awake.wait(IDLE_CHECK_SECONDS):
            self.core.check()
            self._awake.wait()

    def _read_inbox(self) -> None:
        self._awake.clear()
        # Read the dropped streams first: the "add" message of each is in the inbox by now.
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        # One by one: when a message fails, _die() answers those that are left.
        for _ in range(len(self._inbox)):
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
                same = self._readers.get(request_id) is held  # not a later request of this id
            if same:
                self.core.abort(request_id)

    def _add(self, request: Request) -> None:
        try:
            self.core.add(request, queued=True)
            reader = self._readers[request.id]()
            if reader is not None:
                reader._hidden = self.core.requests[request.id].hidden
        except VerbatimError as error:
            with self._lock:
                reader = self._readers.pop(request.id)()
            if reader is not None:
                reader._fail(error)
        finally:
            with self._lock:
                self._arriving[request.tenant] -= 1

    def _call(self, work: Callable[[EngineCore], object], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():  # the caller was cancelled
            return
        try:
            future.set_result(work(self.core))
        except BaseException as error:  # belongs to the caller; the loop continues
            future.set_exception(error)

    def _send(self, outputs: Sequence[Output]) -> None:
        by_request: dict[str, list[Output]] = {}
        for output in outputs:
            by_request.setdefault(output.request_id, []).append(output)
        by_sink: dict[OutputSink, list[tuple[str, Output | VerbatimError]]] = {}
        for request_id, items in by_request.items():
            with self._lock:
                held = (
                    self._readers.pop(request_id, None)
                    if isinstance(items[-1], Completion)
                    else self._readers.get(request_id)
                )
            reader = held() if held is not None else None
            if isinstance(reader, SinkRequest):
                by_sink.setdefault(reader.sink, []).extend((request_id, item) for item in items)
            elif reader is not None:
                reader._put(items)
        for sink, batch in by_sink.items():
            sink._put(batch)

    def _die(self, error: BaseException) -> None:
        """The loop has failed: end every stream and every call() with an error."""
        with self._lock:
            self._error = error
            readers, self._readers = [held() for held in self._readers.values()], {}
        while self._inbox:
            what, value = self._inbox.popleft()
            if what == "call" and value[1].set_running_or_notify_cancel():
                value[1].set_exception(BackendError(f"the engine has failed: {error}"))
        for reader in readers:
            if reader is not None:
                reader._fail(BackendError(f"the engine has failed: {error}"))
