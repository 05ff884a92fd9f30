"""Anthropic's routes and the shape of its errors."""

from __future__ import annotations

from verbatim.server.api.anthropic import anthropic, anthropic_fields
from verbatim.server.api.common.route import ApiProtocol, Query, queued

PROTOCOL = ApiProtocol(
    (
        queued(
            "/v1/messages",
            anthropic.create,
            anthropic_fields.AnthropicMessages,
            queries={
                "beta": Query("set by Anthropic's clients on beta calls; has no effect", "true")
            },
        ),
        queued(
            "/v1/messages/count_tokens",
            anthropic.count,
            anthropic_fields.AnthropicCountTokens,
            queries={"beta": Query("as above", "true")},
        ),
    ),
    defaults="anthropic",
    prefix="/v1/messages",
    error_body=anthropic.error_body,
)
