"""The event stream of the Responses API: typed, numbered events for every output item.

In: the deltas of one ChatRequest. Out: server-sent events, from response.created to
response.completed; a failure ends them with response.failed.
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
from verbatim.server.process.messages import WireFinish, WireLogprob


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
        at = {"output_index": len(self.answer.output), "content_index": 0}
        if self.reasoning is None:
            self.reasoning = reasoning_item("", "in_progress")
            blank = {**self.reasoning, "content": []}
            out.append(
                self.event(
                    "response.output_item.added", output_index=at["output_index"], item=blank
                )
            )
        self.reasoning["content"][0]["text"] += text
        kind = "response.reasoning_text.delta"
        return [*out, self.event(kind, item_id=self.reasoning["id"], **at, delta=text)]

    def _close_reasoning(self, status: str) -> list[bytes]:
        if self.reasoning is None:
            return []
        item = self.answer.with_sealed({**self.reasoning, "status": status})
        self.reasoning = None
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

    def _where(self) -> JsonObject:
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

    async def _end(self, finish: WireFinish | None) -> list[bytes]:
        status = "incomplete" if finish_reason(finish) == "length" else "completed"
        out = self._close_reasoning(status)
        if self.open is None and not self.answer.output:  # an empty output is one empty message
            out += self._begin()
        out += self._close(status)
        observe_latency(self.answer.call)
        out.append(self.event(f"response.{status}", response=await self.answer.finished(finish)))
        return out
