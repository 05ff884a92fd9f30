"""POST /v1/rerank and /rerank: a query and documents in, the documents by relevance out."""

from __future__ import annotations

from starlette.responses import Response

from verbatim.base.json_io import JsonObject
from verbatim.server.api.common.generate import extra_fields
from verbatim.server.api.common.prompts import prompt_usage, run_embeddings
from verbatim.server.api.common.request_context import Json, RequestContext
from verbatim.server.api.native.native_fields import Rerank
from verbatim.server.problem import check_limit, invalid, unsupported

MAX_QUERY_BODIES = 4  # the copies of a query in one rerank, in bodies of max_body_bytes


def _check_copies(query: str, documents: int, max_body_bytes: int) -> None:
    """Each document's request has its own copy of the query, so the copies together are bounded:
    128 copies of a query that fills the body would be a gigabyte."""
    size, limit = len(query.encode()), MAX_QUERY_BODIES * max_body_bytes
    if size * documents > limit:
        remedy = "shorten the query or send fewer documents in one request"
        why = f"{size} bytes times {documents} documents are above {limit}"
        raise invalid("query", f"{why}; {remedy}")


async def rerank(call: RequestContext) -> Response:
    """Documents by their relevance to a query (LLM.rerank), best first."""
    body = await call.body(Rerank)
    model = call.served_model()
    if call.state.facts.task != "rerank":
        remedy = (
            "use a model whose architecture ends in ForSequenceClassification with one label, such "
            "as ms-marco-minilm (91 MB)"
        )
        why = f"{model} is no cross-encoder, so it cannot score a query and a document"
        raise unsupported("model", f"{why}; {remedy}")
    documents = [d if isinstance(d, str) else d.text for d in body.documents]
    named = [("query", body.query), *((f"documents[{i}]", d) for i, d in enumerate(documents))]
    check_limit("documents", len(documents), call.state.limits.max_prompts, "are")
    for name, text in named:
        if not text:
            raise invalid(name, "is empty; give at least one character")
    _check_copies(body.query, len(documents), call.state.limits.max_body_bytes)
    pair = {"prompt": body.query, "truncate": bool(body.truncate)}
    results = await run_embeddings(call, [{**pair, "document": document} for document in documents])
    scores = [(done.embedding or [0.0])[0] for done in results]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])  # stable: ties in order
    best = order[: body.top_n]
    rows: list[JsonObject] = [{"index": i, "relevance_score": scores[i]} for i in best]
    if body.return_documents:
        for row in rows:
            row["document"] = {"text": documents[row["index"]]}
    return Json.of(
        object="list",
        id=call.id,
        model=model,
        results=rows,
        usage=prompt_usage(results),
        **extra_fields(call),
    )
