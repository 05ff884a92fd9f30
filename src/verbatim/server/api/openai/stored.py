"""Stored chat completions and responses (store: true): GET, POST and DELETE.

Also their messages and input items, and a stored response replayed as stream events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.responses import Response

from verbatim.base.json_io import JsonObject
from verbatim.server.api.common.generate import obfuscation
from verbatim.server.api.common.request_context import EventStream, Json, RequestContext, sse
from verbatim.server.api.openai.openai_fields import ChatCompletionUpdate
from verbatim.server.problem import invalid


def page(
    items: list[JsonObject], call: RequestContext, limit: int = 20, order: str = "asc"
) -> Response:
    """OpenAI's cursor pagination: after, limit, order; `limit` and `order` are its defaults."""
    limit = int(call.query.get("limit", limit))
    rows = items[::-1] if call.query.get("order", order) == "desc" else items
    after = call.query.get("after")
    if after is not None:
        at = next((i for i, row in enumerate(rows) if row.get("id") == after), None)
        if at is None:
            raise invalid("after", "no such id in this list")
        rows = rows[at + 1 :]
    data = rows[:limit]
    first, last = (data[0].get("id"), data[-1].get("id")) if data else (None, None)
    return Json(
        {
            "object": "list",
            "data": data,
            "first_id": first,
            "last_id": last,
            "has_more": len(rows) > len(data),
        }
    )


async def list_chats(call: RequestContext) -> Response:
    wanted = call.query.get("model")
    kept = [i["object"] for i in await call.state.store.of(call.tenant, "chat")]
    pairs = {
        name[9:-1]: value for name, value in call.query.items() if name.startswith("metadata[")
    }
    return page(
        [
            o
            for o in kept
            if wanted in (None, o["model"])
            and all(o["metadata"].get(k) == v for k, v in pairs.items())
        ],
        call,
    )


async def _chat(call: RequestContext) -> JsonObject:
    return await call.state.store.get(call.tenant, "chat", call.request.path_params["id"])


async def get_chat(call: RequestContext) -> Response:
    return Json((await _chat(call))["object"])


async def update_chat(call: RequestContext) -> Response:
    body, item = await call.body(ChatCompletionUpdate), await _chat(call)
    item["object"]["metadata"] = body.metadata
    await call.state.store.put(call.tenant, "chat", item["object"]["id"], item)
    return Json(item["object"])


async def delete_chat(call: RequestContext) -> Response:
    name = call.request.path_params["id"]
    await call.state.store.delete(call.tenant, "chat", name)
    return Json({"object": "chat.completion.deleted", "id": name, "deleted": True})


async def chat_messages(call: RequestContext) -> Response:
    name = call.request.path_params["id"]
    messages = (await _chat(call))["messages"]
    return page(
        [
            {"id": f"{name}-{i}", "name": None, **m, "content": m.get("content")}
            for i, m in enumerate(messages)
        ],
        call,
    )


# ------------------------------------------------------------------------------- responses


async def _response(call: RequestContext) -> JsonObject:
    return await call.state.store.get(call.tenant, "response", call.request.path_params["id"])


async def get_response(call: RequestContext) -> Response:
    made = (await _response(call))["object"]
    if call.query.get("stream") != "true":
        for name in ("starting_after", "include_obfuscation"):
            if name in call.query:
                raise invalid(name, "only with stream=true")
        return Json(made)
    return EventStream(
        call,
        _replay(
            made,
            int(call.query.get("starting_after", -1)),
            call.query.get("include_obfuscation") == "true",
        ),
    )


async def delete_response(call: RequestContext) -> Response:
    name = call.request.path_params["id"]
    await call.state.store.delete(call.tenant, "response", name)
    return Json({"id": name, "object": "response", "deleted": True})


async def input_items(call: RequestContext) -> Response:
    return page((await _response(call))["input"], call)


async def _replay(made: JsonObject, after: int, pad: bool) -> AsyncIterator[bytes]:
    """Replay a stored response as stream events, each text in one delta."""
    for number, (kind, data) in enumerate(_events(made, pad)):
        if number > after:
            yield sse({"type": kind, "sequence_number": number, **data}, kind)


def _events(made: JsonObject, pad: bool) -> list[tuple[str, JsonObject]]:
    unfinished: JsonObject = {
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }
    begun = {k: v for k, v in made.items() if k != "completed_at"} | unfinished
    out: list[tuple[str, JsonObject]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
    ]
    for index, item in enumerate(made["output"]):
        spell = _EVENTS[item["type"]]
        out += [(f"response.{kind}", data) for kind, data in spell(item, index, pad)]
    return [*out, (f"response.{made['status']}", {"response": made})]


def _message_events(item: JsonObject, index: int, pad: bool) -> list[tuple[str, JsonObject]]:
    (part,) = item["content"]
    where = {"item_id": item["id"], "output_index": index, "content_index": 0}
    text = {**where, "logprobs": part["logprobs"]}
    padding = {"obfuscation": obfuscation(part["text"])} if pad else {}
    return [
        (
            "output_item.added",
            {"output_index": index, "item": {**item, "status": "in_progress", "content": []}},
        ),
        ("content_part.added", {**where, "part": {**part, "text": "", "logprobs": []}}),
        ("output_text.delta", {**text, "delta": part["text"], **padding}),
        ("output_text.done", {**text, "text": part["text"]}),
        ("content_part.done", {**where, "part": part}),
        ("output_item.done", {"output_index": index, "item": item}),
    ]


def _call_events(item: JsonObject, index: int, pad: bool) -> list[tuple[str, JsonObject]]:
    where = {"item_id": item["id"], "output_index": index}
    return [
        (
            "output_item.added",
            {"output_index": index, "item": {**item, "arguments": "", "status": "in_progress"}},
        ),
        ("function_call_arguments.delta", {**where, "delta": item["arguments"]}),
        (
            "function_call_arguments.done",
            {**where, "name": item["name"], "arguments": item["arguments"]},
        ),
        ("output_item.done", {"output_index": index, "item": item}),
    ]


def _reasoning_events(item: JsonObject, index: int, pad: bool) -> list[tuple[str, JsonObject]]:
    (part,) = item["content"]
    where = {"item_id": item["id"], "output_index": index, "content_index": 0}
    # reasoning is sealed when it ends
    begun = {k: v for k, v in item.items() if k != "encrypted_content"}
    begun |= {"status": "in_progress", "content": []}
    return [
        ("output_item.added", {"output_index": index, "item": begun}),
        ("reasoning_text.delta", {**where, "delta": part["text"]}),
        ("reasoning_text.done", {**where, "text": part["text"]}),
        ("output_item.done", {"output_index": index, "item": item}),
    ]


_EVENTS = {
    "message": _message_events,
    "function_call": _call_events,
    "reasoning": _reasoning_events,
}
