"""The request fields of OpenAI's routes (see common/field_rules.py)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verbatim.base.json_io import JsonObject
from verbatim.server.api.common.field_rules import (
    ADD_PROMPT,
    CACHE_HINT,
    CACHE_KEY,
    CHAT_MESSAGES,
    CONTINUE,
    KWARGS,
    LIST_SEED,
    METADATA,
    MODEL,
    NO_METADATA,
    NO_MODERATION,
    NO_PARSE,
    NO_VERBOSITY,
    PARSE,
    RETENTION,
    SAFETY,
    SEED,
    STOP,
    STREAM,
    STREAM_OPTIONS,
    TIER,
    TOOLS,
    TRUNCATE,
    USER,
    Refused,
    RequestBody,
    Unchecked,
    extended,
    honoured,
    ignored,
    label,
    refused,
    subset,
)
from verbatim.server.api.common.schemas import (
    Alternatives,
    Count,
    Effort,
    Int64,
    Label,
    Length,
    Message,
    Metadata,
    Prompt,
    ResponseFormat,
    StreamOptions,
    Text,
    Tool,
    ToolChoice,
    Verbosity,
)
from verbatim.server.api.openai.responses_schemas import (
    ResponseInput,
    ResponseNamedTool,
    ResponseReasoning,
    ResponseStreamOptions,
    ResponseText,
    ResponseTool,
)


class Completions(extended("max_tokens", "seed", "stop", "logprobs", "prompt_logprobs")):  # type: ignore[misc]
    model: Label = MODEL
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
    seed: Int64 | None = LIST_SEED
    stop: Text | list[Text] | None = STOP
    stream: bool | None = STREAM
    stream_options: StreamOptions | None = STREAM_OPTIONS
    suffix: Refused = refused("infilling needs a model trained for it")
    parse_special: bool | None = PARSE
    user: Label | None = USER


class ChatCompletions(extended("max_tokens", "seed", "stop", "logprobs", "prompt_logprobs")):  # type: ignore[misc]
    model: Label = MODEL
    messages: Annotated[list[Message], Field(min_length=1)] = CHAT_MESSAGES
    audio: Refused = refused("only text output is supported")
    add_generation_prompt: bool | None = ADD_PROMPT
    continue_final_message: bool | None = CONTINUE
    chat_template_kwargs: JsonObject | None = KWARGS
    client_metadata: JsonObject | None = NO_METADATA
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
    metadata: Metadata | None = METADATA
    modalities: Unchecked | None = refused("only text output is supported", ["text"])
    moderation: Refused = NO_MODERATION
    parallel_tool_calls: bool | None = honoured("false: at most one call per response")
    prediction: Unchecked | None = ignored(
        "speculative decoding needs no prediction (see speculate)"
    )
    prompt_cache_key: Label | None = CACHE_KEY
    prompt_cache_options: Unchecked | None = CACHE_HINT
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = RETENTION
    reasoning_effort: Effort | None = honoured(
        "passed to a chat template that reads it; else none switches thinking off and any other "
        "level on; no effect with a model that does not reason"
    )
    response_format: ResponseFormat | None = honoured(
        "text, json_object, json_schema (the schema is enforced while sampling; its name and "
        "description are labels); json_object may have a schema, as llama.cpp's clients send it"
    )
    safety_identifier: Label | None = SAFETY
    seed: Int64 | None = SEED
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = TIER
    stop: Text | list[Text] | None = STOP
    store: bool | None = honoured(
        "true: store the response in memory for /v1/chat/completions/{id}"
    )
    stream: bool | None = STREAM
    stream_options: StreamOptions | None = STREAM_OPTIONS
    tool_choice: ToolChoice | None = honoured(
        "none, auto, required, or one function (the last two enforced by a grammar)"
    )
    tools: list[Tool] | None = TOOLS
    top_logprobs: Alternatives | None = honoured("alternatives for each token; needs logprobs")
    parse_special: Literal[False] | None = NO_PARSE
    user: Label | None = USER
    verbosity: Verbosity | None = NO_VERBOSITY
    web_search_options: Refused = refused("the server fetches nothing for a request")


_NOT_OF_A_RESPONSE = (
    *("max_tokens", "seed", "stop", "logprobs", "prompt_logprobs"),
    *("n", "best_of", "num_return_sequences"),
)


class Responses(extended(*_NOT_OF_A_RESPONSE)):  # type: ignore[misc]
    model: Label | None = honoured("a name from the start-up table; missing: the served model")
    input: ResponseInput | None = honoured(
        "a string, or messages, function calls and their outputs; missing: an empty user message"
    )
    access_programs: Refused = refused("there are no access programs")
    background: Literal[False] | None = refused(
        "responses are generated while the client waits", False
    )
    chat_template_kwargs: JsonObject | None = KWARGS
    client_metadata: JsonObject | None = NO_METADATA
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
        "message.output_text.logprobs; reasoning.encrypted_content: thoughts also in a form that "
        "clients send back (base64, not encrypted)"
    )
    instructions: Text | None = honoured("a system message before the input")
    max_output_tokens: Length | None = honoured("maximum number of output tokens")
    max_tool_calls: Length | None = ignored("there are no built-in tools to count")
    metadata: Metadata | None = METADATA
    moderation: Refused = NO_MODERATION
    parallel_tool_calls: bool | None = honoured("false: at most one call per response")
    previous_response_id: Label | None = honoured("continue a stored response")
    prompt: Refused = refused("the server stores no prompt templates")
    prompt_cache_key: Label | None = CACHE_KEY
    prompt_cache_options: Unchecked | None = CACHE_HINT
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = RETENTION
    reasoning: ResponseReasoning | None = honoured(
        "effort as reasoning_effort of chat completions; the whole thought is returned as a "
        "reasoning item, so a summary is never written"
    )
    safety_identifier: Label | None = SAFETY
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = TIER
    store: bool | None = honoured(
        "store the response in memory for GET and previous_response_id, until newer ones evict it; "
        "missing: true, unless the server stores nothing (--store-items 0)"
    )
    stream: bool | None = STREAM
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
    parse_special: Literal[False] | None = NO_PARSE
    user: Label | None = USER
    seed: Int64 | None = SEED
    stop: Text | list[Text] | None = STOP


class Embeddings(RequestBody):
    model: Label = MODEL
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
    truncate: bool | None = TRUNCATE
    user: Label | None = USER


class ChatCompletionUpdate(RequestBody):
    metadata: Metadata = label("replaces the stored metadata", required=True)


ResponsesInputTokens = subset(
    "ResponsesInputTokens",
    Responses,
    *("conversation", "input", "instructions", "model", "parallel_tool_calls"),
    *("previous_response_id", "reasoning", "text", "tool_choice", "tools", "truncation"),
    "chat_template_kwargs",
)
