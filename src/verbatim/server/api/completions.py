"""POST /v1/completions: text in, text out, as OpenAI's older endpoint does it.

A list of prompts becomes as many requests of the engine, in one step together; choices are numbered prompt by prompt.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response

from verbatim.server.api import to_params
from verbatim.server.api.api_errors import Problem
from verbatim.server.api.field_table import COMPLETIONS
from verbatim.server.api.generate import (
    Piece,
    Places,
    completion_logprobs,
    extras,
    finish_reason,
    obfuscation,
    observe,
    pieces,
    spelled,
    usage_of,
)
from verbatim.server.api.request_context import (
    DONE,
    KEEP_ALIVE,
    Call,
    Chunks,
    EventStream,
    Json,
    new_id,
    sse,
)
from verbatim.server.process.messages import Generate, Generated, WireChoice

DEFAULT_MAX_TOKENS = 16


def prompts_of(value: Any, name: str, call: Call) -> list[str | list[int]]:
    """The four spellings of `prompt` as a list; hopeless and senseless ones are refused here, before the engine sees them."""
    many = isinstance(value, list) and not isinstance(value[0], int)
    prompts: list[str | list[int]] = list(value) if many else [value]
    limit = call.state.limits.max_prompts
    if len(prompts) > limit:
        raise Problem(
            "invalid_parameter",
            f"{name}: {len(prompts)} prompts are above this server's limit of {limit}",
            name,
        )
    for i, prompt in enumerate(prompts):
        where = f"{name}[{i}]" if many else name
        if not prompt:
            raise Problem(
                "invalid_parameter",
                f"{where}: is empty; give at least one character or token",
                where,
            )
        if isinstance(prompt, str):
            to_params.check_text_length(where, prompt, call.state.facts)
        else:
            to_params.check_id_count(where, prompt, call.state.facts)
            to_params.check_vocabulary(where, prompt, call.state.facts)
    return prompts


def parses_special(body: dict[str, Any], prompts: list[str | list[int]]) -> bool:
    if body.get("parse_special") and not isinstance(prompts[0], str):
        raise Problem(
            "invalid_parameter",
            "parse_special: only with text; token ids are what they are",
            "parse_special",
        )
    return bool(body.get("parse_special"))


def stream_options(body: dict[str, Any]) -> tuple[bool, bool]:
    """(include_usage, include_obfuscation)"""
    options = body.get("stream_options")
    if options is not None and not body.get("stream"):
        raise Problem(
            "invalid_parameter", "stream_options: only with stream: true", "stream_options"
        )
    options = options or {}
    return bool(options.get("include_usage")), bool(options.get("include_obfuscation"))


class Completions:
    """One request's answer. Its name, time and model are the same in every chunk."""

    def __init__(
        self, call: Call, body: dict[str, Any], model: str, prompts: list[str | list[int]]
    ) -> None:
        self.call = call
        self.body = body
        self.prompts = prompts
        self.head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": call.state.facts.fingerprint,
        }
        self.echo = bool(body.get("echo"))
        self.parse = parses_special(body, prompts)
        self.top = body.get("logprobs")
        self.params: dict[str, Any] = {}
        self.asked: list[dict[str, Any]] = []  # params of each prompt
        self.own_seeds = False
        self.n = body.get("num_return_sequences") or (
            1 if body.get("num_beams", 1) > 1 else body.get("n", 1)
        )
        self.places: dict[tuple[int, int], Places] = {}

    def ask(self) -> None:
        values = to_params.sampling_values(self.body, COMPLETIONS)
        values["max_tokens"] = self.body.get("max_tokens", DEFAULT_MAX_TOKENS)
        if self.top is not None:
            values["logprobs"] = self.top
            if self.echo:
                values["prompt_logprobs"] = self.top
        if self.echo and self.top is not None and self.body.get("stream"):
            raise Problem(
                "unsupported_parameter",
                "echo: with logprobs it is not offered in a stream; leave one out",
                "echo",
            )
        if self.body.get("stream") and (self.body.get("best_of") or 1) > self.body.get("n", 1):
            raise Problem(
                "invalid_parameter",
                "best_of: cannot be streamed, because the best is known only at the end",
                "best_of",
            )
        state = self.call.state
        self.params = to_params.finish_params(
            values, limits=state.limits, facts=state.facts, prompts=len(self.prompts)
        )
        self.rows = to_params.wants_rows(self.body, self.params, len(self.prompts))
        if self.rows:
            self.call.room.enter_context(state.admit_rows())
        self.asked = to_params.for_each_prompt(self.params, self.body, len(self.prompts))
        self.own_seeds = len({params.get("seed") for params in self.asked}) > 1
        self.head["seed"] = None if self.own_seeds else self.params.get("seed")

    def seed_of(self, run: int) -> dict[str, Any]:
        """Where prompts have seeds of their own, each choice says which it was drawn with."""
        return {"seed": self.asked[run]["seed"]} if self.own_seeds else {}

    def choice(self, run: int, choice: WireChoice, done: Generated, echo: str) -> dict[str, Any]:
        logprobs = None
        if self.top is not None:
            logprobs = self.echoed(run, done)
            places = self.answer_places(len(echo))
            for name, values in completion_logprobs(choice.logprobs, self.top, places).items():
                logprobs[name] = [*logprobs[name], *values] if values is not None else None
        out = {
            "text": echo + choice.text,
            "index": run * self.n + choice.index,
            "logprobs": logprobs,
            "finish_reason": finish_reason(choice.finish),
        }
        return out | self.seed_of(run) | reports_of(choice)

    def echoed(self, run: int, done: Generated) -> dict[str, Any]:
        """Log-probabilities of the prompt that stands before the answer; of nothing without echo. A prompt of ids is shown with its control
        tokens, one of text without those that the model wants around it."""
        assert self.top is not None
        items, prompt, facts = (
            done.prompt_logprobs if self.echo else [],
            self.prompts[run],
            self.call.state.facts,
        )
        places = Places(facts, skip_special=isinstance(prompt, str) and not self.parse, start=True)
        if self.parse and isinstance(
            prompt, str
        ):  # its own control tokens are in the text, those put before it are not
            typed = (
                n
                for n, item in enumerate(items)
                if item.token not in facts.control or prompt.startswith(spelled(item.raw))
            )
            places.unseen = next(typed, len(items))
        return completion_logprobs(items, self.top, places)

    def answer_places(self, before: int = 0) -> Places:
        places = Places(self.call.state.facts, self.params.get("skip_special", True))
        places.at = before
        return places

    async def whole(self) -> Response:
        results = await self.call.results(Generated)
        choices = [
            self.choice(number, choice, done, self.call.runs[number].text)
            for number, done in enumerate(results)
            for choice in done.choices
        ]
        observe(self.call)
        return Json(
            {
                **self.head,
                "choices": choices,
                "usage": usage_of(self.call.runs),
                "seed": None if self.own_seeds else results[0].seed,
                **extras(self.call.runs),
            }
        )

    async def events(self, with_usage: bool, pad: bool) -> AsyncIterator[bytes]:
        started: set[tuple[int, int]] = set()
        chunks = Chunks(self.head, {"usage": None} if with_usage else {})
        async for piece in pieces(self.call):
            if piece is None:
                yield KEEP_ALIVE
                continue
            key = (piece.run, piece.index)
            if self.echo and key not in started:
                started.add(key)
                piece.text = self.call.runs[piece.run].text + piece.text
            yield chunks.spell(self.delta(piece), obfuscation(piece.text) if pad else None)
        observe(self.call)
        for last in closing(self.call, self.head, with_usage):
            yield last
        yield DONE

    def delta(self, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self.top is not None:
            places = self.places.setdefault((piece.run, piece.index), self.answer_places())
            logprobs = completion_logprobs(piece.logprobs, self.top, places)
        out = {
            "text": piece.text,
            "index": piece.run * self.n + piece.index,
            "logprobs": logprobs,
            "finish_reason": finish_reason(piece.finish),
        }
        return out | ({"explain": piece.explain} if piece.explain else {}) | self.seed_of(piece.run)


def closing(call: Call, head: dict[str, Any], with_usage: bool) -> list[bytes]:
    """After the last choice: a chunk without choices where usage or a receipt was asked for; warnings and loops otherwise as comments."""
    more = extras(call.runs)
    results = [run.generated for run in call.runs]
    loops = [choice.loop for done in results if done is not None for choice in done.choices]
    if with_usage or "receipt" in more:
        usage = {"usage": usage_of(call.runs)} if with_usage else {}
        return [
            sse(
                {**head, "choices": [], **usage, **more, **({"loops": loops} if any(loops) else {})}
            )
        ]
    said = [f": warning: {warning}\n\n" for warning in more.get("warnings", [])]
    said += [
        f": loop: choice {i} repeats its last {n} tokens\n\n" for i, n in enumerate(loops) if n
    ]
    return [line.encode() for line in said]


def reports_of(choice: WireChoice) -> dict[str, Any]:
    """Members of our own, where there is something to report."""
    told = {"score": choice.score, "explain": choice.explain, "loop": choice.loop}
    return {name: value for name, value in told.items() if value}


async def completions(call: Call) -> Response:
    body = await call.body()
    model = call.state.check_model(body["model"])
    with_usage, pad = stream_options(body)
    prompts = prompts_of(body["prompt"], "prompt", call)
    made = Completions(call, body, model, prompts)
    made.ask()
    stream = bool(body.get("stream"))
    for prompt, params in zip(prompts, made.asked, strict=True):
        message = Generate(
            call.next_id(),
            call.tenant,
            params,
            stream,
            prompt,
            parse_special=made.parse,
            echo=made.echo,
            explain_rows=made.rows,
        )
        call.submit(message)
    await call.accepted()
    if stream:
        return EventStream(call, made.events(with_usage, pad))
    return await made.whole()
