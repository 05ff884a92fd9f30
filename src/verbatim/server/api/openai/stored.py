"""Stored chat completions and responses (store: true): GET, POST and DELETE.

Also their messages and input items, and a stored response replayed as stream events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.responses import Response

from verbatim.base.json_io import JsonObject
from verbatim.server.api.common.request_context import EventStream, Json, RequestContext, sse
from verbatim.server.api.openai.openai_fields import ChatCompletionUpdate
from verbatim.server.api.openai.responses_stream import Event, whole
from verbatim.server.problem import invalid
from verbatim.server.storage.answer_store import Kind


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
    return Json.of(
        object="list", data=data, first_id=first, last_id=last, has_more=len(rows) > len(data)
    )


async def list_chats(call: RequestContext) -> Response:
    wanted = call.query.get("model")
    kept = [i["object"] for i in await call.state.store.of(call.tenant, "chat")]
    pairs = {k[9:-1]: value for k, value in call.query.items() if k.startswith("metadata[")}
    rows = [row for row in kept if wanted in (None, row["model"])]
    return page([row for row in rows if pairs.items() <= row["metadata"].items()], call)


async def _item(call: RequestContext, kind: Kind) -> JsonObject:
    return await call.state.store.get(call.tenant, kind, call.request.path_params["id"])


async def _delete(call: RequestContext, kind: Kind, shown: str) -> Response:
    name = call.request.path_params["id"]
    await call.state.store.delete(call.tenant, kind, name)
    return Json.of(object=shown, id=name, deleted=True)


async def get_chat(call: RequestContext) -> Response:
    return Json((await _item(call, "chat"))["object"])


async def update_chat(call: RequestContext) -> Response:
    body, item = await call.body(ChatCompletionUpdate), await _item(call, "chat")
    item["object"]["metadata"] = body.metadata
    await call.state.store.put(call.tenant, "chat", item["object"]["id"], item)
    return Json(item["object"])


async def delete_chat(call: RequestContext) -> Response:
    return await _delete(call, "chat", "chat.completion.deleted")


async def chat_messages(call: RequestContext) -> Response:
    name = call.request.path_params["id"]
    messages = (await _item(call, "chat"))["messages"]
    rows = [
        {"id": f"{name}-{i}", "name": None, **m, "content": m.get("content")}
        for i, m in enumerate(messages)
    ]
    return page(rows, call)


# ------------------------------------------------------------------------------- responses


async def get_response(call: RequestContext) -> Response:
    made = (await _item(call, "response"))["object"]
    if call.query.get("stream") != "true":
        for name in ("starting_after", "include_obfuscation"):
            if name in call.query:
                raise invalid(name, "only with stream=true")
        return Json(made)
    after, pad = call.query.get("starting_after", -1), call.query.get("include_obfuscation")
    return EventStream(call, _replay(made, int(after), pad == "true"))


async def delete_response(call: RequestContext) -> Response:
    return await _delete(call, "response", "response")


async def input_items(call: RequestContext) -> Response:
    return page((await _item(call, "response"))["input"], call)


async def _replay(made: JsonObject, after: int, pad: bool) -> AsyncIterator[bytes]:
    """Replay a stored response as stream events, each text in one delta."""
    for number, (kind, data) in enumerate(_events(made, pad)):
        if number > after:
            name = f"response.{kind}"
            yield sse({"type": name, "sequence_number": number, **data}, name)


def _events(made: JsonObject, pad: bool) -> list[Event]:
    begun = {k: v for k, v in made.items() if k != "completed_at"}
    begun |= {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    out: list[Event] = [(kind, {"response": begun}) for kind in ("created", "in_progress")]
    for index, item in enumerate(made["output"]):
        out += whole(item, index, pad)
    return [*out, (made["status"], {"response": made})]
