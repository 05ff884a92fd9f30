"""Routes of no one protocol: health and metrics, scores, tokens (as vLLM has them), reranking."""

from __future__ import annotations

from verbatim.server.api.common.route import ApiProtocol, ApiRoute, queued
from verbatim.server.api.native import info, native_fields, score_tokenize
from verbatim.server.api.native.reranking import rerank

PROTOCOL = ApiProtocol(
    (
        queued("/v1/rerank", rerank, native_fields.Rerank),
        queued("/rerank", rerank, native_fields.LlamaRerank),
        queued("/v1/score", score_tokenize.score, native_fields.ScoreBody),
        queued("/tokenize", score_tokenize.tokenize, native_fields.TokenizeBody),
        queued("/detokenize", score_tokenize.detokenize, native_fields.DetokenizeBody),
        ApiRoute("/tokenizer_info", info.tokenizer, method="GET", shows_model=True),
        ApiRoute("/health", info.health, method="GET", any_query=True),
        ApiRoute("/health/live", info.live, method="GET", any_query=True),
        ApiRoute("/health/ready", info.health, method="GET", any_query=True),
        ApiRoute("/metrics", info.metrics, method="GET", any_query=True),
    )
)
