"""The blocking loop under LLM: the calling threads step the engine until their requests are done.

In: validated Requests. Out: Completions, or the Deltas of a Stream. All access to the core is
serialised by one lock. AsyncEngine (async_engine.py) is the twin with a loop in its own thread.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

from verbatim.base.config import EngineConfig
from verbatim.base.errors import UnavailableError
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion, Delta
from verbatim.engine.calls.call_inputs import NoBar, ProgressBar, Prompt, progress_bar
from verbatim.engine.calls.engine_base import EngineBase
from verbatim.engine.loaded_model import LoadedModel
from verbatim.engine.request import Request
from verbatim.engine.running_request import Output


class Stream:
    """One running request: iterate for Deltas; afterwards `completion` holds the Completion.

    Closing it early (or leaving its `with` block) aborts the request; dropping the last reference
    aborts it before the next step. Deltas of several choices interleave; `delta.index` names the
    choice. The Deltas of one choice concatenate to exactly its text.

    >>> stream = llm.stream("hi", SamplingParams(max_tokens=4, seed=1))
    >>> "".join(delta.text for delta in stream) == stream.completion.text
    True
    """

    def __init__(self, llm: BlockingEngine, request: Request) -> None:
        self.request_id = request.id
        self.completion: Completion | None = None
        self._llm = llm
        self._pending: list[Delta] = []
        self._cancelled = False
        llm._add(request, self)

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        while not self._pending:
            with self._llm._lock:  # another thread's step must not end this request between checks
                if self._cancelled:
                    self.close()
                elif self._pending:
                    break
                if self.completion is not None or not self._llm.core.busy:
                    raise StopIteration
                self._llm._step()
        return self._pending.pop(0)

    def cancel(self) -> None:
        """Abort the request before the next step. Only sets a flag, so a signal handler may call it
        during a step."""
        self._cancelled = True

    def close(self) -> None:
        """Abort the request if it is still running. `completion` then holds the output so far, with
        finish reason "cancel"."""
        # UnavailableError: the LLM is being closed, and runs no further step.
        with self._llm._lock, suppress(UnavailableError):
            if self.completion is None and self._llm._abort(self.request_id):
                self._llm._step()
        self._pending.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The garbage collector may call this during a step, in the thread that holds the reentrant
        # lock. So it only records the id.
        if getattr(self, "completion", True) is None:
            self._llm._dropped.append(self.request_id)


class BlockingEngine(EngineBase):
    """Queues requests and steps the engine. LLM adds the public calls."""

    def _open(self, loaded: LoadedModel, config: EngineConfig) -> None:
        super()._open(loaded, config)
        self.closed = False
        self._lock = threading.RLock()  # serialises all access to the core
        self._streams: weakref.WeakValueDictionary[str, Stream] = weakref.WeakValueDictionary()
        self._done: dict[str, Completion] = {}  # results of generate(), by request id
        self._wanted: set[str] = set()  # request ids whose Completions generate() waits for
        self._dropped: deque[str] = deque()  # request ids of streams that were garbage-collected

    def _run(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], progress: object = False
    ) -> list[Completion]:
        """Validate all requests before the first one is queued, then run them to completion."""
        requests = [self.core.request(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
        for request in requests:
            self.core.check_fits(request)
        bar = progress_bar(progress, len(requests), "prompts")
        try:
            with self._awaited(requests):
                for request in requests:
                    self._add(request)
                return self._finish([request.id for request in requests], bar)
        finally:
            bar.close()

    @contextmanager
    def _awaited(self, requests: Sequence[Request]) -> Iterator[None]:
        """Keep the Completions of these requests for the caller. On any exit (Ctrl-C too), abort
        and forget them."""
        self._wanted.update(request.id for request in requests)
        try:
            yield
        finally:
            with self._lock:
                for request in requests:
                    self._abort(request.id)  # no effect on a completed request
                    self._wanted.discard(request.id)
                    self._done.pop(request.id, None)

    def _add(self, request: Request, stream: Stream | None = None) -> None:
        """Queue a request, stepping the engine until the queue has a free place."""
        while True:
            with self._lock:
                self._abort_dropped()
                if not self.core.full:
                    if stream is not None:
                        self._streams[request.id] = stream
                    self.core.add(request, deltas=stream is not None)
                    return
                self._step()

    def _finish(self, ids: Sequence[str], bar: ProgressBar = NoBar()) -> list[Completion]:
        """Step until all are done. A bar counts the Completions after each step."""
        left = len(ids)
        while any(request_id not in self._done for request_id in ids):
            self._step()
            if not isinstance(bar, NoBar):
                now = sum(request_id not in self._done for request_id in ids)
                bar.update(left - now)
                left = now
        bar.update(left)
        return [self._done[request_id] for request_id in ids]

    def _step(self) -> None:
        with self._lock:
            self._abort_dropped()
            for output in self.core.step():
                self._deliver(output)

    def _abort_dropped(self) -> None:
        """Abort the requests of garbage-collected streams. Needs the lock; raises when closed."""
        if self.closed:
            raise UnavailableError("this LLM is closed; open a new one: LLM(model)")
        while self._dropped:
            self.core.abort(self._dropped.popleft())

    def _abort(self, request_id: str) -> bool:
        with self._lock:
            return not self.closed and self.core.abort(request_id)

    def _deliver(self, output: Output) -> None:
        stream = self._streams.get(output.request_id)
        if isinstance(output, Delta):
            if stream is not None:
                stream._pending.append(output)
        elif stream is not None:
            stream.completion = output
        elif output.request_id in self._wanted:
            self._done[output.request_id] = output

    def cache_plan(self) -> dict[str, Any]:
        """How the KV cache was sized: bytes, blocks and the limiting rule, as plain data.

        >>> "text" in llm.cache_plan()
        True
        """
        return {**self.core.cache_plan.as_dict(), "text": str(self.core.cache_plan)}

    def check(self) -> None:
        """Check the block accounting; an AssertionError names the broken invariant.

        >>> llm.check()
        """
        with self._lock:  # not during another thread's step
            self.core.check()

    def close(self) -> None:
        """Release the backend. Idempotent. Other threads that are generating, and open streams, get
        an UnavailableError."""
        self.closed = True  # before taking the lock, so that a thread in a step loop releases it
        with self._lock:  # not during another thread's step
            self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
