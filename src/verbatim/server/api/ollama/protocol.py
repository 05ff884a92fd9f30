"""Ollama's routes and the shape of its errors."""

from __future__ import annotations

from functools import partial

from verbatim.server.api.common.route import ApiProtocol, ApiRoute, queued
from verbatim.server.api.ollama import ollama, ollama_fields, ollama_models

_generates = partial(queued, loads_nothing=ollama.asks_to_unload)
_shows = partial(ApiRoute, shows_model=True)

PROTOCOL = ApiProtocol(
    (
        _generates("/api/chat", ollama.chat, ollama_fields.OllamaChat),
        _generates("/api/generate", ollama.generate, ollama_fields.OllamaGenerate),
        queued("/api/embed", ollama_models.embed_texts, ollama_fields.OllamaEmbed),
        queued("/api/embeddings", ollama_models.embed_prompt, ollama_fields.OllamaEmbeddings),
        _shows(
            *("/api/show", ollama_models.show, ollama_fields.OllamaShow),
            loads_nothing=lambda body, model: not model.loaded and model.facts is not None,
        ),
        ApiRoute(
            *("/api/pull", ollama_models.pull, ollama_fields.OllamaPull),
            loads_nothing=lambda body, model: not model.loaded,
        ),
        _shows("/api/tags", ollama_models.tags, method="GET"),
        ApiRoute("/api/ps", ollama_models.ps, method="GET"),
        ApiRoute("/api/version", ollama_models.version, method="GET"),
    ),
    defaults="ollama",
    prefix="/api/",
    error_body=lambda problem: {"error": problem.message},
    absent_route=ollama_models.fixed_models,
    any_content_type=True,
    any_case=True,
)
