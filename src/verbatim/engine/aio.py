"""AsyncEngine: many clients, one engine. Requests come in from coroutines; the engine's loop runs in a thread of its own.

    engine = AsyncEngine("smollm2")
    stream = await engine.submit("Once upon", SamplingParams(max_tokens=64))
    async for item in stream:                  # Delta, Delta, ..., and last the Completion
        ...

A reader that does not keep up costs no memory beyond its own answer: what is not yet read is merged into one pending Delta a choice.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Self

from verbatim.base.config import EngineConfig
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion, Delta
from verbatim.engine.parts import Parts, load_parts


class AsyncStream:
    """One running request: an async iterator of Deltas that ends with the Completion.

    If the engine fails, iteration raises the VerbatimError. `aclose()` (or leaving `async with`) aborts what still runs."""

    request_id: str
    completion: Completion | None

    def __aiter__(self) -> AsyncIterator[Delta | Completion]:
        return self

    async def __anext__(self) -> Delta | Completion:
        raise NotImplementedError

    async def result(self) -> Completion:
        """Wait for the end, skipping the deltas."""
        raise NotImplementedError

    async def aclose(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncEngine:
    """`options` are the fields of EngineConfig. The constructor loads the model (blocking: run it in a thread if that matters)."""

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2",
        *,
        revision: str | None = None,
        offline: bool = False,
        progress: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        config = EngineConfig(**options)
        self._open(load_parts(model, config, revision=revision, offline=offline, progress=progress), config)

    @classmethod
    def from_parts(cls, parts: Parts, **options: Any) -> Self:
        self = cls.__new__(cls)
        self._open(parts, EngineConfig(**options))
        return self

    def _open(self, parts: Parts, config: EngineConfig) -> None:
        self.parts = parts
        self.config = config

    @property
    def tokenizer(self) -> Any:
        return self.parts.tokenizer

    @property
    def context(self) -> int:
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        raise NotImplementedError

    @property
    def has_template(self) -> bool:
        return self.parts.template is not None

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        tenant: str = "",
    ) -> AsyncStream:
        """Accept a request or refuse it now: RequestError (400), OverloadedError (429, the queue is full), UnavailableError (503, draining
        or closed), BackendError (the engine died). Tokenising and grammar compilation run off the event loop and off the engine's thread."""
        raise NotImplementedError

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
        raise NotImplementedError

    def abort(self, request_id: str) -> bool:
        """End a request now, from any thread; its stream ends with a Completion whose finish reason is "cancel". False: no such request."""
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        """The loop runs and accepts requests (not draining, not failed, not closed)."""
        raise NotImplementedError

    @property
    def error(self) -> BaseException | None:
        """What ended the loop, if it failed."""
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        """running, waiting, blocks, tokens in and out, ...: plain numbers."""
        raise NotImplementedError

    def metrics(self) -> str:
        """The same and the histograms, in the Prometheus text format."""
        raise NotImplementedError

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests (UnavailableError) and wait for the running ones. False: some were cancelled at the timeout."""
        raise NotImplementedError

    def close(self) -> None:
        """Cancel what runs, end the thread, release the backend. Idempotent; from any thread but the engine's."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
