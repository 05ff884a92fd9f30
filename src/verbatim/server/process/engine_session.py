"""The requests of the engine process.

A Generate, Tokenize, Detokenize or Inspect message comes in; Accepted, Deltas and exactly one
result (Generated, Tokenized, Detokenized, Inspected or Refused) go out. A Generate waits in the
queue of its tenant, which bounds the prompts tokenised at once, then runs in the engine, whose
scheduler shares each step among the tenants. All requests share one OutputSink, so the deltas of a
step leave in one message.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from verbatim.base.defaults import report
from verbatim.base.errors import (
    BackendError,
    ContextError,
    ParameterError,
    UnsupportedError,
    VerbatimError,
)
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion, Delta, Timings, Usage
from verbatim.engine.calls.async_stream import OutputSink
from verbatim.engine.embed_input import EmbedInput
from verbatim.engine.read_prompt import conversation, encoded, typed_control
from verbatim.schedule.fair_queue import FairQueue, Waiting
from verbatim.server.problem import Problem, problem_of
from verbatim.server.process import messages, wire
from verbatim.server.process.lens_queries import Inspector
from verbatim.server.process.results import ResultEncoder, drop_rows, facts_of

if TYPE_CHECKING:
    from verbatim.engine.calls.async_engine import AsyncEngine
    from verbatim.engine.running_request import Output

log = logging.getLogger("verbatim.engine")


class AbortedInQueue(Exception):
    """The request was aborted while it waited in its tenant's queue; the engine never saw it."""


def fit_num_ctx(
    params: SamplingParams, prompt: int, num_ctx: int, open_end: bool
) -> SamplingParams:
    """Apply Ollama's num_ctx, the limit on prompt and output together. If the client set no
    max_tokens, the output is shortened to fit; a max_tokens that does not fit is an error, as with
    the model's context."""
    room = num_ctx - prompt
    if room < 1:
        why = f"the prompt has {prompt} tokens and options.num_ctx is {num_ctx}"
        raise ContextError(f"{why}, which leaves no room for an answer", param="prompt")
    if params.max_tokens is None or open_end:
        fitting = room if params.max_tokens is None else min(params.max_tokens, room)
        return params.with_(max_tokens=fitting)
    if params.max_tokens > room:
        raise ContextError(
            f"the prompt has {prompt} tokens, and with {params.max_tokens} tokens of answer it"
            f" needs {prompt + params.max_tokens} of an options.num_ctx of {num_ctx}; "
            f"shorten the prompt or ask for at most {room}",
            param="max_tokens",
        )
    return params


