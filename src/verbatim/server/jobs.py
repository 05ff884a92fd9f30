"""The engine process's side of each request: a submit message in; accepted, deltas, and exactly one done or error out.

generate    {id, prompt: str | ids, parse} or {id, messages, template}, params, tenant, stream, echo; num_ctx, open_end; hidden: an embedding too
tokenize    {id, text, special, parse} or {id, messages, template};    detokenize {id, ids}
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verbatim.base.errors import BackendError, ContextError, ParameterError, UnsupportedError, VerbatimError
from verbatim.base.params import FIELDS, STRUCTURE, SamplingParams
from verbatim.base.records import Choice, Completion, Delta, Finish, Timings, TokenLogprob, Usage
from verbatim.engine.readers import Feed
from verbatim.engine.request import encoded, typed_control
from verbatim.observe.receipt import digest_of
from verbatim.server import wire
from verbatim.server.fair import FairQueue, Waiting
from verbatim.server.problems import Problem, problem_of
from verbatim.server.toolformat import detect_format

if TYPE_CHECKING:
    from verbatim.engine.aio import AsyncEngine
    from verbatim.engine.job import Output

log = logging.getLogger("verbatim.engine")


# what can leave nothing to draw, the narrowest first: that is where a client can do something about it
EXCLUDING = ("allowed_token_ids", "banned_token_ids", *STRUCTURE, "no_repeat_ngram", "min_tokens")


class Gone(Exception):
    """The client left while its request waited for its turn: the engine never saw it."""


def spelled_finish(finish: Finish, params: SamplingParams, by_token: bool) -> list[Any]:
    """Reason and detail; of a stop also whether the detail is a stop string, and not a word of ours that reads like one; of an error also the fields
    it speaks of, as a refusal names them: the one its words begin with, or all that exclude ids."""
    if finish.reason == "stop":
        by_structure = finish.detail in STRUCTURE and getattr(params, finish.detail) is not None
        return [finish.reason, finish.detail, finish.detail in params.stop and not by_token and not by_structure]
    if finish.reason != "error":
        return [finish.reason, finish.detail]
    told = finish.detail.partition(":")[0]
    fields = [told] if told in FIELDS else [name for name in EXCLUDING if getattr(params, name) != FIELDS[name].default]
    return [finish.reason, finish.detail, fields]


def forget_rows(records: Sequence[dict[str, Any]]) -> None:
    """What only a what-if needs is a hundred times the rest. The engine keeps the records, these very ones, to the end of the answer: so they are emptied
    as soon as they are there, or one request with a receipt for each of 64 prompts would take a gigabyte."""
    for record in records:
        record["row"] = record["mask"] = None


def held_to(params: SamplingParams, prompt: int, num_ctx: int, open_end: bool) -> SamplingParams:
    """The parameters under Ollama's num_ctx, which prompt and answer must fit together. An end that the client left open comes where there is no
    more room; a length that it asked for is given, or refused, as with the context itself."""
    room = num_ctx - prompt
    if room < 1:
        raise ContextError(
            f"the prompt has {prompt} tokens and options.num_ctx is {num_ctx}, which leaves no room for an answer",
            param="prompt",
        )
    if params.max_tokens is None or open_end:
        return replace(params, max_tokens=room if params.max_tokens is None else min(params.max_tokens, room))
    if params.max_tokens > room:
        raise ContextError(
            f"the prompt has {prompt} tokens, and with {params.max_tokens} tokens of answer it needs {prompt + params.max_tokens} of an "
            f"options.num_ctx of {num_ctx}; shorten the prompt or ask for at most {room}",
            param="max_tokens",
        )
    return params


class Job:
    """One request here. `aborted` may come before the engine knows of it: a client can leave while its prompt is tokenised."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.turn: asyncio.Future[None] | None = None  # while it waits for its turn
        self.end: asyncio.Future[Completion] | None = None  # once the engine has it
        self.params = SamplingParams()
        self.rows = False  # explanations are sent with their rows of logits
        self.streamed = False
        self.aborted = False


