"""The event stream of the Responses API: typed, numbered events for every output item.

In: the deltas of one ChatRequest. Out: server-sent events, from response.created to
response.completed; a failure ends them with response.failed. A response that is not streamed is
made of the same events, which are dropped.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from verbatim.base.json_io import JsonObject
from verbatim.server.api.common.generate import (
    ChoiceDelta,
    choice_deltas,
    finish_reason,
    obfuscation,
    observe_latency,
)
from verbatim.server.api.common.request_context import KEEP_ALIVE, sse
from verbatim.server.api.openai.responses_object import (
    ResponsesReply,
    TextLogprobs,
    function_call_item,
    reasoning_item,
)
from verbatim.server.problem import Problem
from verbatim.server.process.messages import Generated, WireFinish, WireLogprob

Event = tuple[str, JsonObject]  # its type after "response.", and its data
TEXTS = {  # type of an item -> its text in the names of events
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
}


def begin(item: JsonObject, index: int) -> list[Event]:
    """The events of an item before its text; `index`: its place in the output."""
    empty: JsonObject = {"content": []}
    if item["type"] == "function_call":
        empty = {"arguments": ""}
    # reasoning is sealed when it ends
    kept = {name: value for name, value in item.items() if name != "encrypted_content"}
    added = {"output_index": index, "item": {**kept, **empty, "status": "in_progress"}}
    out: list[Event] = [("output_item.added", added)]
    if item["type"] == "message":
        part = {**item["content"][0], "text": "", "logprobs": []}
        out.append(("content_part.added", {**_where(item, index), "part": part}))
    return out


def delta(item: JsonObject, index: int, text: str, pad: bool = False, **more: object) -> Event:
    padding = {"obfuscation": obfuscation(text)} if pad else {}
    data = {**_where(item, index), "delta": text, **more, **padding}
    return f"{TEXTS[item['type']]}.delta", data


def end(item: JsonObject, index: int) -> list[Event]:
    """The events of a finished item after its text."""
    where = _where(item, index)
    if item["type"] == "function_call":
        text = {"name": item["name"], "arguments": item["arguments"]}
    else:
        (part,) = item["content"]
        text = {name: part[name] for name in ("text", "logprobs") if name in part}
    out: list[Event] = [(f"{TEXTS[item['type']]}.done", {**where, **text})]
    if item["type"] == "message":
        out.append(("content_part.done", {**where, "part": part}))
    return [*out, ("output_item.done", {"output_index": index, "item": item})]


def whole(item: JsonObject, index: int, pad: bool = False) -> list[Event]:
    """All events of a finished item, its text in one delta."""
    if item["type"] == "function_call":
        only = delta(item, index, item["arguments"])
    else:
        (part,) = item["content"]
        shown = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
        only = delta(item, index, part["text"], pad and bool(shown), **shown)
    return [*begin(item, index), only, *end(item, index)]


def _where(item: JsonObject, index: int) -> JsonObject:
    at = {"item_id": item["id"], "output_index": index}
    return at if item["type"] == "function_call" else {**at, "content_index": 0}


class ResponseEvents:
    """Builds the typed, numbered events of one stream."""

    def __init__(self, answer: ResponsesReply, pad: bool) -> None:
        self.answer = answer
        self.pad = pad
        self.number = 0
        self.open: JsonObject | None = None  # the message item that is being streamed
        self.text = ""
        self.reasoning: JsonObject | None = None  # the reasoning item that is being streamed
        self.logprobs: list[WireLogprob] = []
        self.parser = answer.ask.parser()
        self.tokens = TextLogprobs(answer.ask)
        self.response: JsonObject = {}  # finished

    def event(self, kind: str, **data: Any) -> bytes:
        made = sse({"type": kind, "sequence_number": self.number, **data}, kind)
        self.number += 1
        return made

    def _all(self, events: Sequence[Event]) -> list[bytes]:
        return [self.event(f"response.{kind}", **data) for kind, data in events]

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
            for made in await self._end(finish):
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
        # log-probabilities of reasoning belong to no message
        piece.logprobs = piece.logprobs[piece.reasoning_tokens :]
        if self.reasoning is not None and not (piece.text or piece.logprobs):
            return out
        out += self._close_reasoning("completed")
        return out + self._answer_events(piece)

    def _reasoning(self, text: str) -> list[bytes]:
        if not text:
            return []
        out: list[bytes] = []
        at = len(self.answer.output)
        if self.reasoning is None:
            self.reasoning = reasoning_item("", "in_progress")
            out += self._all(begin(self.reasoning, at))
        self.reasoning["content"][0]["text"] += text
        return [*out, *self._all([delta(self.reasoning, at, text)])]

    def _close_reasoning(self, status: str) -> list[bytes]:
        if self.reasoning is None:
            return []
        item = self.answer.with_sealed({**self.reasoning, "status": status})
        self.reasoning = None
        return self._finished(item)

    def _finished(self, item: JsonObject) -> list[bytes]:
        out = self._all(end(item, len(self.answer.output)))
        self.answer.output.append(item)
        return out

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
        assert self.open is not None
        self.text += text
        self.logprobs += logprobs
        shown = {"logprobs": self.answer.logprobs(logprobs)}
        event = delta(self.open, len(self.answer.output), text, self.pad, **shown)
        return [*out, *self._all([event])]

    def _begin(self) -> list[bytes]:
        self.open = self.answer.message("", [], "in_progress")
        return self._all(begin(self.open, len(self.answer.output)))

    def _close(self, status: str) -> list[bytes]:
        if self.open is None:
            return []
        item = {**self.answer.message(self.text, self.logprobs, status), "id": self.open["id"]}
        self.open, self.text, self.logprobs = None, "", []
        return self._finished(item)

    def _call(self, call: Any) -> list[bytes]:
        item = function_call_item(call, "completed")
        self.answer.output.append(item)
        return self._all(whole(item, len(self.answer.output) - 1))

    async def _end(self, finish: WireFinish | None) -> list[bytes]:
        status = "incomplete" if finish_reason(finish) == "length" else "completed"
        out = self._close_reasoning(status)
        if self.open is None and not self.answer.output:  # an empty output is one empty message
            out += self._begin()
        out += self._close(status)
        observe_latency(self.answer.call)
        self.response = await self.answer.finished(finish)
        return [*out, self.event(f"response.{status}", response=self.response)]

    async def full_response(self) -> JsonObject:
        """The response of a request that is not streamed: its output is one delta."""
        (done,) = await self.answer.call.results(Generated)
        choice = done.choices[0]
        piece = ChoiceDelta(0, 0, choice.text, finish=choice.finish, reasoning=choice.reasoning)
        piece.reasoning_tokens = done.usage.reasoning_tokens
        if choice.text or not choice.reasoning:  # else no message has the tokens
            piece.logprobs = choice.logprobs
        self._delta_events(piece)
        await self._end(choice.finish)
        return self.response
