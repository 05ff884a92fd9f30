"""Pydantic models of the protocols' nested objects: messages, content parts, tools, formats.

The models only validate. Handlers use the plain JSON (strict mode converts no value), so there is
one copy of a request.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from verbatim.base.params import FIELDS, MAX_STOP_STRINGS, MOST

Text = Annotated[str, Field(strict=True)]
Name = Annotated[str, Field(strict=True, pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Label = Annotated[str, Field(strict=True, max_length=512)]
TokenId = Annotated[int, Field(strict=True, ge=0, le=MOST)]
JsonObject = dict[str, Any]

# Ollama option -> SamplingParams field, where both have the same range
OLLAMA_PARAMS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}


def type_of(name: str) -> Any:
    """The pydantic type of a sampling parameter, from its kind and range in base.params."""
    rule = FIELDS[name]
    bounds: dict[str, Any] = {"strict": True, "ge": rule.low, "le": rule.high, "gt": rule.above}
    bounds = {k: v for k, v in bounds.items() if v is not None}
    match rule.kind:
        case "int":
            whole: dict[str, Any] = {k: int(v) for k, v in bounds.items() if k != "strict"}
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
            return dict[str, Any] | bool


class Strict(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, protected_namespaces=(), regex_engine="rust-regex"
    )


# ------------------------------------------------------------------------ chat completions


class TextPart(Strict):
    type: Literal["text", "input_text", "output_text"]
    text: Text
    annotations: list[Any] | None = Field(None, max_length=0)
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: None = None


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


class ToolCall(Strict):
    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int, Field(ge=0, le=4096)] | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class SystemMessage(Strict):
    role: Literal["system", "developer", "user"]
    content: Text | Parts
    name: Label | None = None


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: Text | Parts | None = None
    name: Label | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    annotations: list[Any] | None = Field(None, max_length=0)


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Text | Parts
    tool_call_id: Text
    name: Label | None = None


Message = Annotated[SystemMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Strict):
    name: Name
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Strict):
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

# ------------------------------------------------------------------------------- responses


class InputMessage(Strict):
    """Clients send `id` and `status` back with earlier output items. The server ignores them."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Parts
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
    status: Literal["in_progress", "completed", "incomplete"] | None = None


ResponseInput = (
    Text
    | Annotated[
        list[InputMessage | InputCall | InputCallOutput | InputReasoning], Field(max_length=4096)
    ]
)


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
    verbosity: Literal["medium"] | None = None


class ResponseReasoning(Strict):
    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(Strict):
    include_obfuscation: bool | None = None


# ------------------------------------------------------------------------------- anthropic


class CacheControl(Strict):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class AnthropicText(Strict):
    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class AnthropicToolUse(Strict):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: JsonObject
    cache_control: CacheControl | None = None
    caller: None = None


class AnthropicToolResult(Strict):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | list[AnthropicText] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class AnthropicThought(Strict):
    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


AnthropicBlock = Annotated[
    AnthropicText | AnthropicToolUse | AnthropicToolResult | AnthropicThought,
    Field(discriminator="type"),
]


class AnthropicMessage(Strict):
    role: Literal["user", "assistant"]
    content: Text | Annotated[list[AnthropicBlock], Field(min_length=1, max_length=4096)]


class AnthropicTool(Strict):
    name: Name
    description: Text | None = None
    input_schema: JsonObject
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


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


# ---------------------------------------------------------------------------------- ollama


class OllamaFunction(Strict):
    name: Text
    arguments: JsonObject
    index: Annotated[int, Field(ge=0, le=4096)] | None = None


class OllamaCall(Strict):
    id: Text | None = None
    type: Literal["function"] | None = None
    function: OllamaFunction


class OllamaMessage(Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    images: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: Text | None = None
    tool_call_id: Text | None = None


# Ollama options that say how a machine loads and runs a model -> where that is decided here. No
# thread count, batch size or device changes a token, so they are accepted, with a warning.
_AT_START = "the server's flags decide it at its start"
OLLAMA_MACHINE_OPTIONS = {
    "num_gpu": f"{_AT_START} (--backend)",
    "main_gpu": _AT_START,
    "num_thread": f"{_AT_START} (--threads)",
    "num_batch": _AT_START,
    "numa": _AT_START,
    "use_mmap": _AT_START,
    "use_mlock": _AT_START,
    "low_vram": _AT_START,
    "f16_kv": f"{_AT_START} (--kv-type)",
    "vocab_only": "the whole model is loaded",
    "logits_all": "logits are computed where they are needed",
    "embedding_only": "every model generates and embeds",
    "num_keep": "the server never truncates a prompt, so no token has to be kept",
}


class _OllamaOptions(Strict):
    """Ollama options that are not SamplingParams fields, or have another range."""

    num_predict: Annotated[int, Field(ge=-2, le=MOST)] | None = None
    num_ctx: Annotated[int, Field(ge=1, le=MOST)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=MOST)] | None = None
    # accepted where they change nothing
    penalize_newline: Literal[True] | None = None  # a new line is penalised like any token
    mirostat: Literal[0] | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    tfs_z: Literal[1] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOP_STRINGS)] | None = None


_ollama: Any = {theirs: (type_of(ours) | None, None) for theirs, ours in OLLAMA_PARAMS.items()}
_machine: Any = dict.fromkeys(OLLAMA_MACHINE_OPTIONS, (bool | int | None, None))
OllamaOptions = create_model("OllamaOptions", __base__=_OllamaOptions, **_ollama, **_machine)


class RankDocument(Strict):
    """A document of /v1/rerank as an object."""

    text: Text


OllamaEmbedOptions = create_model("OllamaEmbedOptions", __base__=Strict, **_machine)
# Seconds, or a duration as Go writes it ("5m", "1h30m"); negative: for ever
KeepAlive = (
    Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)]
    | Annotated[float, Field(strict=True, allow_inf_nan=False)]
    | Annotated[str, Field(pattern=r"^-?[0-9]{1,9}([.][0-9]{1,9})?$")]
    | Annotated[str, Field(pattern=r"^-?([0-9]{1,9}([.][0-9]{1,9})?(ns|us|µs|ms|s|m|h))+$")]
)
