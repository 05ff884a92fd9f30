"""The request fields of OpenAI's routes (see common/field_rules.py), and the items, tools and text
formats of the Responses API."""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from verbatim.base.json_io import JsonObject
from verbatim.base.params import FIELDS
from verbatim.server.api.common import field_rules as shared
from verbatim.server.api.common.field_rules import (
    Refused,
    RequestBody,
    Unchecked,
    WithTopK,
    honoured,
    ignored,
    label,
    refused,
    subset,
    taking,
)
from verbatim.server.api.common.schemas import (
    Alternatives,
    Cached,
    Count,
    Effort,
    Int64,
    JsonFormat,
    Label,
    Length,
    Message,
    Metadata,
    Name,
    Parts,
    Prompt,
    ResponseFormat,
    StreamOptions,
    Strict,
    StructuredOutputs,
    Text,
    TextFormat,
    Tool,
    ToolChoice,
    Verbosity,
    type_of,
)
from verbatim.server.batch_files import URLS


class _TextRoute(WithTopK):
    """The fields that completions, chat completions and responses share: OpenAI's, Verbatim's own,
    and those of vLLM's and llama.cpp's clients (field_effects.py)."""

    client_metadata: JsonObject | None = ignored("it is not stored")
    metadata: Metadata | None = label("stored with the object; echoed where the protocol echoes it")
    moderation: Refused = refused("no moderation model runs here")
    prompt_cache_key: Label | None = ignored(shared.CACHE)
    prompt_cache_options: Unchecked | None = ignored(shared.CACHE)
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = ignored(
        "cached prefixes stay in memory until they are evicted", "in_memory", "in-memory"
    )
    safety_identifier: Label | None = label("written to the log")
    seed: Int64 | None = shared.SEED
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = ignored(
        "there is one tier", "auto", "default"
    )
    stop: Text | list[Text] | None = honoured(FIELDS["stop"].help)
    stream: bool | None = shared.STREAM
    stream_options: StreamOptions | None = honoured(
        "include_usage, include_obfuscation, continuous_usage_stats (the usage so far in every "
        "chunk, as vLLM sends it; needs include_usage)"
    )
    user: Label | None = shared.USER
    # 262 KB per token for a vocabulary of 49,152 ids: too much to send with every explanation
    explain_rows: bool | None = honoured(
        "with explain and receipt, for one choice: the explanations of the first 64 tokens include "
        "the whole row of logits (four bytes per id, in base64) and the grammar's mask, for a "
        "what-if; missing: row and mask are null; at most 4 such requests at once"
    )
    report_params: bool | None = shared.REPORT
    repeat_penalty: type_of("repetition_penalty") | None = honoured(  # type: ignore[valid-type]
        "llama.cpp's name of repetition_penalty"
    )
    n_probs: Alternatives | None = honoured(
        "llama.cpp's clients: report each token's log-probability and this many alternatives"
    )
    cache_prompt: bool | None = shared.CACHE_PROMPT
    guided_json: JsonObject | bool | Text | None = honoured("vLLM's name of json_schema")
    guided_regex: Text | None = honoured("vLLM's name of regex")
    guided_choice: Text | list[Text] | None = honoured("vLLM's name of choice")
    guided_grammar: Text | None = honoured("vLLM's name of grammar")
    guided_decoding_backend: Label | None = ignored("there is one grammar engine")
    guided_whitespace_pattern: Refused = refused("white space between JSON tokens is fixed")
    structured_outputs: StructuredOutputs | None = honoured(
        "one of vLLM's json, json_object, regex, choice, grammar"
    )


@functools.cache
def extended(*taken: str) -> Any:
    """A base with Verbatim's parameters as extra fields of OpenAI's routes, except those in
    `taken` and those that _TextRoute has."""
    names = (name for name in FIELDS if name not in (*taken, *_TextRoute.model_fields))
    return taking({name: name for name in names}, _TextRoute)


_NO_PARSE = refused("the chat template adds the control tokens; message text stays text", False)


