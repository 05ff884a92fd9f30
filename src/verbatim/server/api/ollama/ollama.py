"""Ollama's /api/chat and /api/generate.

In: a checked Ollama request, translated into OpenAI chat fields. Out: Ollama's JSON objects, one
per line when streamed. Sampling defaults are the model's, else Ollama's documented ones
(base/defaults.py). Machine options (num_gpu, num_thread, ...) and a duration as keep_alive cannot
change a token here: they are accepted, and the answer has a warning that they have no effect.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from verbatim.base.json_io import JsonMapping, JsonObject, dumps, loads_lossless
from verbatim.server.api.common import to_params
from verbatim.server.api.common.chat_request import ChatRequest
from verbatim.server.api.common.field_rules import Rule
from verbatim.server.api.common.generate import (
    chat_logprobs,
    choice_deltas,
    extra_fields,
    finish_reason,
    observe_latency,
    speculation,
    warnings_of,
)
from verbatim.server.api.common.request_context import EventStream, Json, RequestContext, new_id
from verbatim.server.api.ollama.ollama_fields import OLLAMA_PARAMS, OllamaChat, OllamaGenerate
from verbatim.server.model_pool import ServedModel
from verbatim.server.problem import Problem, invalid, unsupported
from verbatim.server.process.messages import Generate, Generated, WireFinish, WireLogprob
from verbatim.text.tools.tool_messages import tool_call

OPTIONS = {**OLLAMA_PARAMS, "stop": "stop"}  # Ollama option -> SamplingParams field
PARAMS = {
    name: Rule("honoured", "", param=name) for name in (*OLLAMA_PARAMS.values(), "penalty_range")
}
NAMES = {ours: f"options.{theirs}" for theirs, ours in OPTIONS.items()} | {
    "max_tokens": "options.num_predict",
    "seed": "options.seed",
    "json_schema": "format",
    "response_format": "format",
    "messages.name": "tool_name",
    "messages.reasoning_content": "thinking",
    "reasoning_effort": "think",
}
RAW_NAMES = {**NAMES, "logprobs": "top_logprobs"}


def sampling(options: JsonObject) -> JsonObject:
    values = {
        ours: options[theirs] for theirs, ours in OPTIONS.items() if options.get(theirs) is not None
    }
    values |= to_params.penalty_window(options.get("repeat_last_n"))
    if options.get("seed", -1) not in (None, -1):  # -1: the server chooses the seed
        values["seed"] = to_params.positive_seed(options["seed"])
    length = options.get("num_predict")
    if length is not None and length > 0:  # -1 and -2 mean up to the context length: the default
        values["max_tokens"] = length
    elif length == 0:
        raise invalid("options.num_predict", "must be at least 1, or negative for no limit")
    return values


def window(call: RequestContext) -> tuple[int | None, bool]:
    """options.num_ctx, and whether num_predict is unset, so that num_ctx limits the output."""
    options = call.given.get("options") or {}
    num_ctx: int | None = options.get("num_ctx")
    if num_ctx is None:
        return None, False
    context = call.state.facts.context
    if num_ctx > context:
        where = "options.num_ctx"
        raise invalid(where, f"{num_ctx} is above this server's context of {context}")
    return num_ctx, (options.get("num_predict") or -1) < 0


def messages_of(rows: list[JsonObject]) -> list[JsonObject]:
    out = []
    for row in rows:
        made: JsonObject = {"role": row["role"], "content": row.get("content", "")}
        made |= {"name": row["name"]} if "name" in row else {}
        if row.get("tool_calls"):
            made["tool_calls"] = []
            for call in row["tool_calls"]:
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                text = json.dumps(arguments, ensure_ascii=False)
                made["tool_calls"].append(tool_call(call.get("id") or new_id("call_"), name, text))
        if "thinking" in row:
            made["reasoning_content"] = row["thinking"]
        if row["role"] == "tool":
            made["tool_call_id"] = row.get("tool_call_id", "")
            if "tool_name" in row:
                made["name"] = row["tool_name"]
        out.append(made)
    return out


def is_zero(duration: Any) -> bool:
    """Whether a keep_alive asks for no time at all: 0, "0" or "0s"."""
    return duration is not None and not any(digit in str(duration) for digit in "123456789")


def asks_to_unload(body: JsonMapping, model: ServedModel) -> bool:
    """No prompt, and keep_alive 0. Such a request never holds its model."""
    asked = body.get("prompt") or body.get("messages")
    return not asked and is_zero(body.get("keep_alive"))


async def load_only(call: RequestContext, body: JsonObject, model: str, empty: Any) -> Response:
    """The answer to a request without a prompt, by which clients load or unload a model."""
    reason = "load"
    if is_zero(body.get("keep_alive")):
        pool = call.state.pool
        if pool is None:
            why = "this server has one model and does not unload it"
            raise unsupported("keep_alive", f"{why}; stop the server to free the memory")
        base = pool.adapters.get(model, model)  # an adapter is unloaded with its model
        if pool.models[base].pinned:
            raise invalid("keep_alive", "the model is pinned (--pin) and is not unloaded")
        if not await pool.unload(base):
            raise Problem("overloaded", "the model is in use; it is not unloaded", retry_after=2)
        reason = "unload"
        call.notices = [line for line in call.notices if not line.startswith("keep_alive:")]
    done = {**empty, "done": True, "done_reason": reason, **warnings_of(call)}
    return Json({**_head(model), **done})


class OllamaReply:
    """Builds the response lines. The text is in message.content (chat) or response (generate)."""

    def __init__(self, call: RequestContext, model: str, ask: ChatRequest | None = None) -> None:
        self.call = call
        self.model = model
        self.ask = ask  # None: a raw prompt
        self.top = call.given.get("top_logprobs") or 0
        self.stream: bool = call.given.get("stream", True)

    def line(self, text: str, calls: list[Any], done: bool, reasoning: str = "") -> JsonObject:
        thinking = {"thinking": reasoning} if reasoning else {}
        head = _head(self.model)
        if self.ask is None or "prompt" in self.ask.body:
            return {**head, "response": text, **thinking, "done": done}
        message: JsonObject = {"role": "assistant", "content": text, **thinking}
        if calls:
            message["tool_calls"] = [
                {"id": c.id, "function": {"name": c.name, "arguments": loads_lossless(c.arguments)}}
                for c in calls
            ]
        return {**head, "message": message, "done": done}

    def closing(self, finish: WireFinish | None) -> JsonObject:
        done = self.call.runs[0].generated
        assert done is not None
        usage, times = done.usage, done.timings
        observe_latency(self.call)
        return {
            "done_reason": finish_reason(finish) or "stop",
            "total_duration": int((self.call.load_seconds + times.total) * 1e9),
            "load_duration": int(self.call.load_seconds * 1e9),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(max(times.first_token - times.queued, 0) * 1e9),
            "eval_count": usage.output_tokens,
            "eval_duration": int(max(times.total - times.first_token, 0) * 1e9),
            "seed": done.seed,
            "system_fingerprint": done.fingerprint,
            **speculation(self.call.runs),
            **extra_fields(self.call),
        }

    async def full_response(self) -> Response:
        (done,) = await self.call.results(Generated)
        choice = done.choices[0]
        text, calls = self.ask.read(choice.text) if self.ask is not None else (choice.text, [])
        line = self.line(text, calls, True, choice.reasoning)
        return Json({**line, **self.logprobs(choice.logprobs), **self.closing(choice.finish)})

    def logprobs(self, items: Sequence[WireLogprob]) -> JsonObject:
        return {"logprobs": chat_logprobs(items, self.top)} if items else {}

    async def events(self) -> AsyncIterator[bytes]:
        parser = self.ask.parser() if self.ask is not None else None
        finish: WireFinish | None = None
        async for piece in choice_deltas(self.call):
            if piece is None:
                continue  # a keep-alive: JSON lines have no comment syntax for it
            finish = piece.finish or finish
            lines = [self.line("", [], False, piece.reasoning)] if piece.reasoning else []
            found = [("text", piece.text)] if parser is None else parser.push(piece.text)
            if parser is not None and piece.finish is not None:
                found += parser.finish()
            lines += [
                self.line(value, [], False) if kind == "text" else self.line("", [value], False)
                for kind, value in found
                if value
            ]
            if piece.logprobs:  # sent at once, also where the parser holds the text back
                lines = lines or [self.line("", [], False)]
                lines[-1] |= self.logprobs(piece.logprobs)
            for line in lines:
                yield dumps(line) + b"\n"
        if all(run.done is not None for run in self.call.runs):
            yield dumps({**self.line("", [], True), **self.closing(finish)}) + b"\n"


def error_line(problem: Problem) -> bytes:
    return dumps({"error": problem.message}) + b"\n"


def structure(body: JsonObject) -> JsonObject:
    form = body.get("format")
    if not form:
        return {}
    if form == "json":
        return {"response_format": {"type": "json_object"}}
    schema = {"name": "format", "schema": form}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def chat_fields(body: JsonObject) -> JsonObject:
    """What both routes share, in chat fields. `think` is true, false, or a level."""
    fields = {**sampling(body.get("options") or {}), **structure(body)}
    fields |= {name: body[name] for name in ("logprobs", "top_logprobs") if name in body}
    think = body.get("think")
    if think is not None:
        fields["reasoning_effort" if isinstance(think, str) else "think"] = think
    return fields


async def chat(call: RequestContext) -> Response:
    asked = await call.body(OllamaChat)
    body, model = call.given, call.served_model()
    if not asked.messages:
        return await load_only(call, body, model, {"message": {"role": "assistant", "content": ""}})
    fields = {**chat_fields(body), "messages": messages_of(body["messages"])}
    last = fields["messages"][-1]
    fields["continue_final"] = last["role"] == "assistant" and not last.get("tool_calls")
    if body.get("tools"):
        fields["tools"] = body["tools"]
    return await _answer(OllamaReply(call, model, ChatRequest(call, fields, PARAMS, NAMES)))


async def generate(call: RequestContext) -> Response:
    asked = await call.body(OllamaGenerate)
    body, model, prompt = call.given, call.served_model(), asked.prompt
    if not prompt:
        return await load_only(call, body, model, {"response": ""})
    if asked.raw:
        return await _raw(call, body, model, prompt)
    if asked.parse_special:
        raise invalid("parse_special", "only with raw; the chat template adds the control tokens")
    system = [{"role": "system", "content": body["system"]}] if "system" in body else []
    fields = {
        **chat_fields(body),
        "messages": [*system, {"role": "user", "content": prompt}],
        "prompt": prompt,
    }
    ask = ChatRequest(call, fields, PARAMS, {**NAMES, "messages": "prompt"})
    return await _answer(OllamaReply(call, model, ask))


async def _raw(call: RequestContext, body: JsonObject, model: str, prompt: str) -> Response:
    if "system" in body:
        raise invalid("system", "only without raw; a raw prompt has no system message")
    if body.get("think") is not None:
        raise invalid("think", "only without raw; a raw prompt has no chat template to switch it")
    values = sampling(body.get("options") or {})
    top = body.get("top_logprobs") or 0
    if body.get("logprobs"):
        values["logprobs"] = top
    elif top:
        raise invalid("top_logprobs", "needs logprobs: true")
    form = structure(body).get("response_format")
    if form:
        values["json_schema"] = form.get("json_schema", {}).get("schema", {"type": "object"})
    to_params.check_text_length("prompt", prompt, call.state.facts)
    state = call.state
    params = to_params.finish_params(values, state, names=RAW_NAMES)
    call.names = RAW_NAMES
    num_ctx, open_end = window(call)
    reply, parse = OllamaReply(call, model), bool(body.get("parse_special"))
    message = Generate(call.next_id(), call.tenant, params, reply.stream, prompt)
    call.submit(replace(message, parse_special=parse, num_ctx=num_ctx, open_end=open_end))
    return await _answer(reply)


async def _answer(reply: OllamaReply) -> Response:
    call = reply.call
    if reply.ask is not None:
        reply.ask.submit(reply.stream, *window(call))
    await call.accepted()
    if not reply.stream:
        return await reply.full_response()
    return EventStream(call, reply.events(), error_line, "application/x-ndjson")


def _head(model: str) -> JsonObject:
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
