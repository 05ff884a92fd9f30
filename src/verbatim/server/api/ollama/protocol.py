"""Ollama's routes and the shape of its errors."""

from __future__ import annotations

from verbatim.server.api.common.route import ApiProtocol, ApiRoute, queued
from verbatim.server.api.ollama import ollama, ollama_fields, ollama_models

PROTOCOL = ApiProtocol(
    (
        queued(
            "/api/chat", ollama.chat, ollama_fields.OllamaChat, loads_nothing=ollama.asks_to_unload
        ),
        queued(
            "/api/generate",
            ollama.generate,
            ollama_fields.OllamaGenerate,
            loads_nothing=ollama.asks_to_unload,
        ),
        queued("/api/embed", ollama_models.embeddings_of_list, ollama_fields.OllamaEmbed),
        queued(
            "/api/embeddings", ollama_models.embedding_of_prompt, ollama_fields.OllamaEmbeddings
        ),
        ApiRoute(
            "/api/show",
            ollama_models.show,
            ollama_fields.OllamaShow,
            shows_model=True,
            loads_nothing=lambda body, model: not model.loaded and model.facts is not None,
        ),
        ApiRoute(
            "/api/pull",
            ollama_models.pull,
            ollama_fields.OllamaPull,
            loads_nothing=lambda body, model: not model.loaded,
        ),
        ApiRoute("/api/tags", ollama_models.tags, method="GET", shows_model=True),
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
