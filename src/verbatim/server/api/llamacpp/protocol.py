"""llama.cpp's routes. Its errors have OpenAI's shape."""

from __future__ import annotations

from verbatim.server.api.common.route import ApiProtocol, ApiRoute, queued
from verbatim.server.api.llamacpp import llama_cpp, llama_fields

PROTOCOL = ApiProtocol(
    (
        queued("/completion", llama_cpp.completion, llama_fields.LlamaCompletion),
        queued("/embedding", llama_cpp.embedding, llama_fields.LlamaEmbedding),
        queued("/apply-template", llama_cpp.apply_template, llama_fields.LlamaApplyTemplate),
        ApiRoute("/props", llama_cpp.props, method="GET", shows_model=True),
    ),
    defaults="llama.cpp",
)
