"""POST /v1/embeddings: texts in, vectors out."""

from __future__ import annotations

import base64
import struct
from typing import Any

from starlette.responses import Response

from verbatim.server.api.common.generate import extra_fields
from verbatim.server.api.common.prompts import embed, prompt_usage, unit_vector
from verbatim.server.api.common.request_context import Json, RequestContext


async def embeddings(call: RequestContext) -> Response:
    """One embedding vector per prompt (LLM.embed), normalised to length 1 as OpenAI does."""
    body = await call.body()
    model = call.state.check_model(body["model"])
    results = await embed(call, body, "input")
    data = [
        {"object": "embedding", "index": i, "embedding": _spell_vector(r.embedding or [], body)}
        for i, r in enumerate(results)
    ]
    return Json(
        {
            "object": "list",
            "data": data,
            "model": model,
            "usage": prompt_usage(results),
            **extra_fields(call),
        }
    )


def _spell_vector(hidden: list[float], body: dict[str, Any]) -> Any:
    vector = unit_vector(hidden, body.get("dimensions"))
    if body.get("encoding_format") == "base64":
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    return vector
