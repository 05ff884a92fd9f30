"""Pydantic models of the Responses API: input items, tools, text formats."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from verbatim.base.json_io import JsonObject
from verbatim.server.api.common.field_rules import NO_VERBOSITY, ignored
from verbatim.server.api.common.schemas import (
    Cached,
    Effort,
    JsonFormat,
    Label,
    Name,
    Parts,
    Strict,
    Text,
    TextFormat,
    Verbosity,
)


class InputMessage(Cached):
    """Clients send `id` and `status` back with earlier output items. The server ignores them."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Parts
    name: Label | None = None
    id: Text | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: None = None


class InputCall(Strict):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text
    id: Text | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class InputCallOutput(Strict):
    type: Literal["function_call_output"]
    call_id: Text
    output: Text | Parts
    id: Text | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class ReasoningText(Strict):
    type: Literal["reasoning_text"]
    text: Text


class InputReasoning(Strict):
    type: Literal["reasoning"]
    id: Text | None = None
    summary: Annotated[list[Any], Field(max_length=0)] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: Text | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


def _type(item: object) -> object:
    """A message may come without its type."""
    return item.get("type", "message") if isinstance(item, dict) else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(_type),
]
ResponseInput = Text | Annotated[list[InputItem], Field(max_length=4096)]


class ResponseTool(Strict):
    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ResponseNamedTool(Strict):
    type: Literal["function"]
    name: Text


class ResponseSchema(Strict):
    type: Literal["json_schema"]
    name: Name
    schema_: JsonObject = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None


class ResponseText(Strict):
    format: (
        Annotated[TextFormat | JsonFormat | ResponseSchema, Field(discriminator="type")] | None
    ) = None
    verbosity: Verbosity | None = NO_VERBOSITY


class ResponseReasoning(Strict):
    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(Strict):
    include_obfuscation: bool | None = None
    include_usage: bool | None = ignored("response.completed has the usage", True)