class Jobs:
    def __init__(self, engine: AsyncEngine, outbox: wire.Outbox, start: dict[str, Any]) -> None:
        self._engine = engine
        self._outbox = outbox
        self._start = start
        self._jobs: dict[str, Job] = {}
        slots = engine.config.max_running + max(
            engine.config.max_running // 8, 1
        )  # a few in reserve, so that no step waits for us
        self._fair = FairQueue(slots, self._cache_tokens(), start["cache_share"])
        self._feed = Feed(self._hear)

    def _cache_tokens(self) -> int:
        scheduler = self._engine.core.scheduler
        return int(min(pool.total for pool in scheduler.cache.pools) * self._engine.parts.backend.block_size)

    def facts(self) -> dict[str, Any]:
        """What the HTTP side must know of the model, in plain data."""
        engine, tokenizer = self._engine, self._engine.tokenizer
        template = engine.parts.template
        source = "\n".join(getattr(template, "sources", {}).values())
        return {
            "name": engine.parts.name,
            "digest": engine.parts.digest,
            "fingerprint": engine.fingerprint,
            "context": engine.context,
            "vocab": tokenizer.vocab_size,
            "hidden": engine.parts.backend.spec.hidden,
            "has_template": engine.has_template,
            "template_tools": template is not None and template.takes_tools,
            "template_calls": template is not None and template.takes_calls,
            "tool_format": detect_format(source),
            "control": [t for t in range(tokenizer.vocab_size) if tokenizer.is_control(t)],
            "space_prefix": bool(getattr(tokenizer, "space_prefix", False)),
            "longest_token": max((len(tokenizer.token_bytes(t)) for t in range(tokenizer.vocab_size)), default=1) or 1,
        }

    def submit(self, message: wire.Message) -> None:
        job = self._jobs[message["id"]] = Job()
        work: Callable[[Job, wire.Message], Awaitable[None]] = getattr(self, "_" + message["kind"])
        job.task = asyncio.create_task(self._guard(work, job, message))

    def abort(self, request_id: str) -> None:
        """Twice, too late and unknown are all fine."""
        job = self._jobs.get(request_id)
        if job is not None and not job.aborted:
            job.aborted = True
            if job.end is not None:
                self._engine.abort(request_id)
            elif job.turn is not None and not job.turn.done():
                job.turn.cancel()

    def cancel(self) -> None:
        for job in self._jobs.values():
            if job.task is not None:
                job.task.cancel()

    async def _guard(self, work: Callable[[Job, wire.Message], Awaitable[None]], job: Job, message: wire.Message) -> None:
        """Whatever happens, the parent hears exactly one end."""
        try:
            await work(job, message)
        except asyncio.CancelledError:
            raise
        except Gone:
            self._done(Completion(message["id"], (), (), Usage(), Timings(), 0, self._engine.fingerprint), job)
        except Exception as error:
            problem = problem_of(error)
            if isinstance(error, BackendError):
                problem = Problem(
                    "engine_died", "the engine failed while this request ran; it is being restarted", retry_after=2
                )
            if problem.code == "internal_error":
                log.exception("request %s failed", message["id"])
            self._outbox.put({"t": "error", "id": message["id"], "problem": problem.to_wire()})
        finally:
            del self._jobs[message["id"]]

    # ------------------------------------------------------------------------------------------------------- generate

    async def _generate(self, job: Job, message: wire.Message) -> None:
        job.params = params = SamplingParams.from_mapping(message["params"])
        place = await self._wait_turn(job, message, params)
        try:
            await self._run(job, message)
        finally:
            self._fair.release(place)
            self._next_turns()

    async def _wait_turn(self, job: Job, message: wire.Message, params: SamplingParams) -> Waiting:
        job.turn = asyncio.get_running_loop().create_future()
        claim = await self._claim(message, params) if self._fair.share < 1 else 0
        place = self._fair.add(job.turn, tenant=message["tenant"], priority=params.priority, width=params.width, claim=claim)
        self._next_turns()
        try:
            await job.turn
        except asyncio.CancelledError:
            place.gone = True
            if not job.aborted:
                raise
            raise Gone from None
        return place

    def _next_turns(self) -> None:
        while (place := self._fair.take()) is not None:
            if place.item.done():  # left between its turn and now
                self._fair.release(place)
            else:
                place.item.set_result(None)

    async def _claim(self, message: wire.Message, params: SamplingParams) -> int:
        prompt = message.get("prompt")
        known = (
            len(prompt) if isinstance(prompt, list) else len(await asyncio.to_thread(self._encode, {"text": prompt, **message}))
        )
        longest = self._engine.context - known if params.max_tokens is None else params.max_tokens
        return params.width * min(
            known + max(longest, 0), self._engine.context, int(message.get("num_ctx") or self._engine.context)
        )

    async def _run(self, job: Job, message: wire.Message) -> None:
        request_id = message["id"]
        prompt = await self._prompt(job, message)
        end: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        job.end, job.streamed, job.rows = end, message["stream"], message.get("rows", False)
        line = await self._engine.submit_to(
            self._feed,
            request_id,
            prompt,
            job.params,
            messages=message.get("messages") if prompt is None else None,
            template=message.get("template"),
            tenant=message["tenant"],
            hidden=message.get("hidden", False),
        )
        if job.aborted:
            self._engine.abort(request_id)
        accepted: wire.Message = {"t": "accepted", "id": request_id}
        if message.get("echo"):
            accepted["text"] = self._echo(message["prompt"])
        self._outbox.put(accepted)
        completion = await end
        whole = message.get("hidden") and completion.choices[0].finish.reason != "cancel"
        vector = line.embedding().tolist() if whole else None
        self._done(completion, job, vector)

    async def _prompt(self, job: Job, message: wire.Message) -> str | Sequence[int] | None:
        """The prompt as the engine takes it; None: a conversation, which it encodes itself. Encoded here is what must be read in another way than
        the engine's own, or must be counted before the engine sees it."""
        prompt, num_ctx = message.get("prompt"), message.get("num_ctx")
        if isinstance(prompt, list) or not (message.get("parse") or num_ctx):
            return prompt
        ids = await asyncio.to_thread(self._encode, {"text": prompt, **message})
        if num_ctx:
            job.params = held_to(job.params, len(ids), num_ctx, message["open_end"])
        return ids

    def _hear(self, items: list[tuple[str, Output | VerbatimError]]) -> None:
        """What a step gave to all requests: their deltas leave in one message, their ends one by one, each from its own task."""
        deltas = []
        for request_id, item in items:
            job = self._jobs.get(request_id)
            if job is None or job.end is None or job.end.done():
                continue
            if isinstance(item, Delta):
                if item.explain and not job.rows:
                    forget_rows(item.explain)
                if job.streamed and job.rows:
                    self._outbox.put(
                        {"t": "deltas", "d": [[request_id, self._delta(item, job)]]}
                    )  # a message of its own: they are large
                elif job.streamed:
                    deltas.append([request_id, self._delta(item, job)])
            elif isinstance(item, Completion):
                job.end.set_result(item)
            else:
                job.end.set_exception(item)
        if deltas:
            self._outbox.put({"t": "deltas", "d": deltas})

    def _echo(self, prompt: str | Sequence[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        text: str = self._engine.tokenizer.decode(list(prompt), skip_special=False)
        return text

    def _delta(self, delta: Delta, job: Job) -> list[Any]:
        finish = None if delta.finish is None else self._finish(delta.finish, delta.token_ids, job)
        return [delta.index, delta.text, finish, list(delta.token_ids), self._logprobs(delta.logprobs), list(delta.explain)]

    def _finish(self, finish: Finish, ids: Sequence[int], job: Job) -> list[Any]:
        ends = {*self._engine.parts.eos_ids, *job.params.stop_token_ids}
        return spelled_finish(finish, job.params, by_token=bool(ids) and ids[-1] in ends)

    def _done(self, completion: Completion, job: Job, vector: list[float] | None = None) -> None:
        if not job.rows:  # those that came with the end, and in no delta
            for choice in completion.choices:
                forget_rows(choice.explain)
        usage, times = completion.usage, completion.timings
        self._outbox.put(
            {
                "t": "done",
                "id": completion.request_id,
                "choices": [self._choice(c, job) for c in completion.choices],
                "usage": [
                    usage.prompt_tokens,
                    usage.output_tokens,
                    usage.cached_tokens,
                    usage.drafted_tokens,
                    usage.accepted_tokens,
                ],
                "timings": [times.queued, times.first_token, times.total, times.preemptions, times.saved],
                "seed": completion.seed,
                "fingerprint": completion.fingerprint,
                "warnings": list(completion.warnings),
                "prompt_logprobs": self._logprobs(completion.prompt_logprobs),
                "prompt_ids": list(completion.prompt_ids) if completion.prompt_logprobs else [],
                "prompt_first": self._first_bytes(completion),
                "receipt": self._receipt(completion.receipt),
                "vector": vector,
            }
        )

    def _first_bytes(self, completion: Completion) -> bytes:
        """A prompt's first token has no log-probability, and so no record that would hold its bytes."""
        if not completion.prompt_logprobs:
            return b""
        raw: bytes = self._engine.tokenizer.token_bytes(completion.prompt_ids[0])
        return raw

    def _receipt(self, receipt: dict[str, Any] | None) -> dict[str, Any] | None:
        """Under the name clients know: what the operator typed may be a path."""
        if receipt is None:
            return None
        named = {**receipt, "model": self._start["served_name"]}
        return {**named, "sha256": digest_of(named)}

    def _choice(self, choice: Choice, job: Job) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.text,
            "ids": list(choice.token_ids),
            "finish": self._finish(choice.finish, choice.token_ids, job),
            "logprobs": self._logprobs(choice.logprobs),
            "explain": list(choice.explain),
            "score": choice.score,
            "loop": choice.loop,
        }

    def _logprobs(self, items: Sequence[TokenLogprob | None]) -> list[Any]:
        """With each token's bytes, because OpenAI's answers show them and the HTTP side has no tokenizer."""
        spell = self._engine.tokenizer.token_bytes
        return [
            item and [item.token, item.logprob, spell(item.token), [[t, lp, spell(t)] for t, lp in item.top]] for item in items
        ]

    # --------------------------------------------------------------------------------------------------------- others

    async def _tokenize(self, job: Job, message: wire.Message) -> None:
        ids = await asyncio.to_thread(self._encode, message)
        spell = self._engine.tokenizer.token_bytes
        plain = "text" in message and not message["parse"] and len(ids) <= self._engine.context
        warnings = await asyncio.to_thread(typed_control, self._engine.tokenizer, message["text"]) if plain else ()
        self._outbox.put(
            {"t": "done", "id": message["id"], "ids": ids, "bytes": [spell(t) for t in ids], "warnings": list(warnings)}
        )

    def _encode(self, message: wire.Message) -> list[int]:
        tokenizer = self._engine.tokenizer
        if message.get("messages") is not None:
            if not self._engine.has_template:
                raise UnsupportedError("messages", "this model has no chat template")
            return self._engine.encode_chat(message["messages"], **(message.get("template") or {}))
        return encoded(tokenizer, message["text"], special=bool(message.get("parse")), bare=not message.get("special", True))

    async def _detokenize(self, job: Job, message: wire.Message) -> None:
        tokenizer = self._engine.tokenizer
        for token in message["ids"]:
            if not 0 <= token < tokenizer.vocab_size:
                raise ParameterError("tokens", f"{token} is not a token id of this model (0 to {tokenizer.vocab_size - 1})")
        text = await asyncio.to_thread(tokenizer.decode, message["ids"], skip_special=False)
        self._outbox.put({"t": "done", "id": message["id"], "text": text})
