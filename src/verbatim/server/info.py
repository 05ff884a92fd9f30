"""The routes that ask nothing of the engine: models, health, metrics, the OpenAPI document, stored chat completions."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response

from verbatim.server.call import Call, Json
from verbatim.server.check import parse_json
from verbatim.server.problems import Problem


def _model(call: Call, name: str) -> dict[str, Any]:
    out: dict[str, Any] = {"id": name, "object": "model", "created": call.state.started, "owned_by": "verbatim"}
    facts = call.state.supervisor.facts
    return out | ({"context_length": facts["context"], "fingerprint": facts["fingerprint"]} if facts else {})


async def models(call: Call) -> Response:
    return Json({"object": "list", "data": [_model(call, name) for name in call.state.names()]})


async def model(call: Call) -> Response:
    return Json(_model(call, call.state.check_model(call.request.path_params["id"])))


async def live(call: Call) -> Response:
    return Json({"live": True})


async def health(call: Call) -> Response:
    """200 when requests are served; 503 while the model loads, the engine restarts or the server drains. Open without a key, so it says no more."""
    ready = call.state.supervisor.ready.is_set() and not call.state.draining
    status = "draining" if call.state.draining else "ready" if ready else "loading"
    return Json(
        {"live": True, "ready": ready, "status": status}, 200 if ready else 503, headers={} if ready else {"retry-after": "2"}
    )


async def metrics(call: Call) -> Response:
    return Response(call.state.metrics.text(call.state), media_type="text/plain; version=0.0.4")


async def openapi(call: Call) -> Response:
    from verbatim.server.openapi import document

    return Json(await asyncio.to_thread(document, call.state.names()))


# ------------------------------------------------------------------------------------------- stored chat completions


def _page(items: list[dict[str, Any]], call: Call) -> Response:
    """OpenAI's cursor pages: after, limit, order."""
    query = call.request.query_params
    limit, order = query.get("limit", "20"), query.get("order", "asc")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= 100):
        raise Problem("invalid_parameter", "limit: is not a whole number from 1 to 100", "limit")
    if order not in ("asc", "desc"):
        raise Problem("invalid_parameter", "order: is neither asc nor desc", "order")
    rows = items[::-1] if order == "desc" else items
    after = query.get("after")
    if after is not None:
        at = next((i for i, row in enumerate(rows) if row.get("id") == after), None)
        if at is None:
            raise Problem("invalid_parameter", "after: no such id in this list", "after")
        rows = rows[at + 1 :]
    data = rows[: int(limit)]
    first, last = (data[0].get("id"), data[-1].get("id")) if data else (None, None)
    return Json({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(rows) > len(data)})


async def list_chats(call: Call) -> Response:
    wanted = call.request.query_params.get("model")
    kept = [i["object"] for i in call.state.store.of(call.tenant, "chat")]
    pairs = {k[9:-1]: v for k, v in call.request.query_params.items() if k.startswith("metadata[") and k.endswith("]")}
    return _page(
        [o for o in kept if wanted in (None, o["model"]) and all(o["metadata"].get(k) == v for k, v in pairs.items())], call
    )


async def get_chat(call: Call) -> Response:
    return Json(call.state.store.get(call.tenant, call.request.path_params["id"])["object"])


async def update_chat(call: Call) -> Response:
    item = call.state.store.get(call.tenant, call.request.path_params["id"])
    data = parse_json(await call.read_raw(), call.state.limits.max_json_depth)
    metadata = data.get("metadata") if isinstance(data, dict) else None
    if (
        not isinstance(metadata, dict)
        or not all(isinstance(v, str) and len(v) <= 512 for v in metadata.values())
        or len(metadata) > 16
    ):
        raise Problem("invalid_parameter", "metadata: is not an object of at most 16 short strings", "metadata")
    item["object"]["metadata"] = metadata
    return Json(item["object"])


async def delete_chat(call: Call) -> Response:
    name = call.request.path_params["id"]
    call.state.store.pop(call.tenant, name)
    return Json({"object": "chat.completion.deleted", "id": name, "deleted": True})


async def chat_messages(call: Call) -> Response:
    name = call.request.path_params["id"]
    item = call.state.store.get(call.tenant, name)
    rows = [{"id": f"{name}-{i}", "name": None, **m, "content": m.get("content")} for i, m in enumerate(item["messages"])]
    return _page(rows, call)
