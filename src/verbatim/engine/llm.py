"""LLM: the library's front door, blocking. Prompts come in, Completions go out; many prompts share the steps of one engine.

    from verbatim import LLM, SamplingParams

    with LLM("smollm2") as llm:
        print(llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0)).text)

Threads may share an LLM: their requests run in the same steps, taken in turns. Servers use AsyncEngine.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, overload

import numpy as np

from verbatim.base.config import EngineConfig
from verbatim.base.errors import ParameterError, UnavailableError
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion, Delta, TokenLogprob
from verbatim.engine.engine_base import EngineBase, Message
from verbatim.engine.loaded_model import LoadedModel
from verbatim.engine.request import Request, read_prompt
from verbatim.engine.running_request import Output
from verbatim.engine.scoring import Score, score_of, windows

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Vote:
    """What `LLM.vote` returns: the answer that most continuations gave. Ties go to the answer that came first."""

    answer: str
    counts: tuple[
        tuple[str, int], ...
    ]  # most first; texts for which extract() gave None are not counted
    completion: Completion


class Stream:
    """One request being written: iterate for Deltas; afterwards `completion` holds the whole.

    Closing it early (or leaving its `with` block) aborts the request; dropping it does so before the next step. Deltas of several choices
    interleave; `delta.index` says whose they are. Deltas of one choice concatenate to exactly its text."""

    def __init__(self, llm: LLM, request: Request) -> None:
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
            with self._llm._lock:  # or another thread's step could end this one between two looks
                if self._cancelled:
                    self.close()
                elif self._pending:
                    break
                if self.completion is not None or not self._llm.core.busy:
                    raise StopIteration
                self._llm._step()
        return self._pending.pop(0)

    def cancel(self) -> None:
        """Ask for its end before the next step. It only sets a flag, so that a signal handler may call it in the middle
        of one."""
        self._cancelled = True

    def close(self) -> None:
        """Abort it, if it still runs. What was written so far is in `completion`, with finish reason "cancel"."""
        with (
            self._llm._lock,
            suppress(UnavailableError),
        ):  # the LLM is being closed: it steps no more
            if self.completion is None and self._llm._abort(self.request_id):
                self._llm._step()
        self._pending.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The collector calls this anywhere, in the middle of a step too, and the thread's own lock would let it in: so only a note.
        if getattr(self, "completion", True) is None:
            self._llm._dropped.append(self.request_id)


class LLM(EngineBase):
    """A model, opened. `options` are the fields of EngineConfig; an unknown one is a TypeError.

    model: a path to a .gguf file or a safetensors directory, a catalog name (`smollm2`), or `org/name` on the hub."""

    def _open(self, parts: LoadedModel, config: EngineConfig) -> None:
        super()._open(parts, config)
        self.closed = False
        self._lock = (
            threading.RLock()
        )  # one step, one arrival, one abort at a time: threads may share an LLM, and take turns
        self._streams: weakref.WeakValueDictionary[str, Stream] = weakref.WeakValueDictionary()
        self._done: dict[str, Completion] = {}  # of generate(), by request id
        self._wanted: set[str] = set()
        self._dropped: deque[str] = (
            deque()
        )  # requests whose streams were collected; the next to hold the lock ends them

    @overload
    def generate(
        self, prompts: str | list[int] | tuple[int, ...], params: SamplingParams | None = None
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]: ...
    def generate(
        self, prompts: Any, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Any:
        """Write on. One prompt (a string, or a list of token ids) gives one Completion; a list of prompts gives a list,
        in order, computed together. `params` is one for all, or one for each prompt. Any prompt that is refused raises
        before anything runs."""
        if _is_one(prompts):
            return self._run([prompts], [_one(params)])[0]
        return self._run(list(prompts), _each(params, len(prompts)))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """The same as generate, piece by piece, for one prompt. It advances while it is read; several may be read in turns."""
        return Stream(self, self.core.request(prompt, params))

    @overload
    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> list[Completion]: ...
    def chat(self, messages: Any, params: Any = None, **template: Any) -> Any:
        """Answer a conversation (or a list of them) through the model's chat template. `template` options (tools=...,
        enable_thinking=...) go to the template. A model without a template is an UnsupportedError."""
        if not isinstance(messages, (list, tuple)) or all(
            isinstance(message, Mapping) for message in messages
        ):
            return self._run([self.encode_chat(messages, **template)], [_one(params)])[0]
        return self._run(
            [self.encode_chat(m, **template) for m in messages], _each(params, len(messages))
        )

    def chat_stream(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> Stream:
        return self.stream(self.encode_chat(messages, **template), params)

    def score(
        self, text: Prompt, *, top: int = 0, window: int | None = None, stride: int | None = None
    ) -> Score:
        """Teacher-forced log-probability of every token and the perplexity, in one pass. `top`: alternatives to report. `window`: read a
        text of any length in windows of so many tokens, each beginning `stride` (half a window) behind the one before."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=top)
        if window is None:
            if stride is not None:
                raise ParameterError("stride", "belongs to window; set it too, or leave stride out")
            done = self._run([text], [params])[0]
            return score_of(done.prompt_ids, done.prompt_logprobs, done.warnings)
        if window > self.context:
            raise ParameterError(
                "window", f"{window} is more than the context holds ({self.context})"
            )
        ids, warnings = read_prompt(self.parts, text)
        parts = windows(len(ids), window, stride)
        read = self._run([ids[part.start : part.end] for part in parts], [params] * len(parts))
        logprobs: list[TokenLogprob | None] = []
        for part, done in zip(parts, read, strict=True):
            logprobs += done.prompt_logprobs[part.first - part.start :]
        return score_of(ids, logprobs, warnings)

    def vote(
        self,
        prompt: Prompt,
        n: int,
        *,
        extract: Callable[[str], str | None] = str.strip,
        params: SamplingParams | None = None,
    ) -> Vote:
        """Self-consistency: write n continuations, take from each its answer, return the majority's."""
        done = self._run([prompt], [(params or SamplingParams()).with_(n=n)])[0]
        counts: dict[str, int] = {}
        for choice in done.choices:
            answer = extract(choice.text)
            if answer is not None:
                counts[answer] = counts.get(answer, 0) + 1
        ranked = tuple(
            sorted(counts.items(), key=lambda item: -item[1])
        )  # stable: ties to the one that came first
        return Vote(ranked[0][0] if ranked else "", ranked, done)

    def embed(self, text: Prompt) -> np.ndarray:
        """One vector of the final hidden states, a float32 array [hidden]: their mean over all tokens, or what a GGUF file's
        pooling_type says (mean, cls: the first, last). A file with another pooling type is an UnsupportedError."""
        request = self.core.request(text, SamplingParams(max_tokens=0), hidden=True)
        with self._awaited([request]):
            with self._lock:  # before another thread's step can end it
                self._add(request)
                job = self.core.requests[request.id]
            self._finish([request.id])
        return job.hidden.vector()

    # --------------------------------------------------------------------------------------------------------- the engine

    def _run(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Completion]:
        """All requests are checked before the first is added; the queue takes them as it has room."""
        requests = [self.core.request(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
        for request in requests:
            self.core.check_fits(request)
        with self._awaited(requests):
            for request in requests:
                self._add(request)
            return self._finish([request.id for request in requests])

    @contextmanager
    def _awaited(self, requests: Sequence[Request]) -> Iterator[None]:
        """The Completions of these are kept for who waits here. However that ends (Ctrl-C too), nothing of them is left behind."""
        self._wanted.update(request.id for request in requests)
        try:
            yield
        finally:
            with self._lock:
                for request in requests:
                    self._abort(request.id)  # of one that is over: nothing
                    self._wanted.discard(request.id)
                    self._done.pop(request.id, None)

    def _add(self, request: Request, stream: Stream | None = None) -> None:
        """Into the queue, as soon as it has room: one thread at a time looks and takes the place."""
        while True:
            with self._lock:
                self._tidy()
                if not self.core.full:
                    if stream is not None:
                        self._streams[request.id] = stream
                    self.core.add(request)
                    return
                self._step()

    def _finish(self, ids: Sequence[str]) -> list[Completion]:
        while any(request_id not in self._done for request_id in ids):
            self._step()
        return [self._done[request_id] for request_id in ids]

    def _step(self) -> None:
        with self._lock:
            self._tidy()
            for output in self.core.step():
                self._sort(output)

    def _tidy(self) -> None:
        """Before the core is touched, with the lock: is it still there, and whose stream is gone?"""
        if self.closed:
            raise UnavailableError("this LLM is closed")
        while self._dropped:
            self.core.abort(self._dropped.popleft())

    def _abort(self, request_id: str) -> bool:
        with self._lock:
            return not self.closed and self.core.abort(request_id)

    def _sort(self, output: Output) -> None:
        stream = self._streams.get(output.request_id)
        if isinstance(output, Delta):
            if stream is not None:
                stream._pending.append(output)
        elif stream is not None:
            stream.completion = output
        elif output.request_id in self._wanted:
            self._done[output.request_id] = output

    def cache_plan(self) -> dict[str, Any]:
        """How the cache was sized: bytes, blocks, the rule that decided. Plain data, for printing."""
        return {**self.core.cache_plan.as_dict(), "text": str(self.core.cache_plan)}

    def check(self) -> None:
        """Prove the block accounting; an AssertionError says what is wrong."""
        with self._lock:  # not in the middle of another thread's step
            self.core.check()

    def close(self) -> None:
        """Release the backend. Idempotent. What another thread is generating, or a stream still open, ends in an UnavailableError."""
        self.closed = True  # before the lock: a thread that steps and steps sees it, and lets go
        with self._lock:  # not in the middle of another thread's step
            self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _is_one(prompts: Any) -> bool:
    """A string or a list of ids is one prompt; a list of strings or of lists is many. An empty list is an empty batch."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence):
        raise ParameterError(
            "prompts", f"{type(prompts).__name__} is neither a prompt nor a list of prompts"
        )
    return len(prompts) > 0 and not isinstance(prompts[0], (str, Sequence))


def _one(params: Any) -> SamplingParams:
    if params is not None and not isinstance(params, SamplingParams):
        raise ParameterError("params", f"{type(params).__name__} is not a SamplingParams")
    return params or SamplingParams()


def _each(params: Any, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [_one(params)] * count
    if len(params) != count:
        raise ParameterError(
            "params", f"{len(params)} for {count} prompts; give one for all, or one for each"
        )
    return [_one(p) for p in params]
