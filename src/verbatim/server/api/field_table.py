"""The table: every field of every protocol, and what becomes of it.

    honoured   it shapes the answer, as its protocol says
    label      kept with the request (log, stored object, echoed where the protocol echoes it); no meaning for the tokens
    refused    a known field that is not offered: 400, naming it; `only` lists the values that ask for nothing and pass

A field in none of these rows is unknown: 400, naming it. The request models, /openapi.json and docs/api-fields.md are all made from this
table, so a field cannot exist in one and be forgotten in another. When a capability comes, its row is switched on here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field as P

from verbatim.base.params import FIELDS, MOST
from verbatim.server.api import schemas

Kind = Literal["honoured", "label", "refused"]


@dataclass(frozen=True, slots=True)
class Rule:
    kind: Kind
    help: str
    type: Any = Any
    required: bool = False
    param: str = ""  # the SamplingParams field that takes the value as it is
    only: tuple[Any, ...] = ()


# 262 KB a token of a vocabulary of 49,152 ids: too much to send to everybody who wants a receipt and an explanation
ROWS = Rule(
    "honoured",
    "with explain and receipt, one answer: the explanations of its first 64 tokens also hold their whole row of logits (four bytes an id, in base64) "
    "and the grammar's mask, for a what-if; missing: row and mask are null; at most 4 such requests at once",
    Annotated[bool, P(strict=True)],
)


def sampling(name: str, own: str | None = None) -> Rule:
    return Rule("honoured", FIELDS[name].help, schemas.type_of(name), param=own or name)


def extensions(*taken: str) -> dict[str, Rule]:
    """Verbatim's own parameters as plain extra fields of OpenAI's routes; those the protocol spells itself are left to it."""
    return {name: sampling(name) for name in FIELDS if name not in taken} | {"explain_rows": ROWS}


INT64 = Annotated[int, P(strict=True, ge=-(2**63), le=2**63 - 1)]
TRUE_FALSE = Annotated[bool, P(strict=True)]
LENGTH = Annotated[int, P(strict=True, ge=1, le=MOST)]
MODEL = Rule(
    "honoured", "a name from the start-up table (see /v1/models)", schemas.Label, required=True
)
SEED = Rule(
    "honoured",
    "makes the draw repeatable; a negative one, which OpenAI allows, is taken modulo 2**63 (-1 is 9223372036854775807); the answer says the seed used",
    INT64,
)
LIST_SEED = Rule(
    "honoured",
    f"{SEED.help}; of a list, every prompt is drawn with this one, so equal prompts get equal answers; missing: each prompt of a list "
    "has its own, which its choices say (the answer's is then null)",
    INT64,
)
STREAM = Rule("honoured", "send the answer as events while it is written", TRUE_FALSE)
USER = Rule("label", "written to the log", schemas.Label)
STOP = Rule("honoured", FIELDS["stop"].help, schemas.type_of("stop"))
TIER = Rule(
    "refused", "one tier: every request is treated alike", schemas.Text, only=("auto", "default")
)
CACHE_KEY = Rule(
    "label", "the prefix cache finds equal beginnings by content and needs no hint", schemas.Label
)
RETENTION = Rule(
    "refused",
    "cached prefixes live in memory until they are displaced",
    schemas.Text,
    only=("in_memory", "in-memory"),
)
SAFETY = Rule("label", "written to the log", schemas.Label)
METADATA = Rule(
    "label", "kept with the stored object; echoed where the protocol echoes it", schemas.Metadata
)
NO_MODERATION = Rule("refused", "no moderation model runs here")
PARSE = Rule(
    "honoured",
    "true: the text of a control token (<|im_start|>) in the prompt becomes that token; missing: it stays plain text, and the answer warns of it",
    TRUE_FALSE,
)
NO_PARSE = Rule(
    "refused",
    "the chat template writes the control tokens, and what people type stays text",
    only=(False,),
)
KWARGS = Rule(
    "honoured",
    "further variables for the chat template; one that the model's template never reads is refused",
    dict[str, Any],
)

# ------------------------------------------------------------------------------------------------------------- tables

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
        "put the prompt before the answer; with logprobs, its log-probabilities too (not in a stream)",
        TRUE_FALSE,
    ),
    "logprobs": Rule(
        "honoured", "report each token and this many alternatives", schemas.type_of("logprobs")
    ),
    "max_tokens": Rule(
        "honoured", "most tokens to write; missing: 16, as OpenAI's", schemas.type_of("max_tokens")
    ),
    "seed": LIST_SEED,
    "stop": STOP,
    "stream": STREAM,
    "stream_options": Rule("honoured", "include_usage, include_obfuscation", schemas.StreamOptions),
    "suffix": Rule("refused", "text after the answer needs a model trained to fill in"),
    "parse_special": PARSE,
    "user": USER,
    **extensions("max_tokens", "seed", "stop", "logprobs", "prompt_logprobs"),
}

CHAT: dict[str, Rule] = {
    "model": MODEL,
    "messages": Rule(
        "honoured",
        "roles system, developer, user, assistant, tool; text parts; a name or reasoning_content that the model's template does not look at is "
        "refused (tool_call_id is not: the order of results says the same; nor the name of a result that repeats its call's)",
        Annotated[list[schemas.Message], P(min_length=1)],
        required=True,
    ),
    "audio": Rule("refused", "this server writes text"),
    "chat_template_kwargs": KWARGS,
    "function_call": Rule(
        "refused", "deprecated by OpenAI; use tool_choice", only=("none", "auto")
    ),
    "functions": Rule("refused", "deprecated by OpenAI; use tools", only=([],)),
    "logprobs": Rule("honoured", "report each token's log-probability", TRUE_FALSE),
    "max_completion_tokens": Rule(
        "honoured", "most tokens to write; missing: up to the context's end", LENGTH
    ),
    "max_tokens": Rule(
        "honoured", "the older name of max_completion_tokens; not both, unless equal", LENGTH
    ),
    "metadata": METADATA,
    "modalities": Rule("refused", "this server writes text", only=(["text"],)),
    "moderation": NO_MODERATION,
    "parallel_tool_calls": Rule("honoured", "false: at most one call in an answer", TRUE_FALSE),
    "prediction": Rule(
        "refused", "drafts are found without it (speculate), and never change the text"
    ),
    "prompt_cache_key": CACHE_KEY,
    "prompt_cache_options": Rule("refused", "the prefix cache has no options for one request"),
    "prompt_cache_retention": RETENTION,
    "reasoning_effort": Rule(
        "refused",
        "the model decides; chat_template_kwargs reaches templates that can switch",
        schemas.Text,
        only=("none",),
    ),
    "response_format": Rule(
        "honoured",
        "text, json_object, json_schema (its schema is enforced while drawing; its name and description are labels)",
        schemas.ResponseFormat,
    ),
    "safety_identifier": SAFETY,
    "seed": SEED,
    "service_tier": TIER,
    "stop": STOP,
    "store": Rule(
        "honoured", "true: keep the answer in memory for /v1/chat/completions/{id}", TRUE_FALSE
    ),
    "stream": STREAM,
    "stream_options": Rule("honoured", "include_usage, include_obfuscation", schemas.StreamOptions),
    "tool_choice": Rule(
        "honoured",
        "none, auto, required, or one function (the last two enforced while drawing)",
        schemas.ToolChoice,
    ),
    "tools": Rule("honoured", "functions the model may call", list[schemas.Tool]),
    "top_logprobs": Rule(
        "honoured", "alternatives for each token; needs logprobs", schemas.type_of("logprobs")
    ),
    "parse_special": NO_PARSE,
    "user": USER,
    "verbosity": Rule("refused", "say it in the prompt", schemas.Text, only=("medium",)),
    "web_search_options": Rule("refused", "nothing is ever fetched for a request"),
    **extensions("max_tokens", "seed", "stop", "logprobs", "prompt_logprobs"),
}

RESPONSES: dict[str, Rule] = {
    "model": Rule(
        "honoured", "a name from the start-up table; missing: the served model", schemas.Label
    ),
    "input": Rule(
        "honoured",
        "a string, or messages, function calls and their outputs; missing: an empty user message",
        schemas.ResponseInput,
    ),
    "access_programs": Rule("refused", "no such programs here"),
    "background": Rule("refused", "answers are made while the client waits", only=(False,)),
    "chat_template_kwargs": KWARGS,
    "context_management": Rule("refused", "nothing is compacted or cut"),
    "conversation": Rule("refused", "use previous_response_id, or send the whole input"),
    "image": Rule("refused", "this server reads text"),
    "include": Rule(
        "honoured",
        "message.output_text.logprobs",
        Annotated[list[Literal["message.output_text.logprobs"]], P(max_length=8)],
    ),
    "instructions": Rule("honoured", "a system message before the input", schemas.Text),
    "max_output_tokens": Rule("honoured", "most tokens to write", LENGTH),
    "max_tool_calls": Rule("refused", "there are no built-in tools to count"),
    "metadata": METADATA,
    "moderation": NO_MODERATION,
    "parallel_tool_calls": Rule("honoured", "false: at most one call in an answer", TRUE_FALSE),
    "previous_response_id": Rule("honoured", "continue a stored answer", schemas.Label),
    "prompt": Rule("refused", "no prompt templates are stored here"),
    "prompt_cache_key": CACHE_KEY,
    "prompt_cache_options": Rule("refused", "the prefix cache has no options for one request"),
    "prompt_cache_retention": RETENTION,
    "reasoning": Rule("refused", "the model decides", only=({"effort": "none"}, {})),
    "safety_identifier": SAFETY,
    "service_tier": TIER,
    "store": Rule(
        "honoured",
        "true: keep the answer in memory for GET and previous_response_id; missing: false",
        TRUE_FALSE,
    ),
    "stream": STREAM,
    "stream_options": Rule("honoured", "include_obfuscation", schemas.ResponseStreamOptions),
    "text": Rule(
        "honoured",
        "format: text, json_object, json_schema (enforced while drawing)",
        schemas.ResponseText,
    ),
    "tool_choice": Rule(
        "honoured",
        "none, auto, required, or one function",
        Literal["none", "auto", "required"] | schemas.ResponseNamedTool,
    ),
    "tools": Rule(
        "honoured",
        "functions the model may call; built-in tools are refused",
        list[schemas.ResponseTool],
    ),
    "top_logprobs": Rule("honoured", "alternatives for each token", schemas.type_of("logprobs")),
    "truncation": Rule("refused", "nothing is ever cut to fit", schemas.Text, only=("disabled",)),
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
    "dimensions": Rule("honoured", "keep the first so many numbers and scale to length 1", LENGTH),
    "encoding_format": Rule(
        "honoured", "float, or base64 of little-endian float32", Literal["float", "base64"]
    ),
    "user": USER,
}

TOKENIZE: dict[str, Rule] = {
    "model": Rule("honoured", "missing: the served model", schemas.Label),
    "prompt": Rule("honoured", "a text", schemas.Text),
    "messages": Rule(
        "honoured",
        "instead of prompt: a conversation through the chat template, held to the rules of /v1/chat/completions",
        Annotated[list[schemas.Message], P(min_length=1)],
    ),
    "add_special_tokens": Rule("honoured", "begin as a prompt would (default true)", TRUE_FALSE),
    "parse_special": PARSE,
    "return_token_strs": Rule("honoured", "also each token's text", TRUE_FALSE),
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

MESSAGES: dict[str, Rule] = {
    "model": MODEL,
    "messages": Rule(
        "honoured",
        'text, tool_use and tool_result blocks (is_error: the result begins with "Error: "); a last message of the assistant\'s is continued',
        Annotated[list[schemas.AnthropicMessage], P(min_length=1)],
        required=True,
    ),
    "max_tokens": Rule("honoured", "most tokens to write", LENGTH, required=True),
    "cache_control": Rule(
        "refused", "prefixes are cached by content", only=({"type": "ephemeral"},)
    ),
    "container": Rule("refused", "no code runs here"),
    "context_management": Rule("refused", "nothing is compacted or cut"),
    "diagnostics": Rule("refused", "see the x-request-id header and the log"),
    "speed": Rule("refused", "one speed", schemas.Text, only=("standard",)),
    "user_profile_id": Rule("refused", "no profiles are kept here"),
    "workspace_id": Rule("refused", "there are no workspaces here"),
    "inference_geo": Rule("refused", "the model runs where this server runs"),
    "mcp_servers": Rule("refused", "no address from a request is ever contacted", only=([],)),
    "metadata": Rule("label", "user_id is written to the log", schemas.AnthropicMetadata),
    "output_config": Rule(
        "honoured", "format: json_schema (enforced while drawing)", schemas.AnthropicOutputConfig
    ),
    "output_format": Rule(
        "honoured",
        "json_schema (the earlier name of output_config.format)",
        schemas.AnthropicFormat,
    ),
    "service_tier": Rule("refused", "one tier", schemas.Text, only=("auto", "standard_only")),
    "stop_sequences": Rule("honoured", FIELDS["stop"].help, list[schemas.Text]),
    "stream": STREAM,
    "system": Rule(
        "honoured", "a string or text blocks", schemas.Text | list[schemas.AnthropicText]
    ),
    "temperature": sampling("temperature"),
    "thinking": Rule("refused", "the model decides", only=({"type": "disabled"},)),
    "tool_choice": Rule("honoured", "auto, any, tool, none", schemas.AnthropicChoice),
    "tools": Rule(
        "honoured",
        "functions the model may call; server tools are refused",
        list[schemas.AnthropicTool],
    ),
    "top_k": sampling("top_k"),
    "top_p": sampling("top_p"),
}

OLLAMA_OPTIONS = (
    "sampling options by Ollama's names; those for the machine are refused. num_ctx: prompt and answer together have at most so many tokens, up to "
    "the server's context; a prompt that does not fit, or not with num_predict, is refused, and nothing is cut. seed: -1 or missing, one of the "
    "server's choice; any other negative one is taken modulo 2**63"
)
_OLLAMA: dict[str, Rule] = {
    "model": MODEL,
    "stream": Rule("honoured", "lines of JSON while it is written (default true)", TRUE_FALSE),
    "format": Rule(
        "honoured",
        '"json" or a JSON schema (enforced while drawing)',
        Literal["json", ""] | dict[str, Any],
    ),
    "options": Rule("honoured", OLLAMA_OPTIONS, schemas.OllamaOptions),
    "keep_alive": Rule("refused", "the model stays loaded", only=(-1, "-1", "-1m")),
    "think": Rule("refused", "the model decides", only=(False,)),
    "logprobs": Rule("refused", "use /v1/chat/completions", only=(False,)),
    "top_logprobs": Rule("refused", "use /v1/chat/completions", only=(0,)),
    "truncate": Rule("refused", "nothing is ever cut to fit", only=(False,)),
    "shift": Rule("refused", "nothing is ever cut to fit", only=(False,)),
    "_debug_render_only": Rule("refused", "use /tokenize", only=(False,)),
}
OLLAMA_CHAT: dict[str, Rule] = {
    **_OLLAMA,
    "messages": Rule(
        "honoured",
        "roles system, user, assistant, tool; thinking that the model's template does not know is refused, and so is a tool_name that neither "
        "repeats its call's nor is looked at",
        list[schemas.OllamaMessage],
        required=True,
    ),
    "tools": Rule("honoured", "functions the model may call", list[schemas.Tool]),
}
OLLAMA_GENERATE: dict[str, Rule] = {
    **_OLLAMA,
    "prompt": Rule(
        "honoured", "the user's text; empty: an empty answer with done_reason load", schemas.Text
    ),
    "system": Rule("honoured", "a system message", schemas.Text),
    "raw": Rule("honoured", "true: the prompt as it is, without the chat template", TRUE_FALSE),
    "parse_special": Rule("honoured", f"with raw: {PARSE.help}", TRUE_FALSE),
    "suffix": Rule("refused", "text after the answer needs a model trained to fill in", only=("",)),
    "template": Rule("refused", "no template is taken from a request", only=("",)),
    "images": Rule("refused", "this server reads text", only=([],)),
    "context": Rule(
        "refused", "deprecated by Ollama; send the conversation to /api/chat", only=([],)
    ),
    "width": Rule("refused", "this server writes text"),
    "height": Rule("refused", "this server writes text"),
    "steps": Rule("refused", "this server writes text"),
}
OLLAMA_SHOW: dict[str, Rule] = {
    "model": Rule("honoured", "a name from the start-up table", schemas.Label, required=True),
    "verbose": Rule("refused", "the answer is the same", only=(False,)),
}

INPUT_TOKENS: dict[str, Rule] = {
    name: rule
    for name, rule in RESPONSES.items()
    if name
    in ("conversation", "input", "instructions", "model", "parallel_tool_calls", "previous_response_id", "reasoning", "text", "tool_choice",
        "tools", "truncation", "chat_template_kwargs")
}  # fmt: skip
COUNT_TOKENS: dict[str, Rule] = {
    name: rule
    for name, rule in MESSAGES.items()
    if name in ("model", "messages", "system", "tools", "tool_choice", "thinking", "cache_control", "output_config", "mcp_servers", "context_management")
}  # fmt: skip

CHAT_UPDATE: dict[str, Rule] = {
    "metadata": Rule(
        "label", "takes the place of the metadata that was kept", schemas.Metadata, required=True
    ),
}

# route -> (title, table): the order of the documentation
PROTOCOLS: dict[str, tuple[str, dict[str, Rule]]] = {
    "/v1/completions": ("Completions", COMPLETIONS),
    "/v1/chat/completions": ("ChatCompletions", CHAT),
    "/v1/chat/completions/{id}": ("ChatCompletionUpdate", CHAT_UPDATE),
    "/v1/responses": ("Responses", RESPONSES),
    "/v1/responses/input_tokens": ("ResponsesInputTokens", INPUT_TOKENS),
    "/v1/embeddings": ("Embeddings", EMBEDDINGS),
    "/v1/score": ("Score", SCORE),
    "/tokenize": ("Tokenize", TOKENIZE),
    "/detokenize": ("Detokenize", DETOKENIZE),
    "/v1/messages": ("AnthropicMessages", MESSAGES),
    "/v1/messages/count_tokens": ("AnthropicCountTokens", COUNT_TOKENS),
    "/api/chat": ("OllamaChat", OLLAMA_CHAT),
    "/api/generate": ("OllamaGenerate", OLLAMA_GENERATE),
    "/api/show": ("OllamaShow", OLLAMA_SHOW),
}

# ------------------------------------------------------------------------------------------------------------- queries


@dataclass(frozen=True, slots=True)
class Query:
    """A parameter in the address. It is text there: `pattern` is what the text may be."""

    help: str
    pattern: str = ".*"


_PAGE = {
    "after": Query("the id after which the page begins"),
    "limit": Query("most entries of a page, 1 to 100; missing: 20", "[1-9][0-9]?|100"),
    "order": Query("asc or desc, by age", "asc|desc"),
}
_INCLUDE = Query(
    "message.output_text.logprobs: those that were asked for are always there",
    "message\\.output_text\\.logprobs",
)
# method and route -> the parameters in its address; those of a route that is not listed are all unknown, except where nothing depends on them
QUERIES: dict[str, dict[str, Query]] = {
    "GET /v1/chat/completions": {
        **_PAGE,
        "model": Query("only answers of this model"),
        "metadata[KEY]": Query("only answers whose metadata has this value under KEY"),
    },
    "GET /v1/chat/completions/{id}/messages": _PAGE,
    "GET /v1/responses/{id}": {
        "include[]": _INCLUDE,
        "stream": Query("true: as the events of a stream", "true|false"),
        "starting_after": Query("with stream: only events of a higher number", "[0-9]{1,9}"),
        "include_obfuscation": Query("with stream: pad the deltas", "true|false"),
    },
    "GET /v1/responses/{id}/input_items": {**_PAGE, "include[]": _INCLUDE},
    "POST /v1/messages": {
        "beta": Query(
            "Anthropic's clients mark their beta calls; the fields say what they want", "true"
        )
    },
    "POST /v1/messages/count_tokens": {"beta": Query("as above", "true")},
}
ANY_QUERY = (
    "/health",
    "/health/live",
    "/health/ready",
    "/metrics",
    "/openapi.json",
)  # probes and browsers add their own
