"""The request fields of Anthropic's routes (see common/field_rules.py): messages, content blocks,
tools, thinking."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from verbatim.base.json_io import JsonObject
from verbatim.base.params import FIELDS
from verbatim.server.api.common import field_rules as shared
from verbatim.server.api.common.field_rules import (
    Refused,
    Unchecked,
    honoured,
    ignored,
    label,
    refused,
    subset,
    taking,
)
from verbatim.server.api.common.schemas import Cached, Int64, Label, Length, Name, Strict, Text


class AnthropicText(Cached):
    type: Literal["text"]
    text: Text
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class AnthropicToolUse(Cached):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: JsonObject
    caller: None = None


class AnthropicToolResult(Cached):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | list[AnthropicText] | None = None
    is_error: bool | None = None


class AnthropicReasoning(Cached):
    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


AnthropicBlock = Annotated[
    AnthropicText | AnthropicToolUse | AnthropicToolResult | AnthropicReasoning,
    Field(discriminator="type"),
]


class AnthropicMessage(Cached):
    role: Literal["user", "assistant"]
    name: Label | None = None
    content: Text | Annotated[list[AnthropicBlock], Field(min_length=1, max_length=4096)]


class AnthropicTool(Cached):
    name: Name
    description: Text | None = None
    input_schema: JsonObject
    type: Literal["custom"] | None = None
    strict: bool | None = None


class AnthropicChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicThinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class AnthropicMetadata(Strict):
    user_id: Label | None = None


class AnthropicFormat(Strict):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class AnthropicOutputConfig(Strict):
    format: AnthropicFormat | None = None
    effort: Literal["low", "medium", "high", "max"] | None = None


class AnthropicMessages(taking({name: name for name in ("temperature", "top_k", "top_p")})):  # type: ignore[misc]
    model: Label = shared.MODEL
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)] = honoured(
        'text, tool_use and tool_result blocks (is_error: the result starts with "Error: "); a '
        "last message with the assistant role is continued",
        required=True,
    )
    max_tokens: Length = honoured("maximum number of output tokens", required=True)
    cache_control: Unchecked | None = ignored(shared.CACHE)
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
    seed: Int64 | None = shared.SEED
    stop_sequences: list[Text] | None = honoured(FIELDS["stop"].help)
    stream: bool | None = shared.STREAM
    system: Text | list[AnthropicText] | None = honoured("a string or text blocks")
    thinking: AnthropicThinking | None = honoured(
        "enabled and adaptive switch thinking on, disabled off, where the chat template has the "
        "switch; budget_tokens: most tokens of the reasoning"
    )
    tool_choice: AnthropicChoice | None = honoured("auto, any, tool, none")
    tools: list[AnthropicTool] | None = honoured(
        "functions the model may call; server tools are refused"
    )
    report_params: bool | None = shared.REPORT


AnthropicCountTokens = subset(
    "AnthropicCountTokens",
    AnthropicMessages,
    *("model", "messages", "system", "tools", "tool_choice", "thinking", "cache_control"),
    *("output_config", "mcp_servers", "context_management"),
)
