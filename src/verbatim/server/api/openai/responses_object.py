"""The response object of the Responses API and its output items.

In: the results of one ChatRequest. Out: the object as JSON, in progress or finished; a finished one
goes into the store unless store is false.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from verbatim.base.json_io import JsonObject
from verbatim.server.api.common.chat_request import ChatRequest
from verbatim.server.api.common.default_params import default_params
from verbatim.server.api.common.generate import (
    TokenOffsets,
    chat_logprobs,
    extra_fields,
    finish_reason,
    usage_of,
    warnings_of,
)
from verbatim.server.api.common.request_context import new_id
from verbatim.server.api.openai.completions import choice_reports
from verbatim.server.api.openai.responses_input import ENCRYPTED, chat_messages, input_rows, sealed
from verbatim.server.process.messages import WireFinish, WireLogprob


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

    def __init__(self, ask: ChatRequest, body: JsonObject, model: str) -> None:
        self.ask = ask
        self.call = ask.call
        self.body = body
        self.id = new_id("resp_")
        # OpenAI's default is true; a server that stores nothing reports false
        self.stored: bool = body.get("store", self.call.state.store.enabled)
        self.output: list[JsonObject] = []
        defaults = default_params(self.call.state)
        self.base: JsonObject = {
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
            "truncation": body.get("truncation", "disabled"),
            "user": body.get("user"),
            "background": False,
            "seed": ask.params.get("seed"),
            "system_fingerprint": self.call.fingerprint,
        }
        self.base["text"].setdefault("format", {"type": "text"})

    def object(self, status: str, **more: Any) -> JsonObject:
        return {**self.base, "status": status, "output": self.output, "usage": None, **more}

    def message(
        self, text: str, logprobs: Sequence[WireLogprob], status: str = "completed"
    ) -> JsonObject:
        part: JsonObject = {"type": "output_text", "text": text, "annotations": []}
        part["logprobs"] = self.logprobs(logprobs)
        made = {"id": new_id("msg_"), "type": "message", "role": "assistant"}
        return {**made, "status": status, "content": [part]}

    def logprobs(self, items: Sequence[WireLogprob]) -> list[JsonObject]:
        return chat_logprobs(items, self.body.get("top_logprobs", 0))

    async def finished(self, finish: WireFinish | None) -> JsonObject:
        """The final response object: completed, or incomplete when a token limit ended it."""
        usage = usage_of(self.call.runs)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        spelled_usage = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        cut = finish_reason(finish) == "length"
        made = self.object(
            "incomplete" if cut else "completed",
            usage=spelled_usage,
            **extra_fields(self.call),
            **self._reports(),
        )
        if cut:
            made["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            made["completed_at"] = int(time.time())
        if self.stored and (failed := await self._store(made)):
            self.call.notices += failed
            made |= {"store": False, **warnings_of(self.call)}
        return made

    def _reports(self) -> JsonObject:
        """Score, explanations and loop of the choice, if set. A stream sends them at its end."""
        done = self.call.runs[0].generated
        assert done is not None
        return choice_reports(done.choices[0])

    async def _store(self, made: JsonObject) -> list[str]:
        # Instructions are not stored: they apply to one response only.
        messages = self.ask.body["messages"][1 if "instructions" in self.body else 0 :]
        item = {
            "object": made,
            "messages": [*messages, *chat_messages(self.output)[0]],
            "input": input_rows(self.body),
        }
        return await self.call.state.store.keep(self.call.tenant, "response", self.id, item)

    def with_sealed(self, item: JsonObject) -> JsonObject:
        """A finished reasoning item, with `encrypted_content` if the request includes it."""
        if ENCRYPTED not in (self.body.get("include") or ()):
            return item
        return {**item, "encrypted_content": sealed(item["content"][0]["text"])}


def reasoning_item(text: str, status: str) -> JsonObject:
    """The reasoning of a reasoning model as an output item."""
    return {
        "id": new_id("rs_"),
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "status": status,
    }


def function_call_item(call: Any, status: str) -> JsonObject:
    called = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
    return {"id": new_id("fc_"), "type": "function_call", **called, "status": status}