class Completions(extended("max_tokens", "logprobs", "prompt_logprobs")):  # type: ignore[misc]
    model: Label = shared.MODEL
    prompt: Prompt = honoured(
        "a string, a list of strings, token ids, or a list of lists of them", required=True
    )
    echo: bool | None = honoured(
        "prepend the prompt to the output; with logprobs, its log-probabilities too (not streamed)"
    )
    logprobs: Alternatives | None = honoured(
        "report each token's log-probability and this many alternatives; a token that is a part of "
        "a character is named by its bytes, as by OpenAI (bytes:\\xe2\\x82)"
    )
    max_tokens: Count | Literal[-1] | None = honoured(
        "maximum number of output tokens; missing: 16, as in OpenAI's API; -1: up to the context "
        "length"
    )
    metadata: Metadata | None = ignored("a completion is not stored")
    seed: Int64 | None = honoured(
        f"{shared.SEED_TEXT}; all prompts of a list share it, so equal prompts get equal outputs; "
        "missing: each prompt of a list gets its own, which its choices report (the response's "
        "seed is null)"
    )
    store: bool | None = ignored("a completion is not stored", False)
    suffix: Refused = refused("infilling needs a model trained for it")
    parse_special: bool | None = shared.PARSE


class ChatCompletions(extended("max_tokens", "logprobs", "prompt_logprobs")):  # type: ignore[misc]
    model: Label = shared.MODEL
    messages: Annotated[list[Message], Field(min_length=1)] = shared.CHAT_MESSAGES
    audio: Refused = refused("only text output is supported")
    add_generation_prompt: bool | None = shared.ADD_PROMPT
    continue_final_message: bool | None = shared.CONTINUE
    chat_template_kwargs: JsonObject | None = shared.KWARGS
    enable_thinking: bool | None = honoured(
        "Qwen's clients: true switches thinking on, false off, where the chat template has the "
        "switch"
    )
    function_call: Literal["none", "auto"] | None = refused(
        "deprecated by OpenAI; use tool_choice", "none", "auto"
    )
    functions: Unchecked | None = refused("deprecated by OpenAI; use tools", [])
    include_reasoning: bool | None = honoured(
        "false: the response leaves the reasoning out, which it counts"
    )
    logprobs: bool | None = honoured("report each token's log-probability")
    max_completion_tokens: Length | Literal[-1] | None = honoured(
        "maximum number of output tokens; missing or -1: up to the context length"
    )
    max_tokens: Length | Literal[-1] | None = honoured(
        "the older name of max_completion_tokens; not both, unless equal"
    )
    modalities: Unchecked | None = refused("only text output is supported", ["text"])
    parallel_tool_calls: bool | None = honoured("false: at most one call per response")
    prediction: Unchecked | None = ignored(
        "speculative decoding needs no prediction (see speculate)"
    )
    reasoning_effort: Effort | None = honoured(
        "passed to a chat template that reads it; else none switches thinking off and any other "
        "level on; no effect with a model that does not reason"
    )
    response_format: ResponseFormat | None = honoured(
        "text, json_object, json_schema (the schema is enforced while sampling; its name and "
        "description are labels); json_object may have a schema, as llama.cpp's clients send it"
    )
    store: bool | None = honoured("true: store the response for /v1/chat/completions/{id}")
    tool_choice: ToolChoice | None = honoured(
        "none, auto, required, or one function (the last two enforced by a grammar)"
    )
    tools: list[Tool] | None = shared.TOOLS
    top_logprobs: Alternatives | None = honoured("alternatives for each token; needs logprobs")
    parse_special: Literal[False] | None = _NO_PARSE
    verbosity: Verbosity | None = shared.NO_VERBOSITY
    web_search_options: Refused = refused("the server fetches nothing for a request")


# ------------------------------------------------------------------------------- responses


class _Item(Strict):
    """Clients send `id` and `status` back with earlier output items. The server ignores them."""

    id: Text | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class InputMessage(_Item, Cached):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Parts
    name: Label | None = None
    phase: None = None


class InputCall(_Item):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class InputCallOutput(_Item):
    type: Literal["function_call_output"]
    call_id: Text
    output: Text | Parts


class ReasoningText(Strict):
    type: Literal["reasoning_text"]
    text: Text


class InputReasoning(_Item):
    type: Literal["reasoning"]
    summary: Annotated[list[Any], Field(max_length=0)] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: Text | None = None


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
    verbosity: Verbosity | None = shared.NO_VERBOSITY


class ResponseReasoning(Strict):
    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(Strict):
    include_obfuscation: bool | None = None
    include_usage: bool | None = ignored("response.completed has the usage", True)


_NOT_OF_A_RESPONSE = ("n", "best_of", "num_return_sequences")


