"""Routes of no one protocol: health and metrics, scores, tokens (as vLLM has them), reranking."""

from __future__ import annotations

from verbatim.server.api.common.route import ApiProtocol, ApiRoute
from verbatim.server.api.native import info, native_fields, score_tokenize
from verbatim.server.api.native.reranking import rerank

PROTOCOL = ApiProtocol(
    (
        ApiRoute("/v1/rerank", rerank, native_fields.Rerank, is_queued=True),
        ApiRoute("/rerank", rerank, native_fields.LlamaRerank, is_queued=True),
        ApiRoute("/v1/score", score_tokenize.score, native_fields.ScoreBody, is_queued=True),
        ApiRoute("/tokenize", score_tokenize.tokenize, native_fields.TokenizeBody, is_queued=True),
        ApiRoute(
            "/detokenize", score_tokenize.detokenize, native_fields.DetokenizeBody, is_queued=True
        ),
        ApiRoute("/tokenizer_info", info.tokenizer, method="GET", shows_model=True),
        ApiRoute("/health", info.health, method="GET", any_query=True),
        ApiRoute("/health/live", info.live, method="GET", any_query=True),
        ApiRoute("/health/ready", info.health, method="GET", any_query=True),
        ApiRoute("/metrics", info.metrics, method="GET", any_query=True),
    )
)
