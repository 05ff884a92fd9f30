"""Input of the Responses API: items become chat messages, request fields become chat fields."""

from __future__ import annotations

import base64
from typing import Any

from verbatim.base.json_io import JsonMapping, JsonObject
from verbatim.server.api.common.field_rules import rules_of
from verbatim.server.api.common.request_context import RequestContext, new_id
from verbatim.server.api.openai.openai_fields import Responses
from verbatim.server.problem import Problem, invalid
from verbatim.text.tools.tool_messages import plain_text, tool_call

LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"  # `include`
# fields that chat completions have too, besides the sampling parameters
PASSED = (
    *("seed", "stop", "chat_template_kwargs", "explain_rows"),
    *("top_logprobs", "parallel_tool_calls"),
)
# engine parameter or chat field -> field of the Responses API, for error messages
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "json_schema": "text",
    "response_format": "text",
    "reasoning_effort": "reasoning.effort",
    "tools.parameters": "parameters",
}


def chat_messages(items: Any) -> tuple[list[JsonObject], list[str]]:
    """Input items as chat messages, and for each the item that it starts with. Consecutive calls
    belong to one assistant message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}], ["input"]
    out: list[JsonObject] = []
    places: list[str] = []
    reasoning = False  # the last message is reasoning, which the next answer or call completes
    for index, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "reasoning":
            text = _sealed_text(item, f"input[{index}]")
            if not text:
                continue
            out.append({"role": "assistant", "content": "", "reasoning_content": text})
        elif kind == "message":
            message = {"role": item["role"], "content": plain_text(item["content"])}
            message |= {"name": item["name"]} if "name" in item else {}
            if reasoning and item["role"] == "assistant":
                out[-1] |= message
            else:
                out.append(message)
        elif kind == "function_call":
            call = tool_call(item["call_id"], item["name"], item["arguments"])
            if not reasoning and not (out and "tool_calls" in out[-1]):
                out.append({"role": "assistant", "content": ""})
            out[-1].setdefault("tool_calls", []).append(call)
        else:
            result = plain_text(item["output"])
            out.append({"role": "tool", "content": result, "tool_call_id": item["call_id"]})
        reasoning = kind == "reasoning"
        if len(places) < len(out):
            places.append(f"input[{index}]")
    return out, places


def sealed(reasoning: str) -> str:
    """Reasoning as `encrypted_content`: one word that clients send back as it is."""
    return base64.b64encode(reasoning.encode()).decode()


def _sealed_text(item: JsonMapping, place: str) -> str:
    """The text of a reasoning item, from its content or from what sealed() made of it."""
    found, text = item.get("encrypted_content"), ""
    try:
        text = base64.b64decode(found or "", validate=True).decode()
    except ValueError:
        name = f"{place}.encrypted_content"
        why = "is none that this server made; leave it out"
        raise invalid(name, f"{why}") from None
    return "".join(part["text"] for part in item.get("content") or []) or text


async def earlier_messages(call: RequestContext, name: str) -> list[JsonObject]:
    """The conversation of a stored response. Its reasoning is the server's own, so it is left
    out where the chat template reads none."""
    try:
        item = await call.state.store.get(call.tenant, "response", name)
    except Problem as problem:  # add the field name, which the store does not know
        field_name = "previous_response_id"
        raise Problem(problem.code, f"{field_name}: {problem.message}", field_name) from None
    found: list[JsonObject] = item["messages"]
    if call.state.facts.template_reasoning:
        return found
    return [{k: v for k, v in message.items() if k != "reasoning_content"} for message in found]


async def as_chat(call: RequestContext, body: JsonObject) -> JsonObject:
    """The request in chat fields: instructions, earlier messages, then the new input."""
    rules = rules_of(Responses)
    chat = {name: body[name] for name in body if rules[name].param or name in PASSED}
    chat["messages"], call.places = await _messages(call, body)
    chat["logprobs"] = LOGPROBS in (body.get("include") or ()) or bool(body.get("top_logprobs"))
    if "max_output_tokens" in body:
        chat["max_tokens"] = body["max_output_tokens"]
    if "tools" in body:
        chat["tools"] = [_nested(tool, "function") for tool in body["tools"]]
    choice = body.get("tool_choice", "auto")
    chat["tool_choice"] = _nested(choice, "function") if isinstance(choice, dict) else choice
    effort = (body.get("reasoning") or {}).get("effort")
    if effort is not None:
        chat["reasoning_effort"] = effort
    form = (body.get("text") or {}).get("format") or {"type": "text"}
    chat["response_format"] = (
        _nested(form, "json_schema") if form["type"] == "json_schema" else form
    )
    return chat


def _nested(item: JsonMapping, kind: str) -> JsonObject:
    """What chat completions nest in a member: {"type": "function", "function": {"name": ...}}."""
    return {"type": kind, kind: {k: v for k, v in item.items() if k != "type"}}


async def _messages(call: RequestContext, body: JsonObject) -> tuple[list[JsonObject], list[str]]:
    """Chat messages of the whole conversation, and for each the field that it comes from."""
    items = body.get("input", "")
    if not isinstance(items, str) and not call.state.facts.template_reasoning:
        # reasoning that the server itself has sent; the chat template reads none
        items = [{"type": "reasoning"} if i.get("encrypted_content") else i for i in items]
    messages, places = chat_messages(items)
    if "previous_response_id" not in body and not (messages and items):
        if "input" not in body:
            why = "input: is required without previous_response_id"
            raise Problem("missing_parameter", why, "input")
        raise invalid("input", "is empty; give at least one character or message")
    if not messages:
        messages, places = [{"role": "user", "content": ""}], ["input"]
    if "previous_response_id" in body:
        earlier = await earlier_messages(call, body["previous_response_id"])
        messages = [*earlier, *messages]
        places = ["previous_response_id"] * len(earlier) + places
    if "instructions" in body:
        messages.insert(0, {"role": "system", "content": body["instructions"]})
        places.insert(0, "instructions")
    return messages, places


def input_rows(body: JsonObject) -> list[JsonObject]:
    items = body.get("input", "")
    rows = [{"role": "user", "content": items}] if isinstance(items, str) else items
    out = []
    for row in rows:
        made = {"id": new_id("msg_"), "type": "message", **row}
        if made["type"] == "message":
            kind = "output_text" if made["role"] == "assistant" else "input_text"
            more: JsonObject = {"annotations": []} if kind == "output_text" else {}
            made["content"] = [{"type": kind, "text": plain_text(made["content"]), **more}]
            made.setdefault("status", "completed")
        out.append(made)
    return out
