"""POST /v1/completions: OpenAI's older text endpoint.

In: a checked request. Out: a completion object, or a stream of chunks. Each prompt of a list is
one engine request; the scheduler batches them. Choices are numbered prompt by prompt.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import NamedTuple

from starlette.responses import Response

from verbatim.base.json_io import JsonObject
from verbatim.server.api.common import generate, to_params
from verbatim.server.api.common.field_rules import NO_LIMIT
from verbatim.server.api.common.prompts import parses_special, prompts_of
from verbatim.server.api.common.request_context import (
    DONE,
    KEEP_ALIVE,
    Chunks,
    EventStream,
    Json,
    RequestContext,
    new_id,
    sse,
)
from verbatim.server.api.common.schemas import StreamOptions
from verbatim.server.api.openai.openai_fields import Completions
from verbatim.server.problem import invalid, unsupported
from verbatim.server.process.messages import Generate, Generated, WireChoice

DEFAULT_MAX_TOKENS = 16


class StreamExtras(NamedTuple):
    """What a stream has besides the text."""

    usage: bool  # a last chunk with the usage
    padding: bool  # random padding of each chunk: OpenAI's include_obfuscation
    running_usage: bool  # the usage so far in every chunk


def check_streamed_width(call: RequestContext) -> None:
    given = call.given
    if given.get("stream") and (given.get("best_of") or 1) > given.get("n", 1):
        why = "cannot be streamed, because the best choice is known only at the end"
        raise invalid("best_of", why)


def stream_options(stream: bool | None, options: StreamOptions | None) -> StreamExtras:
    options = options if options and stream else StreamOptions()
    running = bool(options.continuous_usage_stats)
    if running and not options.include_usage:
        where = "stream_options.continuous_usage_stats"
        raise invalid(where, "needs include_usage: true")
    return StreamExtras(bool(options.include_usage), bool(options.include_obfuscation), running)


class CompletionsReply:
    """Builds the response of one request. Id, time and model are the same in every chunk."""

    def __init__(
        self, call: RequestContext, body: Completions, model: str, prompts: list[str | list[int]]
    ) -> None:
        self.call = call
        self.body = body
        self.prompts = prompts
        self.head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": call.fingerprint,
        }
        self.echo = bool(body.echo)
        self.parse = parses_special(body.parse_special, prompts)
        self.top = call.given.get("logprobs")  # n_probs is its other name
        self.params: JsonObject = {}
        self.prompt_params: list[JsonObject] = []  # params of each prompt
        self.seed_per_prompt = False
        beams = call.given.get("num_beams", 1) > 1
        self.n = call.given.get("num_return_sequences") or (1 if beams else call.given.get("n", 1))
        self.places: dict[tuple[int, int], generate.TokenOffsets] = {}

    def prepare(self) -> None:
        values = to_params.sampling_values(self.call.given, self.call.route.fields)
        length = self.call.given.get("max_tokens", DEFAULT_MAX_TOKENS)
        if length != NO_LIMIT:
            values["max_tokens"] = length
        if self.top is not None:
            values["logprobs"] = self.top
            if self.echo:
                values["prompt_logprobs"] = self.top
        if self.echo and self.top is not None and self.body.stream:
            raise unsupported("echo", "cannot be streamed together with logprobs")
        check_streamed_width(self.call)
        state = self.call.state
        names = self.call.names = self.call.aliases
        self.params = to_params.finish_params(values, state, prompts=len(self.prompts), names=names)
        self.rows = to_params.wants_logit_rows(self.call.given, self.params, len(self.prompts))
        if self.rows:
            self.call.admission.enter_context(state.admission.admit_rows())
        self.prompt_params = to_params.for_each_prompt(
            self.params, self.call.given, len(self.prompts), state
        )
        self.seed_per_prompt = len({params.get("seed") for params in self.prompt_params}) > 1
        self.head["seed"] = None if self.seed_per_prompt else self.params.get("seed")

    def seed_of(self, run: int) -> JsonObject:
        """The seed field of a choice, if each prompt has its own seed."""
        return {"seed": self.prompt_params[run]["seed"]} if self.seed_per_prompt else {}

    def choice(self, run: int, choice: WireChoice, done: Generated, echo: str) -> JsonObject:
        logprobs = None
        if self.top is not None:
            logprobs = self.echoed(run, done)
            places = self.output_offsets(len(echo))
            for name, values in generate.completion_logprobs(
                choice.logprobs, self.top, places
            ).items():
                logprobs[name] = [*logprobs[name], *values] if values is not None else None
        out = {
            "text": echo + choice.text,
            "index": run * self.n + choice.index,
            "logprobs": logprobs,
            "finish_reason": generate.finish_reason(choice.finish),
        }
        return out | self.seed_of(run) | choice_reports(choice)

    def echoed(self, run: int, done: Generated) -> JsonObject:
        """Log-probabilities of the echoed prompt; empty lists without echo. A prompt of token ids
        is shown with its control tokens; a text prompt without those that the tokenizer adds."""
        assert self.top is not None
        items = done.prompt_logprobs if self.echo else []
        prompt, facts = self.prompts[run], self.call.state.facts
        skip = isinstance(prompt, str) and not self.parse
        places = generate.TokenOffsets(facts, skip_special=skip, start=True)
        # With parse_special the prompt's own control tokens are visible; those added before it
        # are not.
        if self.parse and isinstance(prompt, str):
            added = [
                item.token in facts.control and not prompt.startswith(generate.token_text(item.raw))
                for item in items
            ]
            places.unseen = added.index(False) if False in added else len(items)
        return generate.completion_logprobs(items, self.top, places)

    def output_offsets(self, before: int = 0) -> generate.TokenOffsets:
        places = generate.TokenOffsets(self.call.state.facts, self.params.get("skip_special", True))
        places.at = before
        return places

    async def full_response(self) -> Response:
        results = await self.call.results(Generated)
        choices = []
        for number, done in enumerate(results):
            echo = self.call.runs[number].text
            choices += [self.choice(number, choice, done, echo) for choice in done.choices]
        generate.observe_latency(self.call)
        return Json.of(
            **self.head,
            choices=choices,
            usage=generate.usage_of(self.call.runs),
            **generate.extra_fields(self.call),
        )

    async def events(self, options: StreamExtras) -> AsyncIterator[bytes]:
        started: set[tuple[int, int]] = set()
        chunks = Chunks(self.head, {"usage": None} if options.usage else {})
        so_far = generate.RunningUsage(self.call.runs)
        async for piece in generate.choice_deltas(self.call):
            if piece is None:
                yield KEEP_ALIVE
                continue
            key = (piece.run, piece.index)
            if self.echo and key not in started:
                started.add(key)
                piece.text = self.call.runs[piece.run].text + piece.text
            padding = generate.obfuscation(piece.text) if options.padding else None
            usage = so_far.after(piece) if options.running_usage else None
            for chunk in chunks.add(self.delta(piece), padding, usage):
                yield chunk
        generate.observe_latency(self.call)
        for chunk in chunks.end(**generate.warnings_of(self.call)):
            yield chunk
        for last in closing_events(self.call, self.head, options.usage):
            yield last
        yield DONE

    def delta(self, piece: generate.ChoiceDelta) -> JsonObject:
        logprobs = None
        if self.top is not None:
            places = self.places.setdefault((piece.run, piece.index), self.output_offsets())
            logprobs = generate.completion_logprobs(piece.logprobs, self.top, places)
        out = {
            "text": piece.text,
            "index": piece.run * self.n + piece.index,
            "logprobs": logprobs,
            "finish_reason": generate.finish_reason(piece.finish),
        }
        return out | ({"explain": piece.explain} if piece.explain else {}) | self.seed_of(piece.run)


def closing_events(call: RequestContext, head: JsonObject, with_usage: bool) -> list[bytes]:
    """A chunk without choices after the last choice, if the client requested usage, a receipt or
    the parameters. The warnings are in the last choice's chunk, which every stream has."""
    more = generate.extra_fields(call)
    more.pop("warnings", None)
    results = [run.generated for run in call.runs]
    choices = [choice for done in results if done is not None for choice in done.choices]
    loops, scores = [choice.loop for choice in choices], [choice.score for choice in choices]
    if not (with_usage or more):
        return []
    usage = {"usage": generate.usage_of(call.runs)} if with_usage else {}
    reports: JsonObject = {"loops": loops} if any(loops) else {}
    reports |= {"scores": scores} if any(score is not None for score in scores) else {}
    return [sse({**head, "choices": [], **usage, **more, **reports})]


def choice_reports(choice: WireChoice) -> JsonObject:
    """Verbatim's extra fields of a choice, if set."""
    reports = {"explain": choice.explain, "loop": choice.loop}
    score = {} if choice.score is None else {"score": choice.score}
    return score | {name: value for name, value in reports.items() if value}


async def completions(call: RequestContext) -> Response:
    body = await call.body(Completions)
    model = call.served_model()
    options = stream_options(body.stream, body.stream_options)
    prompts = prompts_of(body.prompt, "prompt", call)
    made = CompletionsReply(call, body, model, prompts)
    made.prepare()
    stream = bool(body.stream)
    echo, parse, rows = made.echo, made.parse, made.rows
    for prompt, params in zip(prompts, made.prompt_params, strict=True):
        message = Generate(call.next_id(), call.tenant, params, stream, prompt)
        call.submit(replace(message, parse_special=parse, echo=echo, explain_rows=rows))
    await call.accepted()
    if stream:
        return EventStream(call, made.events(options))
    return await made.full_response()
