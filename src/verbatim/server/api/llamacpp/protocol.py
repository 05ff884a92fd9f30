"""llama.cpp's routes. Its errors have OpenAI's shape."""

from __future__ import annotations

from verbatim.server.api.common.route import ApiProtocol, ApiRoute
from verbatim.server.api.llamacpp import llama_cpp, llama_fields

PROTOCOL = ApiProtocol(
    (
        ApiRoute("/completion", llama_cpp.completion, llama_fields.LlamaCompletion, is_queued=True),
        ApiRoute("/embedding", llama_cpp.embedding, llama_fields.LlamaEmbedding, is_queued=True),
        ApiRoute(
            "/apply-template",
            llama_cpp.apply_template,
            llama_fields.LlamaApplyTemplate,
            is_queued=True,
        ),
        ApiRoute("/props", llama_cpp.props, method="GET", shows_model=True),
    ),
    defaults="llama.cpp",
)
