"""AsyncCalls: the methods that AsyncEngine has in common with LLM, written with submit().

In: prompts or conversations. Out: Completions, a DeltaStream, vectors or ranked documents. The
engine itself is in async_engine.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Never, Self, TypeVar, overload

import numpy as np

from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion, Delta
from verbatim.engine.calls.async_awaitable import await_only
from verbatim.engine.calls.async_stream import AsyncStream
from verbatim.engine.calls.call_inputs import (
    ProgressBar,
    Prompt,
    bounded,
    each,
    is_one,
    is_one_chat,
    one,
    progress_bar,
    refuse_foreign,
    refuse_unknown,
)
from verbatim.engine.calls.embed_calls import Ranked, pairs, ranked
from verbatim.engine.calls.engine_base import EngineBase, Message
from verbatim.engine.embed_input import EmbedInput

T = TypeVar("T")
Submit = Callable[[], Awaitable[AsyncStream]]


class DeltaStream:
    """One request as an async iterator of Deltas; afterwards `completion` has the Completion.

    The request is submitted when the first Delta is awaited. `aclose()`, or leaving its
    `async with` block, aborts a running request.

    >>> async def main():
    ...     async with AsyncEngine("smollm2") as engine:
    ...         stream = engine.stream("Hello", SamplingParams(max_tokens=4, seed=1))
    ...         text = "".join([delta.text async for delta in stream])
    ...         return text == stream.completion.text
    >>> asyncio.run(main())
    True
    """

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._stream: AsyncStream | None = None

    @property
    def completion(self) -> Completion | None:
        return None if self._stream is None else self._stream.completion

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._stream is None:
            self._stream = await self._submit()
        item = await anext(self._stream)
        if isinstance(item, Completion):
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        """Abort the request if it is still running."""
        if self._stream is not None:
            await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncCalls(EngineBase):
    """generate, stream, chat, chat_stream, embed and rerank over submit(), submit_chat() and
    _vector()."""

    async def submit(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> AsyncStream:
        raise NotImplementedError

    async def submit_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        params: SamplingParams | None = None,
        *,
        template: Mapping[str, object] | None = None,
    ) -> AsyncStream:
        raise NotImplementedError

    async def _vector(
        self, given: EmbedInput, request_id: str | None, tenant: str
    ) -> tuple[np.ndarray, int]:
        raise NotImplementedError

    @overload
    async def generate(
        self,
        prompts: str | list[int] | tuple[int, ...],
        params: SamplingParams | None = None,
        *,
        progress: bool | Callable[..., ProgressBar] = False,
    ) -> Completion: ...
    @overload
    async def generate(
        self,
        prompts: list[str] | list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | Callable[..., ProgressBar] = False,
    ) -> list[Completion]: ...
    @await_only("stream")
    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | Callable[..., ProgressBar] = False,
        **unknown: Never,
    ) -> Completion | list[Completion]:
        """Generate completions, like LLM.generate().

        prompts: a string or a list of token ids, or a list of them
        params: one SamplingParams for all prompts, or a list with one per prompt
        progress: True shows a bar (tqdm); or a function that makes one
        Returns a Completion for one prompt, a list in the same order for a list of prompts. If one
        request fails, the others are aborted and the error is raised.
        """
        refuse_unknown("generate", unknown)
        given: Any = prompts
        if is_one(given):
            return await _result(self.submit(given, bounded(one(params))))
        asked = zip(given, each(params, len(given)), strict=True)
        calls = [partial(self.submit, prompt, bounded(p)) for prompt, p in asked]
        return await self._all(calls, progress)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **unknown: Never
    ) -> DeltaStream:
        """generate() for one prompt, as an async iterator of Deltas.

        prompt: a string or a list of token ids
        params: a SamplingParams
        Returns a DeltaStream; afterwards its `completion` has the Completion.
        """
        refuse_unknown("stream", unknown)
        return DeltaStream(partial(self.submit, prompt, params))

    @overload
    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Message | Callable[..., object]] | None = None,
        tool_choice: str | Mapping[str, object] = "auto",
        parallel_tool_calls: bool = True,
        progress: bool | Callable[..., ProgressBar] = False,
        **template: Any,
    ) -> Completion: ...
    @overload
    async def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Message | Callable[..., object]] | None = None,
        tool_choice: str | Mapping[str, object] = "auto",
        parallel_tool_calls: bool = True,
        progress: bool | Callable[..., ProgressBar] = False,
        **template: Any,
    ) -> list[Completion]: ...
    @await_only("chat_stream")
    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Message | Callable[..., object]] | None = None,
        tool_choice: str | Mapping[str, object] = "auto",
        parallel_tool_calls: bool = True,
        progress: bool | Callable[..., ProgressBar] = False,
        **template: Any,
    ) -> Completion | list[Completion]:
        """Generate the next message of a conversation, or of a list of them, like LLM.chat().

        messages: a list such as [{"role": "user", "content": "Hello"}], or a list of such lists
        params: one SamplingParams for all, or a list with one per conversation
        tools, tool_choice, parallel_tool_calls: as in LLM.chat()
        template: options of the model's chat template (enable_thinking=...)
        Returns a Completion, or a list of them.
        """
        refuse_foreign("chat", template)
        template |= {
            "tools": tools,
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
        }
        given: Any = messages
        if is_one_chat(given):
            return await _result(self.submit_chat(given, one(params), template=template))
        asked = zip(given, each(params, len(given)), strict=True)
        submit = partial(self.submit_chat, template=template)
        return await self._all([partial(submit, talk, p) for talk, p in asked], progress)

    def chat_stream(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> DeltaStream:
        """chat() for one conversation, as an async iterator of Deltas."""
        refuse_foreign("chat_stream", template)
        return DeltaStream(partial(self.submit_chat, messages, params, template=template))

    async def embed(
        self,
        prompt: str | Sequence[int],
        *,
        prompt_name: str | None = None,
        truncate: bool = False,
        request_id: str | None = None,
        tenant: str = "",
        adapter: str = "",
    ) -> tuple[np.ndarray, int]:
        """The embedding of LLM.embed() (float32 [hidden]), and the number of prompt tokens."""
        given = EmbedInput(prompt, prompt_name=prompt_name, truncate=truncate, adapter=adapter)
        return await self._vector(given, request_id, tenant)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        truncate: bool = False,
        tenant: str = "",
    ) -> list[Ranked]:
        """LLM.rerank(): the documents by their relevance to the query, best first."""
        inputs = pairs(query, documents, top_n, truncate)
        found = await self._in_turn([partial(self._vector, pair, None, tenant) for pair in inputs])
        return ranked(documents, [float(vector[0]) for vector, _ in found], top_n)

    async def _all(self, submits: Sequence[Submit], progress: object) -> list[Completion]:
        """All answers, in order."""
        bar = progress_bar(progress, len(submits), "prompts")

        async def run(submit: Submit) -> Completion:
            done = await _result(submit())
            bar.update(1)
            return done

        try:
            return await self._in_turn([partial(run, submit) for submit in submits])
        finally:
            bar.close()

    async def _in_turn(self, calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
        """All results, in order. A long list waits here, so that it does not fill the queue."""
        places = asyncio.Semaphore(max(1, self.config.max_waiting // 2))

        async def run(call: Callable[[], Awaitable[T]]) -> T:
            async with places:
                return await call()

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run(call)) for call in calls]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]


async def _result(submitted: Awaitable[AsyncStream]) -> Completion:
    async with await submitted as stream:
        return await stream.result()
