"""The field tables of OpenAI's routes, and of vLLM's /tokenize and /v1/score
(see field_table.py)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field as P

from verbatim.server.api.common import schemas
from verbatim.server.api.common.field_rules import (
    ADD_PROMPT,
    CACHE_HINT,
    CACHE_KEY,
    CONTINUE,
    KWARGS,
    LENGTH,
    LIST_SEED,
    METADATA,
    MODEL,
    NO_METADATA,
    NO_MODERATION,
    NO_PARSE,
    PARSE,
    RETENTION,
    SAFETY,
    SEED,
    STOP,
    STREAM,
    STREAM_OPTIONS,
    TIER,
    TRUE_FALSE,
    TRUNCATE,
    USER,
    VERBOSITY,
    Rule,
    extensions,
)
from verbatim.server.api.openai import responses_schemas

COMPLETIONS: dict[str, Rule] = {
    "model": MODEL,
    "prompt": Rule(
        "honoured",
        "a string, a list of strings, token ids, or a list of lists of them",
        schemas.Prompt,
        required=True,
    ),
    "echo": Rule(
        "honoured",
        "prepend the prompt to the output; with logprobs, its log-probabilities too (not streamed)",
        TRUE_FALSE,
    ),
    "logprobs": Rule(
        "honoured",
        "report each token's log-probability and this many alternatives; a token that is a part of "
        "a character is named by its bytes, as by OpenAI (bytes:\\xe2\\x82)",
        schemas.type_of("logprobs"),
    ),
    "max_tokens": Rule(
        "honoured",
        "maximum number of output tokens; missing: 16, as in OpenAI's API; -1: up to the context "
        "length",
        schemas.type_of("max_tokens") | Literal[-1],
    ),
    "seed": LIST_SEED,
    "stop": STOP,
    "stream": STREAM,
    "stream_options": STREAM_OPTIONS,
    "suffix": Rule("refused", "infilling needs a model trained for it"),
    "parse_special": PARSE,
    "user": USER,
    **extensions("max_tokens", "seed", "stop", "logprobs", "prompt_logprobs"),
}

CHAT: dict[str, Rule] = {
    "model": MODEL,
    "messages": Rule(
        "honoured",
        "roles system, developer, user, assistant, tool; text parts; reasoning_content that the "
        "model's template does not read is refused; a name that it does not read, and "
        "cache_control, have no effect and get a warning",
        Annotated[list[schemas.Message], P(min_length=1)],
        required=True,
    ),
    "audio": Rule("refused", "only text output is supported"),
    "add_generation_prompt": ADD_PROMPT,
    "continue_final_message": CONTINUE,
    "chat_template_kwargs": KWARGS,
    "client_metadata": NO_METADATA,
    "enable_thinking": Rule(
        "honoured",
        "Qwen's clients: true switches thinking on, false off, where the chat template has the "
        "switch",
        TRUE_FALSE,
    ),
    "function_call": Rule(
        "refused", "deprecated by OpenAI; use tool_choice", only=("none", "auto")
    ),
    "functions": Rule("refused", "deprecated by OpenAI; use tools", only=([],)),
    "include_reasoning": Rule(
        "honoured", "false: the response leaves the reasoning out, which it counts", TRUE_FALSE
    ),
    "logprobs": Rule("honoured", "report each token's log-probability", TRUE_FALSE),
    "max_completion_tokens": Rule(
        "honoured",
        "maximum number of output tokens; missing or -1: up to the context length",
        LENGTH | Literal[-1],
    ),
    "max_tokens": Rule(
        "honoured",
        "the older name of max_completion_tokens; not both, unless equal",
        LENGTH | Literal[-1],
    ),
    "metadata": METADATA,
    "modalities": Rule("refused", "only text output is supported", only=(["text"],)),
    "moderation": NO_MODERATION,
    "parallel_tool_calls": Rule("honoured", "false: at most one call per response", TRUE_FALSE),
    "prediction": Rule("ignored", "speculative decoding needs no prediction (see speculate)"),
    "prompt_cache_key": CACHE_KEY,
    "prompt_cache_options": CACHE_HINT,
    "prompt_cache_retention": RETENTION,
    "reasoning_effort": Rule(
        "honoured",
        "passed to a chat template that reads it; else none switches thinking off and any other "
        "level on; no effect with a model that does not reason",
        schemas.Effort,
    ),
    "response_format": Rule(
        "honoured",
        "text, json_object, json_schema (the schema is enforced while sampling; its name and "
        "description are labels); json_object may have a schema, as llama.cpp's clients send it",
        schemas.ResponseFormat,
    ),
    "safety_identifier": SAFETY,
    "seed": SEED,
    "service_tier": TIER,
    "stop": STOP,
    "store": Rule(
        "honoured", "true: store the response in memory for /v1/chat/completions/{id}", TRUE_FALSE
    ),
    "stream": STREAM,
    "stream_options": STREAM_OPTIONS,
    "tool_choice": Rule(
        "honoured",
        "none, auto, required, or one function (the last two enforced by a grammar)",
        schemas.ToolChoice,
    ),
    "tools": Rule("honoured", "functions the model may call", list[schemas.Tool]),
    "top_logprobs": Rule(
        "honoured", "alternatives for each token; needs logprobs", schemas.type_of("logprobs")
    ),
    "parse_special": NO_PARSE,
    "user": USER,
    "verbosity": Rule("ignored", VERBOSITY, schemas.Verbosity, only=("medium",)),
    "web_search_options": Rule("refused", "the server fetches nothing for a request"),
    **extensions("max_tokens", "seed", "stop", "logprobs", "prompt_logprobs"),
}

RESPONSES: dict[str, Rule] = {
    "model": Rule(
        "honoured", "a name from the start-up table; missing: the served model", schemas.Label
    ),
    "input": Rule(
        "honoured",
        "a string, or messages, function calls and their outputs; missing: an empty user message",
        responses_schemas.ResponseInput,
    ),
    "access_programs": Rule("refused", "there are no access programs"),
    "background": Rule("refused", "responses are generated while the client waits", only=(False,)),
    "chat_template_kwargs": KWARGS,
    "client_metadata": NO_METADATA,
    "context_management": Rule("refused", "the server never compacts or truncates input"),
    "conversation": Rule("refused", "use previous_response_id, or send the whole input"),
    "image": Rule("refused", "only text input is supported"),
    "include": Rule(
        "honoured",
        "message.output_text.logprobs; reasoning.encrypted_content: thoughts also in a form that "
        "clients send back (base64, not encrypted)",
        Annotated[
            list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
            P(max_length=8),
        ],
    ),
    "instructions": Rule("honoured", "a system message before the input", schemas.Text),
    "max_output_tokens": Rule("honoured", "maximum number of output tokens", LENGTH),
    "max_tool_calls": Rule("ignored", "there are no built-in tools to count", LENGTH),
    "metadata": METADATA,
    "moderation": NO_MODERATION,
    "parallel_tool_calls": Rule("honoured", "false: at most one call per response", TRUE_FALSE),
    "previous_response_id": Rule("honoured", "continue a stored response", schemas.Label),
    "prompt": Rule("refused", "the server stores no prompt templates"),
    "prompt_cache_key": CACHE_KEY,
    "prompt_cache_options": CACHE_HINT,
    "prompt_cache_retention": RETENTION,
    "reasoning": Rule(
        "honoured",
        "effort as reasoning_effort of chat completions; the whole thought is returned as a "
        "reasoning item, so a summary is never written",
        responses_schemas.ResponseReasoning,
    ),
    "safety_identifier": SAFETY,
    "service_tier": TIER,
    "store": Rule(
        "honoured",
        "store the response in memory for GET and previous_response_id, until newer ones evict it; "
        "missing: true, unless the server stores nothing (--store-items 0)",
        TRUE_FALSE,
    ),
    "stream": STREAM,
    "stream_options": Rule(
        "honoured", "include_obfuscation", responses_schemas.ResponseStreamOptions
    ),
    "text": Rule(
        "honoured",
        "format: text, json_object, json_schema (enforced while sampling); verbosity has no effect",
        responses_schemas.ResponseText,
    ),
    "tool_choice": Rule(
        "honoured",
        "none, auto, required, or one function",
        Literal["none", "auto", "required"] | responses_schemas.ResponseNamedTool,
    ),
    "tools": Rule(
        "honoured",
        "functions the model may call; built-in tools are refused",
        list[responses_schemas.ResponseTool],
    ),
    "top_logprobs": Rule("honoured", "alternatives for each token", schemas.type_of("logprobs")),
    "truncation": Rule(
        "ignored",
        "a prompt is never truncated; one that does not fit is refused",
        Literal["auto", "disabled"],
        only=("disabled",),
    ),
    "parse_special": NO_PARSE,
    "user": USER,
    "seed": SEED,
    "stop": STOP,
    **extensions(
        "max_tokens",
        "seed",
        "stop",
        "logprobs",
        "prompt_logprobs",
        "n",
        "best_of",
        "num_return_sequences",
    ),
}

EMBEDDINGS: dict[str, Rule] = {
    "model": MODEL,
    "input": Rule(
        "honoured",
        "a string, a list of strings, token ids, or a list of lists of them",
        schemas.Prompt,
        required=True,
    ),
    "dimensions": Rule(
        "honoured", "keep this many leading dimensions and normalise to length 1", LENGTH
    ),
    "encoding_format": Rule(
        "honoured", "float, or base64 of little-endian float32", Literal["float", "base64"]
    ),
    "prompt_name": Rule(
        "honoured",
        "the model's prompt to put before each text, by its name in "
        "config_sentence_transformers.json; missing: the model's default prompt, if it has one",
        schemas.Label,
    ),
    "truncate": TRUNCATE,
    "user": USER,
}

RERANK: dict[str, Rule] = {
    "model": MODEL,
    "query": Rule("honoured", "a text", schemas.Text, required=True),
    "documents": Rule(
        "honoured",
        "a list of texts, or of objects with a text",
        Annotated[list[schemas.Text | schemas.RankDocument], P(min_length=1)],
        required=True,
    ),
    "top_n": Rule("honoured", "return only this many documents, the best", LENGTH),
    "return_documents": Rule(
        "honoured", "true: each result has its document; missing: only its index", TRUE_FALSE
    ),
    "truncate": TRUNCATE,
    "max_chunks_per_doc": Rule("refused", "a document is scored whole; see truncate"),
    "max_tokens_per_doc": Rule("refused", "a document is scored whole; see truncate"),
    "rank_fields": Rule("refused", "a document is a text"),
    "truncate_prompt_tokens": Rule("refused", "use truncate"),
    "user": USER,
}

TOKENIZE: dict[str, Rule] = {
    "model": Rule("honoured", "missing: the served model", schemas.Label),
    "prompt": Rule("honoured", "a text", schemas.Text),
    "messages": Rule(
        "honoured",
        "instead of prompt: a conversation for the chat template, under the rules of "
        "/v1/chat/completions",
        Annotated[list[schemas.Message], P(min_length=1)],
    ),
    "add_generation_prompt": ADD_PROMPT,
    "continue_final_message": CONTINUE,
    "add_special_tokens": Rule(
        "honoured", "add the special tokens of a prompt (default true)", TRUE_FALSE
    ),
    "parse_special": Rule(
        "honoured",
        f"{PARSE.help}; a prompt that is the text of one special token (bos_token, eos_token, ...) "
        "and nothing else is that token, unless this is false",
        TRUE_FALSE,
    ),
    "return_token_strs": Rule("honoured", "also return each token's text", TRUE_FALSE),
}
DETOKENIZE: dict[str, Rule] = {
    "model": Rule("honoured", "missing: the served model", schemas.Label),
    "tokens": Rule("honoured", "token ids", list[schemas.TokenId], required=True),
}
SCORE: dict[str, Rule] = {
    "model": MODEL,
    "prompt": Rule(
        "honoured",
        "a string, a list of strings, token ids, or a list of lists of them",
        schemas.Prompt,
        required=True,
    ),
    "top_logprobs": Rule("honoured", "alternatives for each token", schemas.type_of("logprobs")),
    "parse_special": PARSE,
    "user": USER,
}


INPUT_TOKENS: dict[str, Rule] = {
    name: rule
    for name, rule in RESPONSES.items()
    if name
    in (
        "conversation",
        "input",
        "instructions",
        "model",
        "parallel_tool_calls",
        "previous_response_id",
        "reasoning",
        "text",
        "tool_choice",
        "tools",
        "truncation",
        "chat_template_kwargs",
    )
}

CHAT_UPDATE: dict[str, Rule] = {
    "metadata": Rule("label", "replaces the stored metadata", schemas.Metadata, required=True),
}
