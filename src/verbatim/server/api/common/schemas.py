"""Pydantic types that the protocols share, and the models of OpenAI's chat completions.

Each protocol has the others in its own field table.

The models only validate. Handlers use the plain JSON (strict mode converts no value), so there is
one copy of a request.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from verbatim.base.json_io import JsonObject
from verbatim.base.param_checks import MOST
from verbatim.base.params import FIELDS

Text = Annotated[str, Field(strict=True)]
Name = Annotated[str, Field(strict=True, pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Label = Annotated[str, Field(strict=True, max_length=512)]
TokenId = Annotated[int, Field(strict=True, ge=0, le=MOST)]
Int64 = Annotated[int, Field(strict=True, ge=-(2**63), le=2**63 - 1)]
Length = Annotated[int, Field(strict=True, ge=1, le=MOST)]
LastN = Annotated[int, Field(strict=True, ge=-1, le=MOST)]  # llama.cpp's: -1 is all tokens
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=0, le=MOST)]
Alternatives = Annotated[int, Field(strict=True, ge=0, le=int(FIELDS["logprobs"].high or MOST))]


def type_of(name: str) -> Any:
    """The pydantic type of a sampling parameter, from its kind and range in base.params."""
    rule = FIELDS[name]
    bounds: JsonObject = {"strict": True, "ge": rule.low, "le": rule.high, "gt": rule.above}
    bounds = {k: v for k, v in bounds.items() if v is not None}
    match rule.kind:
        case "int":
            whole: JsonObject = {k: int(v) for k, v in bounds.items() if k != "strict"}
            return Annotated[int, Field(strict=True, **{"le": MOST, **whole})]
        case "float":
            return Annotated[float, Field(allow_inf_nan=False, **bounds)]
        case "bool":
            return Annotated[bool, Field(strict=True)]
        case "str":
            return Text
        case "ids":
            return list[TokenId]
        case "strings":
            return Text | list[Text]
        case "bias":
            token = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
            return dict[token, Annotated[float, Field(allow_inf_nan=False, **bounds)]]
        case "choice":
            return Literal[rule.choices]
        case "schema":
            return JsonObject | bool


class Strict(BaseModel, defer_build=True):  # the validator is built with a route's first request
    model_config = ConfigDict(
        extra="forbid", strict=True, protected_namespaces=(), regex_engine="rust-regex"
    )


# ------------------------------------------------------------------------ chat completions


class Cached(Strict):
    """What LiteLLM and others send with a cache breakpoint (field_effects.py)."""

    cache_control: JsonObject | None = None


class TextPart(Cached):
    type: Literal["text", "input_text", "output_text"]
    text: Text
    annotations: list[Any] | None = Field(None, max_length=0)
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: JsonObject | None = None


class RefusalPart(Strict):
    type: Literal["refusal"]
    refusal: Text


Parts = Annotated[
    list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]],
    Field(max_length=4096, fail_fast=True),
]


class CalledFunction(Strict):
    name: Text
    arguments: Text


class CallOfTool(Strict):
    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int, Field(ge=0, le=4096)] | None = None


Verbosity = Literal["low", "medium", "high"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class SystemMessage(Cached):
    role: Literal["system", "developer", "user"]
    content: Text | Parts
    name: Label | None = None


class AssistantMessage(Cached):
    role: Literal["assistant"]
    content: Text | Parts | None = None
    name: Label | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[CallOfTool], Field(max_length=128)] | None = None
    annotations: list[Any] | None = Field(None, max_length=0)


class ToolMessage(Cached):
    role: Literal["tool"]
    content: Text | Parts
    tool_call_id: Text
    name: Label | None = None


Message = Annotated[SystemMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Cached):
    name: Name
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Cached):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: Text


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class SchemaFormat(Strict):
    name: Name
    description: Text | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


class JsonFormat(Strict):
    type: Literal["json_object"]
    schema_: JsonObject | None = Field(None, alias="schema")


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: SchemaFormat


ResponseFormat = Annotated[TextFormat | JsonFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Strict):
    """vLLM's. Members without a counterpart may have the value that changes nothing."""

    json_: JsonObject | bool | Text | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: type_of("choice") | None = None  # type: ignore[valid-type]
    grammar: Text | None = None
    structural_tag: None = None
    whitespace_pattern: None = None
    disable_fallback: Literal[False] | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
# fail_fast: the first entry of a long list shows that it is of another type
PromptIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Prompt = (
    Text
    | PromptIds
    | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
    | Annotated[list[PromptIds], Field(min_length=1, fail_fast=True)]
)

# llama.cpp's logit_bias
BiasPair = Annotated[
    tuple[
        TokenId,
        Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-100, le=100)] | Literal[False],
    ],
    Field(strict=False),  # JSON has no tuples
]


class RankDocument(Strict):
    """A document of /v1/rerank as an object."""

    text: Text
