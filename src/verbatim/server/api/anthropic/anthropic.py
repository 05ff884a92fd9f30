"""POST /v1/messages: the Anthropic Messages API, streamed or not.

In: a checked Anthropic request, translated into OpenAI chat fields. Out: a message object, or
Anthropic's stream events. If the last message has the assistant role, the model continues it.
Images, documents and server tools are not supported; a request that sends one gets a
400 that names the field.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.responses import Response

from verbatim.base.json_io import JsonObject, loads_lossless
from verbatim.server.api.anthropic.anthropic_fields import AnthropicCountTokens, AnthropicMessages
from verbatim.server.api.common import generate
from verbatim.server.api.common.chat_request import ChatRequest, count_tokens
from verbatim.server.api.common.request_context import (
    EventStream,
    Json,
    RequestContext,
    new_id,
    sse,
)
from verbatim.server.problem import Problem, invalid
from verbatim.server.process.messages import Generated, WireFinish
from verbatim.text.tools.tool_messages import plain_text, tool_call

FAILED = "Error: "  # prefix of a tool result with is_error
NAMES = {
    "stop": "stop_sequences",
    "think": "thinking",
    "reasoning_effort": "output_config.effort",
    "thinking_budget": "thinking.budget_tokens",
    "tools.parameters": "input_schema",
}
TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}  # not OpenAI's names


def error_body(problem: Problem) -> JsonObject:
    error = {**problem.body()["error"], "type": TYPES.get(problem.status, problem.type)}
    return {"type": "error", "error": error}


def error_event(problem: Problem) -> bytes:
    return sse(error_body(problem), "error")


def chat_messages(body: JsonObject) -> tuple[list[JsonObject], list[str]]:
    """The messages of the chat template, and for each the field that it comes from."""
    out: list[JsonObject] = []
    places: list[str] = []
    if "system" in body:
        out.append({"role": "system", "content": plain_text(body["system"])})
        places.append("system")
    for index, message in enumerate(body["messages"]):
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        _check_blocks(message["role"], blocks, f"messages[{index}].content")
        results = [b for b in blocks if b["type"] == "tool_result"]
        for block in results:
            called = block["tool_use_id"]
            out.append({"role": "tool", "content": _result(block), "tool_call_id": called})
        rest = [b for b in blocks if b["type"] != "tool_result"]
        split = _template_messages(message["role"], rest)
        if not split and not results:
            split = [{"role": message["role"], "content": ""}]
        named = {"name": message["name"]} if "name" in message else {}
        out += [{**made, **named} for made in split]
        places += [f"messages[{index}].content"] * (len(out) - len(places))
    return out, places


def _template_messages(role: str, blocks: list[JsonObject]) -> list[JsonObject]:
    """Split one message into template messages, each with text followed by tool calls.

    Text after a call starts a new message, so that the order of text and calls is kept."""
    out: list[JsonObject] = []
    for block in blocks:
        if block["type"] == "thinking":
            out.append({"role": role, "content": "", "reasoning_content": block["thinking"]})
            continue
        if block["type"] == "text":
            if not block["text"]:
                continue
            if not out or "tool_calls" in out[-1]:
                out.append({"role": role, "content": ""})
            out[-1]["content"] += block["text"]
            continue
        if not out:
            out.append({"role": role, "content": ""})
        arguments = json.dumps(block["input"], ensure_ascii=False)
        call = tool_call(block["id"], block["name"], arguments)
        out[-1].setdefault("tool_calls", []).append(call)
    return out


def _check_blocks(role: str, blocks: list[JsonObject], where: str) -> None:
    """Enforce Anthropic's rules about block order and roles. A chat template would drop or reorder
    blocks that break them."""
    wrong_types, reason = (
        (("tool_use", "thinking"), "belongs to the assistant")
        if role == "user"
        else (("tool_result",), "belongs to the user")
    )
    text_seen = False
    for number, block in enumerate(blocks):
        if block["type"] in wrong_types:
            raise invalid(f"{where}[{number}]", f"a {block['type']} block {reason}")
        if block["type"] == "tool_result" and text_seen:
            raise invalid(f"{where}[{number}]", "tool_result blocks come before text")
        text_seen = text_seen or block["type"] == "text"


def _result(block: JsonObject) -> str:
    """The text of a tool result. Templates have no is_error field, so a prefix marks a failure."""
    text = plain_text(block.get("content"))
    return f"{FAILED}{text}" if block.get("is_error") else text


def as_chat(call: RequestContext, body: JsonObject) -> JsonObject:
    """The request in chat fields."""
    chat: JsonObject = {
        name: body[name]
        for name in ("temperature", "top_k", "top_p", "max_tokens", "seed")
        if name in body
    }
    chat["messages"], call.places = chat_messages(body)
    if body["messages"][-1]["role"] == "assistant":
        _check_prefill(chat["messages"][-1])
        chat["continue_final"] = True
    if "stop_sequences" in body:
        chat["stop"] = body["stop_sequences"]
    if "tools" in body:
        chat["tools"] = [
            {"type": "function", "function": _function(tool)} for tool in body["tools"]
        ]
    choice = body.get("tool_choice", {"type": "auto"})
    chat["tool_choice"] = _tool_choice(choice)
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    return chat | _reasoning(body) | _response_format(body)


def _tool_choice(choice: JsonObject) -> str | JsonObject:
    kind, name = choice["type"], "tool_choice.name"
    if kind == "tool":
        if "name" not in choice:
            raise Problem("missing_parameter", f"{name}: is required", name)
        return {"type": "function", "function": {"name": choice["name"]}}
    if "name" in choice:
        raise invalid(name, f"only with type tool, not {kind}")
    return "required" if kind == "any" else str(kind)


def _reasoning(body: JsonObject) -> JsonObject:
    """`thinking` and output_config.effort in chat fields."""
    out: JsonObject = {}
    if thinking := body.get("thinking"):
        out["think"] = thinking["type"] != "disabled"
        if "budget_tokens" in thinking:
            if not out["think"]:
                why = "thinking is disabled; leave one of them out"
                raise invalid("thinking.budget_tokens", why)
            out["thinking_budget"] = thinking["budget_tokens"]
    if effort := (body.get("output_config") or {}).get("effort"):
        out["reasoning_effort"] = {"max": "xhigh"}.get(effort, effort)
    return out


def _response_format(body: JsonObject) -> JsonObject:
    form = (body.get("output_config") or {}).get("format")
    if form and "output_format" in body:
        raise invalid("output_format", "output_config.format is set too; send one of them")
    form = form or body.get("output_format")
    if not form:
        return {}
    schema = {"name": "output", "schema": form["schema"]}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _check_prefill(last: JsonObject) -> None:
    """Enforce Anthropic's rules for a continued message. Trailing white space is rejected because
    templates trim it, and the model would continue a different text."""
    if last["role"] != "assistant" or last.get("tool_calls") or not last["content"]:
        raise invalid("messages", "the last message has the assistant role and no text to continue")
    if last["content"] != last["content"].rstrip():
        why = "the last message has the assistant role and cannot end in white space"
        raise invalid("messages", why)


def _function(tool: JsonObject) -> JsonObject:
    made = {"name": tool["name"], "description": tool.get("description", "")}
    made["parameters"] = tool["input_schema"]
    return {**made, "strict": True} if tool.get("strict") else made


class MessagesReply:
    def __init__(self, ask: ChatRequest, model: str) -> None:
        self.ask = ask
        self.call = ask.call
        self.base: JsonObject = {"id": new_id("msg_"), "type": "message", "role": "assistant"}
        self.base["model"] = model

    def stop(self, finish: WireFinish | None, called: bool) -> JsonObject:
        reason = generate.finish_reason(finish)
        if called and reason == "stop":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if finish is not None and finish.stop_string:
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.detail}
        ended = "max_tokens" if reason == "length" else "end_turn"
        return {"stop_reason": ended, "stop_sequence": None}

    def usage(self) -> JsonObject:
        usage = generate.usage_of(self.call.runs)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            # Anthropic counts only the tokens that were not in the cache
            "input_tokens": usage["prompt_tokens"] - cached,
            "output_tokens": usage["completion_tokens"],
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
        }

    def extension_fields(self) -> JsonObject:
        runs = self.call.runs
        return {
            "seed": self.ask.params.get("seed"),
            "system_fingerprint": self.call.fingerprint,
            **generate.speculation(runs),
            **generate.extra_fields(self.call),
        }

    @property
    def omits_reasoning(self) -> bool:
        """Whether the request asks for thinking blocks without their text."""
        return (self.call.given.get("thinking") or {}).get("display") == "omitted"

    async def full_response(self) -> Response:
        (done,) = await self.call.results(Generated)
        choice = done.choices[0]
        found = self.ask.pieces(choice.text)
        content: list[JsonObject] = []
        if choice.reasoning:
            shown = "" if self.omits_reasoning else choice.reasoning
            content.append({"type": "thinking", "thinking": shown, "signature": ""})
        content += content_blocks(found)
        calls = any(kind == "call" for kind, _ in found)
        generate.observe_latency(self.call)
        body: JsonObject = {"content": content or [{"type": "text", "text": ""}]}
        ended = {**self.stop(choice.finish, calls), "usage": self.usage()}
        return Json({**self.base, **body, **ended, **self.extension_fields()})

    async def events(self) -> AsyncIterator[bytes]:
        known = {
            # What the prefix cache holds of it is known at the end: message_delta counts it apart.
            # 0: the request still queues, so that its prompt is not tokenised yet.
            "input_tokens": sum(run.prompt_tokens for run in self.call.runs),
            "output_tokens": 0,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
        }
        start = {**self.base, "content": [], "stop_reason": None, "stop_sequence": None}
        start["usage"] = known
        yield sse({"type": "message_start", "message": start}, "message_start")
        parser, finish, blocks = self.ask.parser(), None, BlockEvents()
        async for piece in generate.choice_deltas(self.call):
            if piece is None:
                yield sse({"type": "ping"}, "ping")
                continue
            finish = piece.finish or finish
            for made in blocks.reasoning(piece.reasoning, omit=self.omits_reasoning):
                yield made
            found = [("text", piece.text)] if parser is None else parser.push(piece.text)
            if parser is not None and piece.finish is not None:
                found += parser.finish()
            for kind, value in found:
                for made in blocks.text(value) if kind == "text" else blocks.call(value):
                    yield made
        if not all(run.done is not None for run in self.call.runs):
            return
        for made in blocks.end():
            yield made
        generate.observe_latency(self.call)
        called = parser is not None and parser.calls > 0
        last = {"type": "message_delta", "delta": self.stop(finish, called), "usage": self.usage()}
        yield sse({**last, **self.extension_fields()}, "message_delta")
        yield sse({"type": "message_stop"}, "message_stop")


def content_blocks(found: Sequence[tuple[str, Any]]) -> list[JsonObject]:
    """The blocks of an output's texts and tool calls, in its order."""
    out: list[JsonObject] = []
    for kind, value in found:
        if kind == "call":
            given = loads_lossless(value.arguments)
            out.append({"type": "tool_use", "id": value.id, "name": value.name, "input": given})
        elif out and out[-1]["type"] == "text":
            out[-1]["text"] += value
        else:
            out.append({"type": "text", "text": value})
    return out


