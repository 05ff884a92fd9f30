"""Routes that send nothing to the engine: tokenizer facts, health, metrics."""

from __future__ import annotations

from starlette.responses import Response

from verbatim.server.api.common.request_context import Json, RequestContext
from verbatim.server.http_metrics import METRICS_TYPE


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
    draining = call.state.admission.draining.is_set()
    status = "draining" if draining else "ready" if ready else "loading"
    return Json(
        {"live": True, "ready": ready, "status": status},
        200 if ready else 503,
        headers={} if ready else {"retry-after": "2"},
    )


async def metrics(call: RequestContext) -> Response:
    return Response(call.state.metrics_text(), media_type=METRICS_TYPE)
