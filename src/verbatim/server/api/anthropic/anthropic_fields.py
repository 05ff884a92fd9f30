"""The field tables of Anthropic's routes (see field_table.py)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field as P

from verbatim.base.params import FIELDS
from verbatim.server.api.anthropic import anthropic_schemas
from verbatim.server.api.common import schemas
from verbatim.server.api.common.field_rules import (
    CACHE_HINT,
    LENGTH,
    MODEL,
    REPORT,
    SEED,
    STREAM,
    Rule,
    sampling,
)

MESSAGES: dict[str, Rule] = {
    "model": MODEL,
    "messages": Rule(
        "honoured",
        'text, tool_use and tool_result blocks (is_error: the result starts with "Error: "); a '
        "last message with the assistant role is continued",
        Annotated[list[anthropic_schemas.AnthropicMessage], P(min_length=1)],
        required=True,
    ),
    "max_tokens": Rule("honoured", "maximum number of output tokens", LENGTH, required=True),
    "cache_control": CACHE_HINT,
    "container": Rule("refused", "the server runs no code"),
    "context_management": Rule("refused", "the server never compacts or truncates input"),
    "diagnostics": Rule("refused", "see the x-request-id header and the log"),
    "speed": Rule("ignored", "there is one speed", Literal["standard", "fast"], only=("standard",)),
    "user_profile_id": Rule("ignored", "the server has no profiles", schemas.Label),
    "workspace_id": Rule("ignored", "the server has no workspaces", schemas.Label),
    "inference_geo": Rule("refused", "the model runs where this server runs"),
    "mcp_servers": Rule("refused", "the server contacts no address from a request", only=([],)),
    "metadata": Rule("label", "user_id is written to the log", anthropic_schemas.AnthropicMetadata),
    "output_config": Rule(
        "honoured",
        "format: json_schema (enforced while sampling); effort: where the template has a switch",
        anthropic_schemas.AnthropicOutputConfig,
    ),
    "output_format": Rule(
        "honoured",
        "json_schema (the earlier name of output_config.format)",
        anthropic_schemas.AnthropicFormat,
    ),
    "service_tier": Rule(
        "ignored",
        "there is one tier",
        Literal["auto", "standard_only"],
        only=("auto", "standard_only"),
    ),
    "seed": SEED,
    "stop_sequences": Rule("honoured", FIELDS["stop"].help, list[schemas.Text]),
    "stream": STREAM,
    "system": Rule(
        "honoured", "a string or text blocks", schemas.Text | list[anthropic_schemas.AnthropicText]
    ),
    "temperature": sampling("temperature"),
    "thinking": Rule(
        "honoured",
        "enabled and adaptive switch thinking on, disabled off, where the chat template has the "
        "switch; budget_tokens: most tokens of the thought",
        anthropic_schemas.AnthropicThinking,
    ),
    "tool_choice": Rule("honoured", "auto, any, tool, none", anthropic_schemas.AnthropicChoice),
    "tools": Rule(
        "honoured",
        "functions the model may call; server tools are refused",
        list[anthropic_schemas.AnthropicTool],
    ),
    "top_k": sampling("top_k"),
    "top_p": sampling("top_p"),
    "report_params": REPORT,
}

COUNT_TOKENS: dict[str, Rule] = {
    name: rule
    for name, rule in MESSAGES.items()
    if name
    in (
        "model",
        "messages",
        "system",
        "tools",
        "tool_choice",
        "thinking",
        "cache_control",
        "output_config",
        "mcp_servers",
        "context_management",
    )
}
