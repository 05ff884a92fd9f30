"""The routes that ask nothing of the engine: models, health, metrics."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from verbatim.server.api.request_context import Call, Json


def _model(call: Call, name: str) -> dict[str, Any]:
    out: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": call.state.started,
        "owned_by": "verbatim",
    }
    facts = call.state.supervisor.facts
    if facts is None:
        return out
    return out | {"context_length": facts.context, "fingerprint": facts.fingerprint}


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
        {"live": True, "ready": ready, "status": status},
        200 if ready else 503,
        headers={} if ready else {"retry-after": "2"},
    )


async def metrics(call: Call) -> Response:
    return Response(
        call.state.metrics.text(call.state.supervisor, call.state.open),
        media_type="text/plain; version=0.0.4",
    )
