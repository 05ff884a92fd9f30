"""Ollama's /api/tags, /api/ps, /api/show, /api/version, /api/embed and /api/embeddings, and the
routes that would change the set of models.

In: the facts of the served model, or texts. Out: Ollama's JSON objects. The server has one model
and keeps it loaded, so the lists of installed and of loaded models are the same. The set of models
is fixed when the server starts: pulling one of them succeeds at once, and any other change is
refused with the command that does it.
"""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.responses import Response

from verbatim import __version__
from verbatim.base.defaults import report
from verbatim.base.json_io import JsonObject, dumps
from verbatim.server.api.common.default_params import default_params
from verbatim.server.api.common.generate import extra_fields
from verbatim.server.api.common.prompts import embed, unit_vector
from verbatim.server.api.common.request_context import Json, RequestContext
from verbatim.server.api.ollama.ollama_fields import (
    OLLAMA_PARAMS,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaPull,
    OllamaShow,
)
from verbatim.server.problem import Problem
from verbatim.server.process.messages import ModelFacts

# Routes of Ollama that change its set of models -> how that is done here
MANAGEMENT = {
    "/api/pull": "`verbatim pull NAME` fetches one, and `verbatim serve --model NAME` serves it",
    "/api/create": "send system and options with each request; `verbatim convert` quantises a file,"
    " and `verbatim serve --model FILE` serves it",
    "/api/copy": "`verbatim serve --served-model-name NAME` gives a model another name",
    "/api/delete": "`verbatim rm NAME` deletes a downloaded model",
    "/api/push": "nothing is uploaded; `verbatim convert` writes a file that you can share",
    "/api/blobs": "no file is stored; `verbatim serve --model FILE` serves one",
}
FIXED_MODELS = "a request cannot change the models of this server; "
NEVER = "9999-12-31T23:59:59Z"  # expiry time: the model is never unloaded


def time_text(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def size_text(parameters: int) -> str:
    """The number of parameters as Ollama writes it.

    >>> size_text(134_515_008), size_text(7_615_616_512), size_text(0)
    ('134.52M', '7.6B', '')
    """
    for unit, letter, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 2)):
        if parameters >= unit:
            return f"{parameters / unit:.{digits}f}{letter}"
    return str(parameters or "")


def details(facts: ModelFacts | None) -> JsonObject:
    file = {} if facts is None else facts.file
    family = "" if facts is None else facts.family
    return {
        "parent_model": "",
        "format": file.get("format", ""),
        "family": family,
        "families": [family] if family else [],
        "parameter_size": size_text(file.get("parameters", 0)),
        "quantization_level": file.get("quantisation", ""),
    }


def row(facts: ModelFacts | None, name: str) -> JsonObject:
    return {
        "name": name,
        "model": name,
        "size": 0 if facts is None else facts.file.get("bytes", 0),
        "digest": "" if facts is None else facts.digest,
        "details": details(facts),
    }


def modified(call: RequestContext, facts: ModelFacts | None) -> str:
    """When the model's file changed; the server's start for a model without a file."""
    found = 0 if facts is None else facts.file.get("modified", 0)
    return time_text(found or call.state.started)


async def tags(call: RequestContext) -> Response:
    rows = []
    for name in call.state.names():
        facts = call.state.facts_of(name)
        rows.append({**row(facts, name), "modified_at": modified(call, facts)})
    return Json({"models": rows})


async def ps(call: RequestContext) -> Response:
    """The loaded models, under every name. A server with one model never unloads it."""
    rows = []
    for name in call.state.names():
        supervisor = call.state.supervisor_of(name)
        facts = supervisor.facts
        if facts is None or not supervisor.ready.is_set():
            continue
        in_gpu = facts.file.get("bytes", 0) if facts.device == "cuda" else 0
        more = {"expires_at": NEVER, "size_vram": in_gpu, "context_length": facts.context}
        rows.append({**row(facts, name), **more})
    return Json({"models": rows})


def _parameters(call: RequestContext) -> str:
    """The sampling parameters that the model states, as PARAMETER lines of a Modelfile."""
    stated = report(default_params(call.state, protocol=call.protocol.defaults))
    return "\n".join(
        f"{theirs:<30} {stated[ours]['value']}"
        for theirs, ours in OLLAMA_PARAMS.items()
        if ours in stated and stated[ours]["origin"].startswith("model: ")
    )


async def show(call: RequestContext) -> Response:
    await call.body(OllamaShow)
    name = call.served_model()
    facts = call.state.facts
    info = {
        "general.architecture": facts.family,
        "general.parameter_count": facts.file.get("parameters", 0),
        "general.fingerprint": call.fingerprint,
        **{f"{facts.family}.{size}": value for size, value in facts.sizes.items()},
        **{f"tokenizer.{token}": text for token, text in facts.special_tokens.items()},
    }
    return Json.of(
        modelfile=f"FROM {name}\n",
        parameters=_parameters(call),
        template=facts.template,
        license=facts.file.get("license", ""),
        modified_at=modified(call, facts),
        details=details(facts),
        model_info=info,
        capabilities=[
            *(["completion"] if facts.task == "generate" else []),
            *(["tools"] if facts.has_template else []),
            *(["embedding"] if facts.file.get("embeds") else []),
            *(["thinking"] if facts.reasoning else []),
        ],
    )


def fixed_models(path: str) -> str | None:
    """The answer on a route that would change the set of models; None: the path is no such."""
    return next((FIXED_MODELS + how for at, how in MANAGEMENT.items() if path.startswith(at)), None)


async def pull(call: RequestContext) -> Response:
    """A served model is here already. Ollama's lines for that, without those of a download."""
    try:
        body = await call.body(OllamaPull)
        call.served_model()
    except Problem as problem:
        if problem.code != "model_not_found":
            raise
        raise Problem("not_found", FIXED_MODELS + MANAGEMENT["/api/pull"], "model") from None
    if body.stream is False:
        return Json({"status": "success"})
    lines = [dumps({"status": status}) + b"\n" for status in ("pulling manifest", "success")]
    return Response(b"".join(lines), media_type="application/x-ndjson")


async def version(call: RequestContext) -> Response:
    return Json({"version": __version__})


async def embed_texts(call: RequestContext) -> Response:
    """/api/embed: one vector of length 1 per text."""
    body = await call.body(OllamaEmbed)
    model = call.served_model()
    results = await embed(
        call, "input", body.input, dimensions=body.dimensions, truncate=body.truncate
    )
    vectors = [unit_vector(done.embedding or [], body.dimensions) for done in results]
    return Json.of(
        model=model,
        embeddings=vectors,
        total_duration=int((call.state.clock() - call.arrived) * 1e9),
        load_duration=int(call.load_seconds * 1e9),
        prompt_eval_count=sum(done.usage.prompt_tokens for done in results),
        **extra_fields(call),
    )


async def embed_prompt(call: RequestContext) -> Response:
    """/api/embeddings, which /api/embed replaces: one vector, not normalised."""
    body = await call.body(OllamaEmbeddings)
    call.served_model()
    (done,) = await embed(call, "prompt", body.prompt)
    return Json({"embedding": done.embedding or [], **extra_fields(call)})
