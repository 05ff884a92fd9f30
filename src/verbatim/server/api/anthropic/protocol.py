"""Anthropic's routes and the shape of its errors."""

from __future__ import annotations

from verbatim.server.api.anthropic import anthropic, anthropic_fields
from verbatim.server.api.common.route import ApiProtocol, ApiRoute, Query

PROTOCOL = ApiProtocol(
    (
        ApiRoute(
            "/v1/messages",
            anthropic.create,
            anthropic_fields.AnthropicMessages,
            is_queued=True,
            queries={
                "beta": Query("set by Anthropic's clients on beta calls; has no effect", "true")
            },
        ),
        ApiRoute(
            "/v1/messages/count_tokens",
            anthropic.count,
            anthropic_fields.AnthropicCountTokens,
            is_queued=True,
            queries={"beta": Query("as above", "true")},
        ),
    ),
    defaults="anthropic",
    prefix="/v1/messages",
    error_body=anthropic.error_body,
)
