"""Routes that send nothing to the engine: models, health, metrics."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from verbatim.base.defaults import report
from verbatim.server.api.common.default_params import model_params
from verbatim.server.api.common.request_context import Json, RequestContext


def _model(call: RequestContext, name: str) -> dict[str, Any]:
    out: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": call.state.started,
        "owned_by": "verbatim",
    }
    facts = call.state.facts_of(name)
    pool = call.state.pool
    parents = dict.fromkeys(call.state.settings.adapter_names, call.state.names()[0])
    parent = parents.get(name) if pool is None else pool.adapters.get(name)
    if parent is not None:  # as vLLM lists them
        out["parent"] = parent
    if facts is None:
        return out
    return out | {
        "context_length": facts.context,
        "fingerprint": facts.adapters.get(name, facts.fingerprint),
        "sampling": report(model_params(facts, call.state)),
    }


async def models(call: RequestContext) -> Response:
    return Json({"object": "list", "data": [_model(call, name) for name in call.state.names()]})


async def model(call: RequestContext) -> Response:
    return Json(_model(call, call.state.check_model(call.request.path_params["id"])))


async def tokenizer(call: RequestContext) -> Response:
    """vLLM's /tokenizer_info: what a client needs to render the chat template itself."""
    facts = call.state.facts
    return Json(
        {
            "tokenizer_class": "Verbatim",
            "bos_token": None,
            "eos_token": None,
            "pad_token": None,
            "unk_token": None,
            **facts.special_tokens,
            "chat_template": facts.template or None,
            "model_max_length": facts.context,
        }
    )


async def live(call: RequestContext) -> Response:
    return Json({"live": True})


async def health(call: RequestContext) -> Response:
    """200 when the server accepts requests; 503 while it loads, restarts the engine or drains.
    Needs no API key, so it reveals nothing else."""
    ready = call.state.ready
    status = "draining" if call.state.admission.draining else "ready" if ready else "loading"
    return Json(
        {"live": True, "ready": ready, "status": status},
        200 if ready else 503,
        headers={} if ready else {"retry-after": "2"},
    )


async def metrics(call: RequestContext) -> Response:
    state = call.state
    return Response(
        state.metrics.text(
            state.engines(), state.open, len(state.admission.bodies), state.loaded()
        ),
        media_type="text/plain; version=0.0.4",
    )
