"""POST /v1/responses: OpenAI's Responses API.

In: a checked request, translated into chat fields for `ChatRequest`. Out: a response object with
output items, or a stream of typed events. The response is kept in memory unless store is false.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.responses import Response

from verbatim.server.api.api_errors import Problem
from verbatim.server.api.chat_completions import ChatRequest, count_tokens
from verbatim.server.api.completions import choice_reports
from verbatim.server.api.default_params import default_params
from verbatim.server.api.generate import (
    ChoiceDelta,
    TokenOffsets,
    chat_logprobs,
    choice_deltas,
    extra_fields,
    finish_reason,
    obfuscation,
    observe_latency,
    usage_of,
)
from verbatim.server.api.openai_fields import RESPONSES
from verbatim.server.api.request_context import (
    KEEP_ALIVE,
    EventStream,
    Json,
    RequestContext,
    new_id,
    sse,
)
from verbatim.server.api.tools import ParsedCall, plain_text, text_and_calls
from verbatim.server.process.messages import Generated, WireChoice, WireFinish, WireLogprob

NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "json_schema": "text",
    "response_format": "text",
    "reasoning_effort": "reasoning.effort",
}


def chat_messages(items: Any) -> list[dict[str, Any]]:
    """Input items as chat messages. Consecutive calls belong to one assistant message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    out: list[dict[str, Any]] = []
    thought: dict[str, Any] = {}  # of the assistant message that follows
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            text = "".join(part["text"] for part in item.get("content") or [])
            thought = {"reasoning_content": text} if text else {}
        elif kind == "message":
            message = {"role": item["role"], "content": plain_text(item["content"])}
            if item["role"] == "assistant":
                message, thought = message | thought, {}
            out.append(message)
        elif kind == "function_call":
            call = {
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
            if out and out[-1]["role"] == "assistant" and "tool_calls" in out[-1]:
                out[-1]["tool_calls"].append(call)
            else:
                message = {"role": "assistant", "content": "", "tool_calls": [call]}
                out.append(message | thought)
                thought = {}
        else:
            out.append(
                {
                    "role": "tool",
                    "content": plain_text(item["output"]),
                    "tool_call_id": item["call_id"],
                }
            )
    return out


def earlier_messages(call: RequestContext, name: str) -> list[dict[str, Any]]:
    try:
        return list(call.state.store.get(call.tenant, "response", name)["messages"])
    except Problem as problem:  # add the field name, which the store does not know
        field_name = "previous_response_id"
        raise Problem(problem.code, f"{field_name}: {problem.message}", field_name) from None


def as_chat(call: RequestContext, body: dict[str, Any]) -> dict[str, Any]:
    """The request in chat fields: instructions, earlier messages, then the new input."""
    items = body.get("input", "")
    messages = chat_messages(items) or [{"role": "user", "content": ""}]
    if "previous_response_id" in body:
        messages = [*earlier_messages(call, body["previous_response_id"]), *messages]
    if "instructions" in body:
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    chat: dict[str, Any] = {
        name: body[name]
        for name in body
        if RESPONSES[name].param or name in ("seed", "stop", "chat_template_kwargs", "explain_rows")
    }
    chat |= {
        "messages": messages,
        "logprobs": bool(body.get("include") or body.get("top_logprobs")),
    }
    for ours, theirs in (
        ("max_tokens", "max_output_tokens"),
        ("top_logprobs", "top_logprobs"),
        ("parallel_tool_calls", "parallel_tool_calls"),
    ):
        if theirs in body:
            chat[ours] = body[theirs]
    if "tools" in body:
        chat["tools"] = [
            {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
            for tool in body["tools"]
        ]
    choice = body.get("tool_choice", "auto")
    chat["tool_choice"] = (
        {"type": "function", "function": {"name": choice["name"]}}
        if isinstance(choice, dict)
        else choice
    )
    effort = (body.get("reasoning") or {}).get("effort")
    if effort is not None:
        chat["reasoning_effort"] = effort
    form = (body.get("text") or {}).get("format") or {"type": "text"}
    if form["type"] == "json_schema":
        form = {
            "type": "json_schema",
            "json_schema": {k: v for k, v in form.items() if k != "type"},
        }
    chat["response_format"] = form
    return chat


class TextLogprobs:
    """Assigns log-probabilities to the text parts of an output with tool calls.

    A message gets the tokens that start inside its text; tokens of tool calls are dropped."""

    def __init__(self, ask: ChatRequest) -> None:
        self._places = TokenOffsets(ask.call.state.facts, ask.params.get("skip_special", True))
        self._waiting: list[tuple[int, WireLogprob]] = []  # (start offset, token)

    def add(self, items: Sequence[WireLogprob]) -> None:
        self._waiting += [(self._places.place(item.token, item.raw), item) for item in items]

    def within(self, start: int, end: int) -> list[WireLogprob]:
        """Tokens of the next text part. Earlier tokens belong to a call and are dropped."""
        taken = [item for at, item in self._waiting if start <= at < end]
        self._waiting = [(at, item) for at, item in self._waiting if at >= end]
        return taken

    def rest(self) -> list[WireLogprob]:
        """Tokens after the last text part: hidden end tokens."""
        taken, self._waiting = [item for _, item in self._waiting], []
        return taken


class ResponsesReply:
    """Builds the response object; output items are in the order of the output."""

    def __init__(self, ask: ChatRequest, body: dict[str, Any], model: str) -> None:
        self.ask = ask
        self.call = ask.call
        self.body = body
        self.id = new_id("resp_")
        # OpenAI's default is true; a server that stores nothing reports false
        self.stored: bool = body.get("store", self.call.state.store.enabled)
        self.output: list[dict[str, Any]] = []
        defaults = default_params(self.call.state)
        self.base: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata", {}),
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "previous_response_id": body.get("previous_response_id"),
            "reasoning": {"effort": None, "summary": None, **(body.get("reasoning") or {})},
            "service_tier": "default",
            "store": self.stored,
            "temperature": body.get("temperature", defaults.temperature),
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools", []),
            "top_logprobs": body.get("top_logprobs", 0),
            "top_p": body.get("top_p", defaults.top_p),
            "truncation": "disabled",
            "user": body.get("user"),
            "background": False,
            "seed": ask.params.get("seed"),
            "system_fingerprint": self.call.fingerprint,
        }
        self.base["text"].setdefault("format", {"type": "text"})

    def object(self, status: str, **more: Any) -> dict[str, Any]:
        return {**self.base, "status": status, "output": self.output, "usage": None, **more}

    def message(
        self, text: str, logprobs: Sequence[WireLogprob], status: str = "completed"
    ) -> dict[str, Any]:
        part = {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self.logprobs(logprobs),
        }
        return {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [part],
        }

    def logprobs(self, items: Sequence[WireLogprob]) -> list[dict[str, Any]]:
        return chat_logprobs(items, self.body.get("top_logprobs", 0))

    def finished(self, finish: WireFinish | None) -> dict[str, Any]:
        """The final response object: completed, or incomplete when a token limit ended it."""
        usage = usage_of(self.call.runs)
        spelled_usage = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        cut = finish_reason(finish) == "length"
        made = self.object(
            "incomplete" if cut else "completed",
            usage=spelled_usage,
            **extra_fields(self.call.runs),
            **self._reports(),
        )
        if cut:
            made["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            made["completed_at"] = int(time.time())
        self._store(made)
        return made

    def _reports(self) -> dict[str, Any]:
        """Score, explanations and loop of the choice, if set. A stream sends them at its end."""
        done = self.call.runs[0].generated
        assert done is not None
        return choice_reports(done.choices[0])

    def _store(self, made: dict[str, Any]) -> None:
        if self.stored:
            # Instructions are not stored: they apply to one response only.
            messages = self.ask.body["messages"][1 if "instructions" in self.body else 0 :]
            item = {
                "object": made,
                "messages": [*messages, *chat_messages(self.output)],
                "input": input_rows(self.body),
            }
            self.call.state.store.put(self.call.tenant, "response", self.id, item)

    # ------------------------------------------------------------------------ not streamed

    async def full_response(self) -> Response:
        (done,) = await self.call.results(Generated)
        choice = done.choices[0]
        text, calls, logprobs = self._read(choice)
        status = "incomplete" if choice.finish.reason == "length" else "completed"
        if choice.reasoning:
            self.output.append(reasoning_item(choice.reasoning, "completed" if text else status))
        if text.strip() or not (calls or choice.reasoning):
            self.output.append(self.message(text, logprobs, status))
        self.output += [function_call_item(c, status) for c in calls]
        observe_latency(self.call)
        return Json(self.finished(choice.finish))

    def _read(self, choice: WireChoice) -> tuple[str, list[ParsedCall], Sequence[WireLogprob]]:
        parser = self.ask.parser()
        if parser is None:
            return choice.text, [], choice.logprobs
        found = [*parser.push(choice.text), *parser.finish()]
        tokens = TextLogprobs(self.ask)
        tokens.add(choice.logprobs)
        logprobs = [item for span in parser.spans for item in tokens.within(*span)]
        if not found or found[-1][0] == "text":
            logprobs += tokens.rest()
        return *text_and_calls(found), logprobs


def reasoning_item(text: str, status: str) -> dict[str, Any]:
    """The thought of a reasoning model as an output item."""
    return {
        "id": new_id("rs_"),
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "status": status,
    }


def function_call_item(call: Any, status: str) -> dict[str, Any]:
    return {
        "id": new_id("fc_"),
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }


def input_rows(body: dict[str, Any]) -> list[dict[str, Any]]:
    items = body.get("input", "")
    rows = [{"role": "user", "content": items}] if isinstance(items, str) else items
    out = []
    for row in rows:
        made = {"id": new_id("msg_"), "type": "message", **row}
        if made["type"] == "message":
            kind = "output_text" if made["role"] == "assistant" else "input_text"
            made["content"] = [
                {
                    "type": kind,
                    "text": plain_text(made["content"]),
                    **({"annotations": []} if kind == "output_text" else {}),
                }
            ]
            made.setdefault("status", "completed")
        out.append(made)
    return out


class Events:
    """Builds the typed, numbered events of one stream."""

    def __init__(self, answer: ResponsesReply, pad: bool) -> None:
        self.answer = answer
        self.pad = pad
        self.number = 0
        self.open: dict[str, Any] | None = None  # the message item that is being streamed
        self.text = ""
        self.thought: dict[str, Any] | None = None  # the reasoning item that is being streamed
        self.logprobs: list[WireLogprob] = []
        self.parser = answer.ask.parser()
        self.tokens = TextLogprobs(answer.ask)

    def event(self, kind: str, **data: Any) -> bytes:
        made = sse({"type": kind, "sequence_number": self.number, **data}, kind)
        self.number += 1
        return made

    async def events(self) -> AsyncIterator[bytes]:
        answer = self.answer
        yield self.event("response.created", response=answer.object("in_progress"))
        yield self.event("response.in_progress", response=answer.object("in_progress"))
        finish: WireFinish | None = None
        async for piece in choice_deltas(answer.call):
            if piece is None:
                yield KEEP_ALIVE
                continue
            finish = piece.finish or finish
            for made in self._delta_events(piece):
                yield made
        if all(run.done is not None for run in answer.call.runs):
            for made in self._end(finish):
                yield made

    def failed(self, problem: Problem) -> bytes:
        response = self.answer.object(
            "failed", error={"code": "server_error", "message": problem.message}
        )
        fields = {
            "code": problem.code,
            "message": problem.message,
            "param": problem.param,
            "error": problem.body()["error"],
        }
        return self.event("error", **fields) + self.event("response.failed", response=response)

    def _delta_events(self, piece: ChoiceDelta) -> list[bytes]:
        out = self._reasoning(piece.reasoning)
        if self.thought is not None and not piece.text:
            return out  # log-probabilities of a thought belong to no message
        out += self._close_thought("completed")
        return out + self._answer_events(piece)

    def _reasoning(self, text: str) -> list[bytes]:
        if not text:
            return []
        out: list[bytes] = []
        at = {"output_index": len(self.answer.output), "content_index": 0}
        if self.thought is None:
            self.thought = reasoning_item("", "in_progress")
            blank = {**self.thought, "content": []}
            out.append(
                self.event(
                    "response.output_item.added", output_index=at["output_index"], item=blank
                )
            )
        self.thought["content"][0]["text"] += text
        kind = "response.reasoning_text.delta"
        return [*out, self.event(kind, item_id=self.thought["id"], **at, delta=text)]

    def _close_thought(self, status: str) -> list[bytes]:
        if self.thought is None:
            return []
        item, self.thought = {**self.thought, "status": status}, None
        at = {"output_index": len(self.answer.output)}
        text = item["content"][0]["text"]
        self.answer.output.append(item)
        return [
            self.event(
                "response.reasoning_text.done", item_id=item["id"], content_index=0, **at, text=text
            ),
            self.event("response.output_item.done", **at, item=item),
        ]

    def _answer_events(self, piece: ChoiceDelta) -> list[bytes]:
        parser = self.parser
        if parser is None:
            return self._text(piece.text, piece.logprobs)
        self.tokens.add(piece.logprobs)
        found, out = parser.push(piece.text), []
        if piece.finish is not None:
            found += parser.finish()
        for kind, value in found:
            if kind == "text":
                out += self._text(value, self.tokens.within(*parser.spans.pop(0)))
            else:
                out += self._close("completed")
                out += self._call(value)
        if piece.finish is not None and (self.open is not None or not self.answer.output):
            out += self._text("", self.tokens.rest())
        return out

    def _text(self, text: str, logprobs: Sequence[WireLogprob]) -> list[bytes]:
        out: list[bytes] = []
        if not text and not logprobs:
            return out
        if self.open is None:
            out += self._begin()
        self.text += text
        self.logprobs += logprobs
        padding = {"obfuscation": obfuscation(text)} if self.pad else {}
        fields = {"delta": text, "logprobs": self.answer.logprobs(logprobs), **padding}
        out.append(self.event("response.output_text.delta", **self._where(), **fields))
        return out

    def _begin(self) -> list[bytes]:
        self.open = self.answer.message("", [], "in_progress")
        blank = {**self.open, "content": []}
        return [
            self.event(
                "response.output_item.added", output_index=len(self.answer.output), item=blank
            ),
            self.event(
                "response.content_part.added", **self._where(), part=self.open["content"][0]
            ),
        ]

    def _where(self) -> dict[str, Any]:
        assert self.open is not None
        return {
            "item_id": self.open["id"],
            "output_index": len(self.answer.output),
            "content_index": 0,
        }

    def _close(self, status: str) -> list[bytes]:
        if self.open is None:
            return []
        item = {**self.answer.message(self.text, self.logprobs, status), "id": self.open["id"]}
        part = item["content"][0]
        out = [
            self.event(
                "response.output_text.done",
                **self._where(),
                text=self.text,
                logprobs=part["logprobs"],
            ),
            self.event("response.content_part.done", **self._where(), part=part),
            self.event(
                "response.output_item.done", output_index=len(self.answer.output), item=item
            ),
        ]
        self.answer.output.append(item)
        self.open, self.text, self.logprobs = None, "", []
        return out

    def _call(self, call: Any) -> list[bytes]:
        item = function_call_item(call, "completed")
        at = {"item_id": item["id"], "output_index": len(self.answer.output)}
        out = [
            self.event(
                "response.output_item.added",
                output_index=at["output_index"],
                item={**item, "arguments": "", "status": "in_progress"},
            ),
            self.event("response.function_call_arguments.delta", **at, delta=call.arguments),
            self.event(
                "response.function_call_arguments.done",
                **at,
                name=call.name,
                arguments=call.arguments,
            ),
            self.event("response.output_item.done", output_index=at["output_index"], item=item),
        ]
        self.answer.output.append(item)
        return out

    def _end(self, finish: WireFinish | None) -> list[bytes]:
        status = "incomplete" if finish_reason(finish) == "length" else "completed"
        out = self._close_thought(status)
        if self.open is None and not self.answer.output:  # an empty output is one empty message
            out += self._begin()
        out += self._close(status)
        observe_latency(self.answer.call)
        out.append(self.event(f"response.{status}", response=self.answer.finished(finish)))
        return out


# ---------------------------------------------------------------------------------- routes


async def create(call: RequestContext) -> Response:
    body = await call.body()
    model = call.state.check_model(body.get("model"))
    call.state.store.check_enabled(bool(body.get("store")))
    if "stream_options" in body and not body.get("stream"):
        raise Problem(
            "invalid_parameter", "stream_options: only with stream: true", "stream_options"
        )
    ask = ChatRequest(call, as_chat(call, body), RESPONSES, NAMES)
    answer = ResponsesReply(ask, body, model)
    stream = bool(body.get("stream"))
    ask.submit(stream)
    await call.accepted()
    if stream:
        pad = bool((body.get("stream_options") or {}).get("include_obfuscation"))
        made = Events(answer, pad)
        return EventStream(call, made.events(), made.failed)
    return await answer.full_response()


async def count(call: RequestContext) -> Response:
    body = await call.body()
    call.state.check_model(body.get("model"))
    count = await count_tokens(call, as_chat(call, body), NAMES)
    return Json({"object": "response.input_tokens", "input_tokens": count})
