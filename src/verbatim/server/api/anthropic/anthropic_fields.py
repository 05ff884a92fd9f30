"""The request fields of Anthropic's routes (see common/field_rules.py)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verbatim.base.params import FIELDS
from verbatim.server.api.anthropic.anthropic_schemas import (
    AnthropicChoice,
    AnthropicFormat,
    AnthropicMessage,
    AnthropicMetadata,
    AnthropicOutputConfig,
    AnthropicText,
    AnthropicThinking,
    AnthropicTool,
)
from verbatim.server.api.common.field_rules import (
    CACHE,
    MODEL,
    REPORT,
    SEED,
    STREAM,
    Refused,
    Unchecked,
    honoured,
    ignored,
    label,
    refused,
    subset,
    taking,
)
from verbatim.server.api.common.schemas import Int64, Label, Length, Text


class AnthropicMessages(taking({name: name for name in ("temperature", "top_k", "top_p")})):  # type: ignore[misc]
    model: Label = MODEL
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)] = honoured(
        'text, tool_use and tool_result blocks (is_error: the result starts with "Error: "); a '
        "last message with the assistant role is continued",
        required=True,
    )
    max_tokens: Length = honoured("maximum number of output tokens", required=True)
    cache_control: Unchecked | None = ignored(CACHE)
    container: Refused = refused("the server runs no code")
    context_management: Refused = refused("the server never compacts or truncates input")
    diagnostics: Refused = refused("see the x-request-id header and the log")
    speed: Literal["standard", "fast"] | None = ignored("there is one speed", "standard")
    user_profile_id: Label | None = ignored("the server has no profiles")
    workspace_id: Label | None = ignored("the server has no workspaces")
    inference_geo: Refused = refused("the model runs where this server runs")
    mcp_servers: Unchecked | None = refused("the server contacts no address from a request", [])
    metadata: AnthropicMetadata | None = label("user_id is written to the log")
    output_config: AnthropicOutputConfig | None = honoured(
        "format: json_schema (enforced while sampling); effort: where the template has a switch"
    )
    output_format: AnthropicFormat | None = honoured(
        "json_schema (the earlier name of output_config.format)"
    )
    service_tier: Literal["auto", "standard_only"] | None = ignored(
        "there is one tier", "auto", "standard_only"
    )
    seed: Int64 | None = SEED
    stop_sequences: list[Text] | None = honoured(FIELDS["stop"].help)
    stream: bool | None = STREAM
    system: Text | list[AnthropicText] | None = honoured("a string or text blocks")
    thinking: AnthropicThinking | None = honoured(
        "enabled and adaptive switch thinking on, disabled off, where the chat template has the "
        "switch; budget_tokens: most tokens of the reasoning"
    )
    tool_choice: AnthropicChoice | None = honoured("auto, any, tool, none")
    tools: list[AnthropicTool] | None = honoured(
        "functions the model may call; server tools are refused"
    )
    report_params: bool | None = REPORT


AnthropicCountTokens = subset(
    "AnthropicCountTokens",
    AnthropicMessages,
    *("model", "messages", "system", "tools", "tool_choice", "thinking", "cache_control"),
    *("output_config", "mcp_servers", "context_management"),
)
