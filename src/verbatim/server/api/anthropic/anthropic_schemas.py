"""Pydantic models of the Anthropic API: messages, content blocks, tools, thinking."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from verbatim.base.json_io import JsonObject
from verbatim.server.api.common.schemas import Cached, Label, Name, Strict, Text


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
