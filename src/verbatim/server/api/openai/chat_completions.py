"""POST /v1/chat/completions: OpenAI chat with tools, structured output and log-probabilities.

In: a checked request (chat_request.py). Out: a chat completion object, or a stream of chunks.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.responses import Response

from verbatim.base.json_io import JsonObject
from verbatim.server.api.common import generate
from verbatim.server.api.common.chat_request import ChatRequest, continued
from verbatim.server.api.common.request_context import (
    DONE,
    KEEP_ALIVE,
    Chunks,
    EventStream,
    Json,
    RequestContext,
    new_id,
)
from verbatim.server.api.openai.completions import (
    StreamExtras,
    check_streamed_width,
    choice_reports,
    closing_events,
    stream_options,
)
from verbatim.server.api.openai.openai_fields import ChatCompletions
from verbatim.server.process.messages import Generated, WireChoice, WireFinish, WireLogprob
from verbatim.text.tools.tool_messages import tool_call
from verbatim.text.tools.tool_parser import ParsedCall, ToolParser


def tool_call_object(call: ParsedCall, index: int | None = None) -> JsonObject:
    out = tool_call(call.id, call.name, call.arguments)
    return out if index is None else {"index": index, **out}


class ChatReply:
    def __init__(self, ask: ChatRequest, model: str) -> None:
        self.ask = ask
        self.call = ask.call
        self.top = ask.body.get("top_logprobs") or 0
        self.with_logprobs = bool(ask.body.get("logprobs"))
        self.with_reasoning = ask.body.get("include_reasoning", True)
        self.head: JsonObject = {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": self.call.fingerprint,
            "seed": ask.params.get("seed"),
            "service_tier": "default",
        }

    # ------------------------------------------------------------------------ not streamed

    async def full_response(self) -> Response:
        (done,) = await self.call.results(Generated)
        answer = self._answer(done)
        generate.observe_latency(self.call)
        if self.ask.body.get("store"):
            await self._store(answer)
            answer |= generate.warnings_of(self.call)
        return Json(answer)

    def _answer(self, done: Generated) -> JsonObject:
        choices = [self._choice(choice) for choice in done.choices]
        body = {
            "choices": choices,
            "usage": generate.usage_of(self.call.runs),
            **generate.extra_fields(self.call),
        }
        if "metadata" in self.ask.body:
            body["metadata"] = self.ask.body["metadata"]
        return self.head | body

    async def _store(self, answer: JsonObject) -> None:
        kept = {**answer, "metadata": self.ask.body.get("metadata", {})}
        item = {"object": kept, "messages": self.ask.body["messages"]}
        store, tenant = self.call.state.store, self.call.tenant
        self.call.notices += await store.keep(tenant, "chat", answer["id"], item)

    def _choice(self, choice: WireChoice) -> JsonObject:
        text, calls = self.ask.read(choice.text)
        content = text if text.strip() or not calls else None
        message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning and self.with_reasoning:
            message["reasoning_content"] = choice.reasoning
        if calls:
            message["tool_calls"] = [tool_call_object(c) for c in calls]
        out = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs) if self.with_logprobs else None,
            "finish_reason": reason_with_calls(choice.finish, bool(calls)),
        }
        return out | choice_reports(choice)

    def _logprobs(self, items: Sequence[WireLogprob]) -> JsonObject:
        return {"content": generate.chat_logprobs(items, self.top), "refusal": None}

    # ---------------------------------------------------------------------------- streamed

    async def events(self, options: StreamExtras) -> AsyncIterator[bytes]:
        head = {**self.head, "object": "chat.completion.chunk"}
        chunks = Chunks(head, {"usage": None} if options.usage else {})
        so_far = generate.RunningUsage(self.call.runs)
        parsers: dict[int, ToolParser | None] = {}
        async for piece in generate.choice_deltas(self.call):
            if piece is None:
                yield KEEP_ALIVE
                continue
            usage = so_far.after(piece) if options.running_usage else None
            for choice in self._deltas(piece, parsers):
                text = choice["delta"].get("content") or ""
                padding = generate.obfuscation(text) if options.padding else None
                for chunk in chunks.add(choice, padding, usage):
                    yield chunk
        done = self.call.runs[0].generated
        if done is not None and self.ask.body.get("store"):
            await self._store(self._answer(done))
        for chunk in chunks.end(**generate.warnings_of(self.call)):
            yield chunk
        if done is not None:
            generate.observe_latency(self.call)
            for last in closing_events(self.call, head, options.usage):
                yield last
        yield DONE

    def _deltas(
        self, piece: generate.ChoiceDelta, parsers: dict[int, ToolParser | None]
    ) -> list[JsonObject]:
        """The chunks of one delta: the role first, then text and calls, then the finish reason in a
        separate chunk."""
        deltas: list[JsonObject] = []
        if piece.index not in parsers:
            parsers[piece.index] = self.ask.parser()
            deltas.append({"role": "assistant", "content": "", "refusal": None})
        if piece.reasoning and self.with_reasoning:
            deltas.append({"reasoning_content": piece.reasoning})
        parser = parsers[piece.index]
        if parser is None:
            shown = piece.text or piece.logprobs or piece.explain
            deltas += [{"content": piece.text}] if shown else []
        else:
            before = parser.calls
            found = parser.push(piece.text)
            if piece.finish is not None:
                found += parser.finish()
            deltas += delta_objects(found, before)
            # The parser holds the text back, but its log-probabilities are sent at once.
            if not found and (piece.logprobs or piece.explain):
                deltas.append({"content": ""})
        blank = {"index": piece.index, "delta": {}, "logprobs": None, "finish_reason": None}
        out: list[JsonObject] = [{**blank, "delta": d} for d in deltas]
        if self.with_logprobs and piece.logprobs:
            out[-1]["logprobs"] = self._logprobs(piece.logprobs)
        if piece.explain:
            out[-1]["explain"] = piece.explain
        if piece.finish is not None:
            reason = reason_with_calls(piece.finish, parser is not None and parser.calls > 0)
            out.append({**blank, "finish_reason": reason})
        return out


def delta_objects(found: list[tuple[str, Any]], number: int) -> list[JsonObject]:
    out: list[JsonObject] = []
    for kind, value in found:
        if kind == "text":
            out.append({"content": value})
        else:
            out.append({"tool_calls": [tool_call_object(value, number)]})
            number += 1
    return out


def reason_with_calls(finish: WireFinish | None, called: bool) -> str | None:
    reason = generate.finish_reason(finish)
    return "tool_calls" if called and reason == "stop" else reason


async def chat(call: RequestContext) -> Response:
    body = await call.body(ChatCompletions)
    model = call.served_model()
    call.state.store.check_enabled(bool(body.store))
    options = stream_options(body.stream, body.stream_options)
    fields, stream = continued(call.given), bool(body.stream)
    check_streamed_width(call)
    made = ChatReply(ask := ChatRequest(call, fields, call.route.fields), model)
    ask.submit(stream)
    await call.accepted()
    if stream:
        return EventStream(call, made.events(options))
    return await made.full_response()