class OpenRequest:
    """One request of this process. It may be aborted before the engine has it: a client can
    disconnect while its prompt is being tokenised."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.scheduled: asyncio.Future[None] | None = None  # resolved when it leaves its queue
        self.end: asyncio.Future[Completion] | None = None  # created when it enters the engine
        self.params = SamplingParams()
        self.explain_rows = False
        self.streamed = False
        self.aborted = False


class EngineSession:
    def __init__(self, engine: AsyncEngine, outbox: wire.Outbox, start: messages.Start) -> None:
        self._engine = engine
        self._outbox = outbox
        self._results = ResultEncoder(engine, start.served_name)
        self._inspector = Inspector(engine)
        self._open: dict[str, OpenRequest] = {}
        running = engine.config.max_running
        # A reserve of an eighth waits in the engine, so the batch refills as soon as a sequence
        # ends.
        slots = running + max(running // 8, 1)
        make_queue = partial(FairQueue, slots, self._cache_tokens(), start.cache_share)
        self._queues: defaultdict[str, FairQueue] = defaultdict(make_queue)  # by tenant
        self._sink = OutputSink(self._send_step)

    def _cache_tokens(self) -> int:
        pools = self._engine.core.scheduler.cache.pools
        return int(min(pool.total for pool in pools) * self._engine.loaded.backend.block_size)

    def facts(self) -> messages.ModelFacts:
        return facts_of(self._engine)

    def submit(self, message: messages.Work) -> None:
        request = self._open[message.request_id] = OpenRequest()
        request.task = asyncio.create_task(self._run(request, message))

    def abort(self, request_id: str) -> None:
        """Stop a request. Ignored if it is unknown, finished or aborted already."""
        request = self._open.get(request_id)
        if request is not None and not request.aborted:
            request.aborted = True
            if request.end is not None:
                self._engine.abort(request_id)
            elif request.scheduled is not None and not request.scheduled.done():
                request.scheduled.cancel()

    def cancel(self) -> None:
        for request in self._open.values():
            if request.task is not None:
                request.task.cancel()

    async def _run(self, request: OpenRequest, message: messages.Work) -> None:
        """Send exactly one result, whatever happens."""
        request_id = message.request_id
        try:
            await self._work(request, message)
        except asyncio.CancelledError:
            raise
        except AbortedInQueue:
            fingerprint = self._engine.fingerprint
            nothing = Completion(request_id, (), (), Usage(), Timings(), 0, fingerprint)
            self._outbox.put(self._results.completion(nothing, request.params))
        except Exception as error:
            problem = problem_of(error)
            if isinstance(error, BackendError):
                reason = "the engine failed while this request ran; it is being restarted"
                problem = Problem("engine_died", reason, retry_after=2)
            if problem.code == "internal_error":
                log.exception("request %s failed", request_id)
            self._outbox.put(messages.Refused.of(request_id, problem))
        finally:
            del self._open[request_id]

    def _work(self, request: OpenRequest, message: messages.Work) -> Awaitable[None]:
        match message:
            case messages.Generate():
                return self._generate(request, message)
            case messages.Tokenize():
                return self._tokenize(message)
            case messages.Detokenize():
                return self._detokenize(message)
            case messages.Inspect():
                return self._inspect(message)

    # ------------------------------------------------------------------------------------- generate

    async def _generate(self, request: OpenRequest, message: messages.Generate) -> None:
        params = SamplingParams.from_mapping(message.params).with_origins(message.origins)
        request.params = params
        queue = self._queues[message.tenant]
        entry = await self._wait_in_queue(queue, request, message, params)
        try:
            await self._run_in_engine(request, message)
        finally:
            queue.release(entry)
            self._release_from(queue)

    async def _wait_in_queue(
        self,
        queue: FairQueue,
        request: OpenRequest,
        message: messages.Generate,
        params: SamplingParams,
    ) -> Waiting:
        request.scheduled = asyncio.get_running_loop().create_future()
        entry = queue.add(
            request.scheduled,
            priority=params.priority,
            width=params.width,
            claim=await self._claim(message, params) if queue.share < 1 else 0,
        )
        self._release_from(queue)
        try:
            await request.scheduled
        except asyncio.CancelledError:
            entry.gone = True
            self._release_from(queue)  # it may have blocked the requests behind it
            if not request.aborted:
                raise
            raise AbortedInQueue from None
        return entry

    @staticmethod
    def _release_from(queue: FairQueue) -> None:
        while (entry := queue.take()) is not None:
            if entry.item.done():  # aborted after the queue chose it
                queue.release(entry)
            else:
                entry.item.set_result(None)

    async def _claim(self, message: messages.Generate, params: SamplingParams) -> int:
        """Maximum KV cache of the request, in tokens."""
        prompt, context = message.prompt, self._engine.context
        if isinstance(prompt, list):
            known = len(prompt)
        else:
            known = len(await asyncio.to_thread(self._encode_prompt, message))
        output = context - known if params.max_tokens is None else params.max_tokens
        return params.width * min(known + max(output, 0), context, message.num_ctx or context)

    async def _run_in_engine(self, request: OpenRequest, message: messages.Generate) -> None:
        prompt = await self._prompt(request, message)
        request.end = end = asyncio.get_running_loop().create_future()
        request.streamed, request.explain_rows = message.stream, message.explain_rows
        handle = await self._engine.submit_to(
            *(self._sink, message.request_id, prompt, request.params),
            messages=message.messages if prompt is None else None,
            template=message.template,
            tenant=message.tenant,
            hidden=message.embedding,
        )
        if request.aborted:
            self._engine.abort(message.request_id)
        text = self._text_of(message.prompt) if message.echo else ""
        self._outbox.put(messages.Accepted(message.request_id, text, handle.prompt_tokens))
        completion = await end
        complete = message.embedding and completion.finish.reason not in ("cancel", "error")
        embedding = handle.embedding().tolist() if complete else None
        if not request.explain_rows:  # records that came with the completion, in no delta
            for choice in completion.choices:
                drop_rows(choice.explain)
        done = self._results.completion(completion, request.params, embedding)
        if message.report_params:
            done = replace(done, params=report(request.params, completion.seed))
        self._outbox.put(done)

    async def _prompt(
        self, request: OpenRequest, message: messages.Generate
    ) -> str | Sequence[int] | EmbedInput | None:
        """The prompt for the engine; None: it encodes the conversation itself. A prompt is encoded
        here if its control tokens are parsed, or if its length decides about num_ctx."""
        prompt, num_ctx = message.prompt, message.num_ctx
        if message.embedding and prompt is not None:
            return EmbedInput(prompt, message.document, message.prompt_name, message.truncate)
        if isinstance(prompt, list) and message.reasoning:
            return conversation(prompt, self._engine.reasoning, self._engine.tokenizer)
        if isinstance(prompt, list) or not (message.parse_special or num_ctx):
            return prompt
        ids = await asyncio.to_thread(self._encode_prompt, message)
        if num_ctx:
            request.params = fit_num_ctx(request.params, len(ids), num_ctx, message.open_end)
        return ids

    def _send_step(self, items: list[tuple[str, Output | VerbatimError]]) -> None:
        """Send the outputs of one step. The deltas of all requests leave in one message; the result
        of a request is sent by its own task. Deltas with rows of logits are large and leave in
        messages of their own."""
        deltas: list[messages.WireDelta] = []
        for request_id, item in items:
            request = self._open.get(request_id)
            if request is None or request.end is None or request.end.done():
                continue
            if isinstance(item, Delta):
                if item.explain and not request.explain_rows:
                    drop_rows(item.explain)
                if request.streamed and request.explain_rows:
                    self._outbox.put(messages.Deltas([self._results.delta(item, request.params)]))
                elif request.streamed:
                    deltas.append(self._results.delta(item, request.params))
            elif isinstance(item, Completion):
                request.end.set_result(item)
            else:
                request.end.set_exception(item)
        if deltas:
            self._outbox.put(messages.Deltas(deltas))

    def _text_of(self, prompt: str | Sequence[int] | None) -> str:
        if isinstance(prompt, str):
            return prompt
        text: str = self._engine.tokenizer.decode(list(prompt or ()), skip_special=False)
        return text

    def _encode_prompt(self, message: messages.Generate) -> list[int]:
        if message.messages is not None:
            return self._encode_chat(message)
        assert isinstance(message.prompt, str), "a prompt of token ids is encoded already"
        return encoded(self._engine.tokenizer, message.prompt, special=message.parse_special)

    def _encode_chat(self, message: messages.Generate | messages.Tokenize) -> list[int]:
        if not self._engine.has_template:
            raise UnsupportedError("messages", "this model has no chat template")
        assert message.messages is not None, "neither a text nor a conversation"
        return self._engine.encode_chat(message.messages, **(message.template or {}))

    def _render_chat(self, message: messages.Tokenize, warnings: list[str]) -> str:
        template = self._engine.loaded.template
        if template is None:
            raise UnsupportedError("messages", "this model has no chat template")
        text: str = template.render(message.messages, warnings=warnings, **(message.template or {}))
        return text

    # ---------------------------------------------------------------------- tokenize and detokenize

    async def _tokenize(self, message: messages.Tokenize) -> None:
        tokenizer, text = self._engine.tokenizer, message.text
        if message.render:
            found: list[str] = []
            prompt = await asyncio.to_thread(self._render_chat, message, found)
            self._outbox.put(messages.Detokenized(message.request_id, prompt, found))
            return
        ids = await asyncio.to_thread(self._encode_text, message)
        warnings: Sequence[str] = getattr(ids, "warnings", ())
        if text is not None and not message.parse_special and len(ids) <= self._engine.context:
            warnings = await asyncio.to_thread(typed_control, tokenizer, text)
        raw = [tokenizer.token_bytes(token) for token in ids]
        self._outbox.put(messages.Tokenized(message.request_id, ids, raw, warnings))

    def _encode_text(self, message: messages.Tokenize) -> list[int]:
        if message.text is None:
            return self._encode_chat(message)
        special, bare = message.parse_special, not message.add_special
        return encoded(self._engine.tokenizer, message.text, special=special, bare=bare)

    async def _detokenize(self, message: messages.Detokenize) -> None:
        tokenizer, ids = self._engine.tokenizer, message.token_ids
        for token in ids:
            if not 0 <= token < tokenizer.vocab_size:
                last = tokenizer.vocab_size - 1
                why = f"{token} is not a token id of this model (0 to {last})"
                raise ParameterError("tokens", why)
        text = await asyncio.to_thread(tokenizer.decode, ids, skip_special=False)
        self._outbox.put(messages.Detokenized(message.request_id, text))

    async def _inspect(self, message: messages.Inspect) -> None:
        data = await self._inspector.answer(message.what, message.arguments, message.tenant)
        self._outbox.put(messages.Inspected(message.request_id, data))
