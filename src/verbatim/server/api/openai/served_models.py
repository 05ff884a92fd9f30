"""GET /v1/models: the served models and their adapters, with their facts and sampling defaults."""

from __future__ import annotations

from starlette.responses import Response

from verbatim.base.defaults import report
from verbatim.base.json_io import JsonObject
from verbatim.server.api.common.default_params import model_params
from verbatim.server.api.common.request_context import Json, RequestContext


def _model(call: RequestContext, name: str) -> JsonObject:
    out: JsonObject = {"id": name, "object": "model", "created": call.state.started}
    out["owned_by"] = "verbatim"
    facts = call.state.facts_of(name)
    pool = call.state.pool
    parents = dict.fromkeys(call.state.settings.adapter_names, call.state.names()[0])
    parent = parents.get(name) if pool is None else pool.adapters.get(name)
    if parent is not None:  # as vLLM lists them
        out["parent"] = parent
    elif pool is not None:  # a server with one model never unloads it
        out["loaded"] = pool.models[name].supervisor.ready.is_set()
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
