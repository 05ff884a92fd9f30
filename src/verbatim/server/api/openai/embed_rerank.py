"""/v1/embeddings, /v1/rerank and llama.cpp's /embedding: texts in, vectors or ranked documents out.

Every text is one request of the engine, so that its numbers do not depend on the other texts of the
call.
"""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

from starlette.responses import Response

from verbatim.server.api.common import to_params
from verbatim.server.api.common.generate import extra_fields
from verbatim.server.api.common.request_context import Json, RequestContext
from verbatim.server.api.openai.completions import prompts_of
from verbatim.server.problem import Problem
from verbatim.server.process.messages import Generate, Generated

MAX_QUERY_BODIES = 4  # the copies of a query in one rerank, in bodies of max_body_bytes


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
            "usage": _usage(results),
            **extra_fields(call),
        }
    )


async def embed(call: RequestContext, body: dict[str, Any], name: str) -> list[Generated]:
    """Results that carry the embedding of each text in the field `name` of the client's request,
    which may also have dimensions, prompt_name and truncate."""
    hidden, truncate = call.state.facts.hidden, bool(body.get("truncate"))
    if (body.get("dimensions") or 1) > hidden:
        why = f"dimensions: {body['dimensions']} is above the model's {hidden}"
        raise Problem("invalid_parameter", why, "dimensions")
    prompts = prompts_of(body[name], name, call, truncate=truncate)
    call.names = {"prompt": name}
    more = {"prompt_name": body.get("prompt_name"), "truncate": truncate}
    return await _run(call, [{"prompt": prompt, **more} for prompt in prompts])


async def _run(call: RequestContext, inputs: list[dict[str, Any]]) -> list[Generated]:
    state = call.state
    params = to_params.finish_params(
        {"max_tokens": 0, "temperature": 0.0}, limits=state.limits, facts=state.facts
    )
    for given in inputs:
        call.submit(Generate(call.next_id(), call.tenant, params, False, embedding=True, **given))
    return await call.results(Generated)


def _usage(results: list[Generated]) -> dict[str, int]:
    total = sum(r.usage.prompt_tokens for r in results)
    return {"prompt_tokens": total, "total_tokens": total}


def unit_vector(vector: list[float], dimensions: int | None) -> list[float]:
    """The first `dimensions` numbers (None: all), scaled to length 1."""
    kept = vector[:dimensions]
    length = math.sqrt(sum(x * x for x in kept))
    return [x / length for x in kept] if length else kept


def _spell_vector(hidden: list[float], body: dict[str, Any]) -> Any:
    vector = unit_vector(hidden, body.get("dimensions"))
    if body.get("encoding_format") == "base64":
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    return vector


async def llama_embedding(call: RequestContext) -> Response:
    """llama.cpp's /embedding: a list with one row of vectors per text."""
    body = await call.body()
    call.state.check_model(body.get("model"))
    results = await embed(call, body, "content")
    plain = body.get("embd_normalize") == -1
    return Json(
        [
            {
                "index": i,
                "embedding": [r.embedding or [] if plain else unit_vector(r.embedding or [], None)],
            }
            for i, r in enumerate(results)
        ]
    )


def _check_copies(query: str, documents: int, max_body_bytes: int) -> None:
    """Each document's request has its own copy of the query, so the copies together are bounded:
    128 copies of a query that fills the body would be a gigabyte."""
    size, limit = len(query.encode()), MAX_QUERY_BODIES * max_body_bytes
    if size * documents > limit:
        raise Problem(
            "invalid_parameter",
            f"query: {size} bytes times {documents} documents are above {limit}; shorten the query "
            "or send fewer documents in one request",
            "query",
        )


async def rerank(call: RequestContext) -> Response:
    """Documents by their relevance to a query (LLM.rerank), best first."""
    body = await call.body()
    model = call.state.check_model(body["model"])
    if call.state.facts.task != "rerank":
        raise Problem(
            "unsupported_parameter",
            f"model: {model} is no cross-encoder, so it cannot score a query and a document; "
            "use a model whose architecture ends in ForSequenceClassification with one label",
            "model",
        )
    documents = [d if isinstance(d, str) else d["text"] for d in body["documents"]]
    named = [("query", body["query"]), *((f"documents[{i}]", d) for i, d in enumerate(documents))]
    if len(documents) > call.state.limits.max_prompts:
        raise Problem(
            "invalid_parameter",
            f"documents: {len(documents)} are above this server's limit of "
            f"{call.state.limits.max_prompts}",
            "documents",
        )
    for name, text in named:
        if not text:
            why = f"{name}: is empty; give at least one character"
            raise Problem("invalid_parameter", why, name)
    _check_copies(body["query"], len(documents), call.state.limits.max_body_bytes)
    pair = {"prompt": body["query"], "truncate": bool(body.get("truncate"))}
    results = await _run(call, [{**pair, "document": document} for document in documents])
    scores = [(done.embedding or [0.0])[0] for done in results]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])  # stable: ties in order
    rows: list[dict[str, Any]] = [
        {"index": i, "relevance_score": scores[i]} for i in order[: body.get("top_n")]
    ]
    if body.get("return_documents"):
        for row in rows:
            row["document"] = {"text": documents[row["index"]]}
    return Json(
        {
            "object": "list",
            "id": call.id,
            "model": model,
            "results": rows,
            "usage": _usage(results),
            **extra_fields(call),
        }
    )
