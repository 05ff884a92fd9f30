"""POST /v1/embeddings: texts in, vectors out."""

from __future__ import annotations

import base64
import struct

from starlette.responses import Response

from verbatim.server.api.common.generate import extra_fields
from verbatim.server.api.common.prompts import embed, prompt_usage, unit_vector
from verbatim.server.api.common.request_context import Json, RequestContext
from verbatim.server.api.openai.openai_fields import Embeddings


async def embeddings(call: RequestContext) -> Response:
    """One embedding vector per prompt (LLM.embed), normalised to length 1 as OpenAI does."""
    body = await call.body(Embeddings)
    model = call.served_model()
    length, cut, prompt = body.dimensions, body.truncate, body.prompt_name
    results = await embed(
        call, "input", body.input, dimensions=length, truncate=cut, prompt_name=prompt
    )
    vectors = [_spell_vector(done.embedding or [], body) for done in results]
    data = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(vectors)]
    return Json.of(
        object="list", data=data, model=model, usage=prompt_usage(results), **extra_fields(call)
    )


def _spell_vector(hidden: list[float], body: Embeddings) -> str | list[float]:
    vector = unit_vector(hidden, body.dimensions)
    if body.encoding_format == "base64":
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    return vector
