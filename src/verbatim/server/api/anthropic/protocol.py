"""Anthropic's routes and the shape of its errors."""

from __future__ import annotations

from verbatim.server.api.anthropic import anthropic, anthropic_fields
from verbatim.server.api.common.route import ApiProtocol, Query, queued

_PATH, _COUNT = "/v1/messages", "/v1/messages/count_tokens"
_BETA = {"beta": Query("set by Anthropic's clients on beta calls; has no effect", "true")}

PROTOCOL = ApiProtocol(
    (
        queued(_PATH, anthropic.create, anthropic_fields.AnthropicMessages, queries=_BETA),
        queued(_COUNT, anthropic.count, anthropic_fields.AnthropicCountTokens, queries=_BETA),
    ),
    defaults="anthropic",
    prefix=_PATH,
    error_body=anthropic.error_body,
)