class Responses(extended("max_tokens", "logprobs", "prompt_logprobs", *_NOT_OF_A_RESPONSE)):  # type: ignore[misc]
    model: Label | None = honoured("a name from the start-up table; missing: the served model")
    input: ResponseInput | None = honoured(
        "a string, or messages, function calls and their outputs; required without"
        " previous_response_id"
    )
    access_programs: Refused = refused("there are no access programs")
    background: Literal[False] | None = refused(
        "responses are generated while the client waits", False
    )
    chat_template_kwargs: JsonObject | None = shared.KWARGS
    context_management: Refused = refused("the server never compacts or truncates input")
    conversation: Refused = refused("use previous_response_id, or send the whole input")
    image: Refused = refused("only text input is supported")
    include: (
        Annotated[
            list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
            Field(max_length=8),
        ]
        | None
    ) = honoured(
        "message.output_text.logprobs; reasoning.encrypted_content: reasoning also in a form that "
        "clients send back (base64, not encrypted)"
    )
    include_reasoning: Literal[True] | None = refused("the output has the reasoning items", True)
    instructions: Text | None = honoured("a system message before the input")
    max_output_tokens: Length | None = honoured("maximum number of output tokens")
    max_tool_calls: Length | None = ignored("there are no built-in tools to count")
    parallel_tool_calls: bool | None = honoured("false: at most one call per response")
    previous_response_id: Label | None = honoured("continue a stored response")
    prompt: Refused = refused("the server stores no prompt templates")
    reasoning: ResponseReasoning | None = honoured(
        "effort as reasoning_effort of chat completions; the whole reasoning is returned as a "
        "reasoning item, so a summary is never written"
    )
    store: bool | None = honoured(
        "store the response for GET and previous_response_id, until newer ones evict it; "
        "missing: true, unless the server stores nothing (--store-items 0)"
    )
    stream_options: ResponseStreamOptions | None = honoured("include_obfuscation")
    text: ResponseText | None = honoured(
        "format: text, json_object, json_schema (enforced while sampling); verbosity has no effect"
    )
    tool_choice: Literal["none", "auto", "required"] | ResponseNamedTool | None = honoured(
        "none, auto, required, or one function"
    )
    tools: list[ResponseTool] | None = honoured(
        "functions the model may call; built-in tools are refused"
    )
    top_logprobs: Alternatives | None = honoured("alternatives for each token")
    truncation: Literal["auto", "disabled"] | None = ignored(
        "a prompt is never truncated; one that does not fit is refused", "disabled"
    )
    parse_special: Literal[False] | None = _NO_PARSE


class Embeddings(RequestBody):
    model: Label = shared.MODEL
    input: Prompt = honoured(
        "a string, a list of strings, token ids, or a list of lists of them", required=True
    )
    dimensions: Length | None = honoured(
        "keep this many leading dimensions and normalise to length 1"
    )
    encoding_format: Literal["float", "base64"] | None = honoured(
        "float, or base64 of little-endian float32"
    )
    prompt_name: Label | None = honoured(
        "the model's prompt to put before each text, by its name in "
        "config_sentence_transformers.json; missing: the model's default prompt, if it has one"
    )
    truncate: bool | None = shared.TRUNCATE
    user: Label | None = shared.USER


class ChatCompletionUpdate(RequestBody):
    metadata: Metadata = label("replaces the stored metadata", required=True)


ResponsesInputTokens = subset(
    "ResponsesInputTokens",
    Responses,
    *("conversation", "input", "instructions", "model", "parallel_tool_calls"),
    *("previous_response_id", "reasoning", "text", "tool_choice", "tools", "truncation"),
    "chat_template_kwargs",
)


class ExpiresAfter(Strict):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=30 * 86_400)]


class FileUpload(RequestBody):
    """The parts of a form; `file` is the name of the file."""

    file: Label = honoured("a file with its name: one request per line, as JSON", required=True)
    purpose: Literal["batch"] = honoured("batch; this server has no other use", required=True)
    expires_after: ExpiresAfter | None = honoured(
        "anchor (created_at) and seconds until the file is deleted; missing: 30 days"
    )


class BatchCreate(RequestBody):
    input_file_id: Label = honoured("an uploaded file", required=True)
    endpoint: Literal[URLS] = honoured(  # type: ignore[valid-type]
        "the url of every line of the file", required=True
    )
    completion_window: Literal["24h"] = honoured(
        "24h; the lines without an answer then expire", required=True
    )
    metadata: Metadata | None = label("stored with the batch")
    output_expires_after: ExpiresAfter | None = honoured(
        "anchor (created_at) and seconds until the output files are deleted; missing: 30 days"
    )