class BlockEvents:
    """Numbers the content blocks of a stream; at most one block is open at a time."""

    def __init__(self) -> None:
        self.number = 0
        self.kind = ""  # the open block's type: text or thinking; empty: none is open

    def _event(self, kind: str, **data: Any) -> bytes:
        return sse({"type": kind, "index": self.number, **data}, kind)

    def text(self, text: str) -> list[bytes]:
        return self._add("text", {"type": "text", "text": ""}, {"type": "text_delta"}, text)

    def reasoning(self, text: str, omit: bool = False) -> list[bytes]:
        """`omit`: a block without the text."""
        blank = {"type": "thinking", "thinking": "", "signature": ""}
        made = self._add("thinking", blank, {"type": "thinking_delta"}, text)
        return made[:-1] if omit else made

    def _add(self, kind: str, blank: JsonObject, delta: JsonObject, text: str) -> list[bytes]:
        if not text:
            return []
        out: list[bytes] = []
        if self.kind != kind:
            out = [*self.close(), self._event("content_block_start", content_block=blank)]
            self.kind = kind
        return [*out, self._event("content_block_delta", delta={**delta, kind: text})]

    def call(self, call: Any) -> list[bytes]:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        out = [*self.close(), self._event("content_block_start", content_block=block)]
        self.kind = "tool_use"
        return [*out, self._event("content_block_delta", delta=delta), *self.close()]

    def end(self) -> list[bytes]:
        """An empty output is one empty text block."""
        if self.number or self.kind:
            return self.close()
        self.kind = "text"
        blank = {"type": "text", "text": ""}
        return [self._event("content_block_start", content_block=blank), *self.close()]

    def close(self) -> list[bytes]:
        if not self.kind:
            return []
        out = [self._event("content_block_stop")]
        self.kind = ""
        self.number += 1
        return out


async def create(call: RequestContext) -> Response:
    body = await call.body(AnthropicMessages)
    model = call.served_model()
    form = "output_format" if body.output_format is not None else "output_config"
    ask = ChatRequest(
        call,
        as_chat(call, call.given),
        call.route.fields,
        {**NAMES, "json_schema": form, "response_format": form},
    )
    answer = MessagesReply(ask, model)
    stream = bool(body.stream)
    ask.submit(stream)
    await call.accepted()
    return (
        EventStream(call, answer.events(), error_event) if stream else await answer.full_response()
    )


async def count(call: RequestContext) -> Response:
    await call.body(AnthropicCountTokens)
    call.served_model()
    count = await count_tokens(call, as_chat(call, call.given), NAMES)
    return Json({"input_tokens": count, **generate.warnings_of(call)})
