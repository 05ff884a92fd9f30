"""The field tables: every request field of every protocol, and how the server handles it.

    honoured   has the effect that its protocol defines
    label      stored with the request (log, stored object, echo); has no effect on the tokens
    refused    a field of the protocol that is not supported: 400, naming it; `only` lists the
               values that have no effect and are accepted

Any other field is unknown: 400, naming it. The pydantic request models, /openapi.json and
docs/api-fields.md are generated from these tables, so they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    param: str = ""  # the SamplingParams field that takes the value unchanged
    only: tuple[Any, ...] = ()


# 262 KB per token for a vocabulary of 49,152 ids: too much to send with every explanation
ROWS = Rule(
    "honoured",
    "with explain and receipt, for one choice: the explanations of the first 64 tokens include the "
    "whole row of logits (four bytes per id, in base64) and the grammar's mask, for a what-if; "
    "missing: row and mask are null; at most 4 such requests at once",
    Annotated[bool, P(strict=True)],
)


REPORT = Rule(
    "honoured",
    "true: the response ends with params, the parameters in force and where each came from "
    "(request, model, protocol, default)",
    Annotated[bool, P(strict=True)],
)


def sampling(name: str, param: str | None = None) -> Rule:
    return Rule("honoured", FIELDS[name].help, schemas.type_of(name), param=param or name)


def extensions(*taken: str) -> dict[str, Rule]:
    """Verbatim's parameters as extra fields of OpenAI's routes, except those in `taken`."""
    top_k = sampling("top_k")
    own = {
        "top_k": replace(top_k, help=f"{top_k.help}, and so is -1", type=top_k.type | Literal[-1])
    }
    made = {name: own.get(name) or sampling(name) for name in FIELDS if name not in taken}
    return made | {"explain_rows": ROWS, "report_params": REPORT}


INT64 = Annotated[int, P(strict=True, ge=-(2**63), le=2**63 - 1)]
TRUE_FALSE = Annotated[bool, P(strict=True)]
LENGTH = Annotated[int, P(strict=True, ge=1, le=MOST)]
NUMBER = Annotated[float, P(strict=True, allow_inf_nan=False)]
NO_LIMIT = -1  # max_tokens of llama.cpp's clients: up to the context length
MODEL = Rule(
    "honoured", "a name from the start-up table (see /v1/models)", schemas.Label, required=True
)
SEED = Rule(
    "honoured",
    "makes sampling repeatable; a negative seed, which OpenAI allows, is taken modulo 2**63 "
    "(-1 is 9223372036854775807); the response reports the seed used",
    INT64,
)
LIST_SEED = Rule(
    "honoured",
    f"{SEED.help}; all prompts of a list share it, so equal prompts get equal outputs; missing: "
    "each prompt of a list gets its own, which its choices report (the response's seed is null)",
    INT64,
)
STREAM = Rule("honoured", "stream the output as events", TRUE_FALSE)
USER = Rule("label", "written to the log", schemas.Label)
STREAM_OPTIONS = Rule(
    "honoured",
    "include_usage, include_obfuscation, continuous_usage_stats (the usage so far in every chunk, "
    "as vLLM sends it; needs include_usage)",
    schemas.StreamOptions,
)
STOP = Rule("honoured", FIELDS["stop"].help, schemas.type_of("stop"))
TIER = Rule("refused", "there is one tier", schemas.Text, only=("auto", "default"))
CACHE_KEY = Rule(
    "label", "the prefix cache matches prefixes by content and needs no hint", schemas.Label
)
RETENTION = Rule(
    "refused",
    "cached prefixes stay in memory until they are evicted",
    schemas.Text,
    only=("in_memory", "in-memory"),
)
SAFETY = Rule("label", "written to the log", schemas.Label)
METADATA = Rule(
    "label", "stored with the object; echoed where the protocol echoes it", schemas.Metadata
)
NO_MODERATION = Rule("refused", "no moderation model runs here")
PARSE = Rule(
    "honoured",
    "true: the text of a control token (<|im_start|>) in the prompt becomes that token; missing: "
    "it stays plain text, and the response has a warning",
    TRUE_FALSE,
)
NO_PARSE = Rule(
    "refused",
    "the chat template adds the control tokens; message text stays text",
    only=(False,),
)
ADD_PROMPT = Rule(
    "honoured",
    "false: the template starts no answer after the last message; true, also after a last message "
    "of the assistant",
    TRUE_FALSE,
)
CONTINUE = Rule(
    "honoured",
    "true: the model continues the last message, which is one of the assistant, and the answer is "
    "the continuation; missing: true for a last message of the assistant without tool calls, "
    "unless add_generation_prompt is set",
    TRUE_FALSE,
)
KWARGS = Rule(
    "honoured",
    "further variables for the chat template; a variable that the template never reads is refused",
    dict[str, Any],
)

# ---------------------------------------------------------------------------------- tables

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
        "report each token's log-probability and this many alternatives",
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
        "roles system, developer, user, assistant, tool; text parts; a name or reasoning_content "
        "that the model's template does not read is refused (tool_call_id is accepted, because the "
        "order of results implies it; so is the name of a result that repeats its call's)",
        Annotated[list[schemas.Message], P(min_length=1)],
        required=True,
    ),
    "audio": Rule("refused", "only text output is supported"),
    "add_generation_prompt": ADD_PROMPT,
    "continue_final_message": CONTINUE,
    "chat_template_kwargs": KWARGS,
    "function_call": Rule(
        "refused", "deprecated by OpenAI; use tool_choice", only=("none", "auto")
    ),
    "functions": Rule("refused", "deprecated by OpenAI; use tools", only=([],)),
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
    "prediction": Rule("refused", "speculative decoding needs no prediction (see speculate)"),
    "prompt_cache_key": CACHE_KEY,
    "prompt_cache_options": Rule("refused", "the prefix cache has no per-request options"),
    "prompt_cache_retention": RETENTION,
    "reasoning_effort": Rule(
        "honoured",
        "passed to a chat template that reads it; else none switches thinking off and any other "
        "level on; refused where the template has no such switch",
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
    "verbosity": Rule("refused", "ask for it in the prompt", schemas.Text, only=("medium",)),
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
        schemas.ResponseInput,
    ),
    "access_programs": Rule("refused", "there are no access programs"),
    "background": Rule("refused", "responses are generated while the client waits", only=(False,)),
    "chat_template_kwargs": KWARGS,
    "context_management": Rule("refused", "the server never compacts or truncates input"),
    "conversation": Rule("refused", "use previous_response_id, or send the whole input"),
    "image": Rule("refused", "only text input is supported"),
    "include": Rule(
        "honoured",
        "message.output_text.logprobs",
        Annotated[list[Literal["message.output_text.logprobs"]], P(max_length=8)],
    ),
    "instructions": Rule("honoured", "a system message before the input", schemas.Text),
    "max_output_tokens": Rule("honoured", "maximum number of output tokens", LENGTH),
    "max_tool_calls": Rule("refused", "there are no built-in tools to count"),
    "metadata": METADATA,
    "moderation": NO_MODERATION,
    "parallel_tool_calls": Rule("honoured", "false: at most one call per response", TRUE_FALSE),
    "previous_response_id": Rule("honoured", "continue a stored response", schemas.Label),
    "prompt": Rule("refused", "the server stores no prompt templates"),
    "prompt_cache_key": CACHE_KEY,
    "prompt_cache_options": Rule("refused", "the prefix cache has no per-request options"),
    "prompt_cache_retention": RETENTION,
    "reasoning": Rule(
        "honoured",
        "effort as reasoning_effort of chat completions; the whole thought is returned as a "
        "reasoning item, so a summary is never written",
        schemas.ResponseReasoning,
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
    "stream_options": Rule("honoured", "include_obfuscation", schemas.ResponseStreamOptions),
    "text": Rule(
        "honoured",
        "format: text, json_object, json_schema (enforced while sampling)",
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
    "truncation": Rule(
        "refused", "the server never truncates a prompt", schemas.Text, only=("disabled",)
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

MESSAGES: dict[str, Rule] = {
    "model": MODEL,
    "messages": Rule(
        "honoured",
        'text, tool_use and tool_result blocks (is_error: the result starts with "Error: "); a '
        "last message with the assistant role is continued",
        Annotated[list[schemas.AnthropicMessage], P(min_length=1)],
        required=True,
    ),
    "max_tokens": Rule("honoured", "maximum number of output tokens", LENGTH, required=True),
    "cache_control": Rule(
        "refused", "the prefix cache matches prefixes by content", only=({"type": "ephemeral"},)
    ),
    "container": Rule("refused", "the server runs no code"),
    "context_management": Rule("refused", "the server never compacts or truncates input"),
    "diagnostics": Rule("refused", "see the x-request-id header and the log"),
    "speed": Rule("refused", "there is one speed", schemas.Text, only=("standard",)),
    "user_profile_id": Rule("refused", "the server has no profiles"),
    "workspace_id": Rule("refused", "the server has no workspaces"),
    "inference_geo": Rule("refused", "the model runs where this server runs"),
    "mcp_servers": Rule("refused", "the server contacts no address from a request", only=([],)),
    "metadata": Rule("label", "user_id is written to the log", schemas.AnthropicMetadata),
    "output_config": Rule(
        "honoured", "format: json_schema (enforced while sampling)", schemas.AnthropicOutputConfig
    ),
    "output_format": Rule(
        "honoured",
        "json_schema (the earlier name of output_config.format)",
        schemas.AnthropicFormat,
    ),
    "service_tier": Rule(
        "refused", "there is one tier", schemas.Text, only=("auto", "standard_only")
    ),
    "stop_sequences": Rule("honoured", FIELDS["stop"].help, list[schemas.Text]),
    "stream": STREAM,
    "system": Rule(
        "honoured", "a string or text blocks", schemas.Text | list[schemas.AnthropicText]
    ),
    "temperature": sampling("temperature"),
    "thinking": Rule(
        "honoured",
        "enabled and adaptive switch thinking on, disabled off, where the chat template has the "
        "switch; budget_tokens: most tokens of the thought",
        schemas.AnthropicThinking,
    ),
    "tool_choice": Rule("honoured", "auto, any, tool, none", schemas.AnthropicChoice),
    "tools": Rule(
        "honoured",
        "functions the model may call; server tools are refused",
        list[schemas.AnthropicTool],
    ),
    "top_k": sampling("top_k"),
    "top_p": sampling("top_p"),
    "report_params": REPORT,
}

OLLAMA_OPTIONS = (
    "sampling options by Ollama's names. Machine options (num_gpu, num_thread, use_mmap, ...) are "
    "accepted without effect, because no token depends on the machine here, and the answer has a "
    "warning for each. repeat_last_n: the penalties look back this many tokens; 0: they are off; "
    "missing or -1: all tokens. num_ctx: maximum number of "
    "prompt and output tokens together, up to the server's context; a prompt that does not fit, "
    "alone or with num_predict, is refused, and nothing is truncated. seed: -1 or missing: the "
    "server chooses; any other negative seed is taken modulo 2**63"
)
KEEP_ALIVE = Rule(
    "label",
    "seconds, or a duration such as 5m; the model stays loaded as long as the server runs, so a "
    "duration has no effect; 0 without a prompt, which asks to unload the model, is refused",
    schemas.KeepAlive,
)
_OLLAMA: dict[str, Rule] = {
    "model": MODEL,
    "stream": Rule("honoured", "stream the output as lines of JSON (default true)", TRUE_FALSE),
    "format": Rule(
        "honoured",
        '"json" or a JSON schema (enforced while sampling)',
        Literal["json", ""] | dict[str, Any],
    ),
    "options": Rule("honoured", OLLAMA_OPTIONS, schemas.OllamaOptions),
    "keep_alive": KEEP_ALIVE,
    "think": Rule(
        "honoured",
        "true or a level switches thinking on, false off, where the chat template has the switch",
        TRUE_FALSE | Literal["low", "medium", "high"],
    ),
    "logprobs": Rule("refused", "use /v1/chat/completions", only=(False,)),
    "top_logprobs": Rule("refused", "use /v1/chat/completions", only=(0,)),
    "truncate": Rule("refused", "the server never truncates a prompt", only=(False,)),
    "shift": Rule("refused", "the server never truncates a prompt", only=(False,)),
    "_debug_render_only": Rule("refused", "use /tokenize", only=(False,)),
    "report_params": REPORT,
}
OLLAMA_CHAT: dict[str, Rule] = {
    **_OLLAMA,
    "messages": Rule(
        "honoured",
        "roles system, user, assistant, tool; a last message of the assistant is continued; "
        "thinking that the model's template does not read is refused, and so is a tool_name that "
        "it does not read and that differs from its call's",
        list[schemas.OllamaMessage],
        required=True,
    ),
    "tools": Rule("honoured", "functions the model may call", list[schemas.Tool]),
}
OLLAMA_GENERATE: dict[str, Rule] = {
    **_OLLAMA,
    "prompt": Rule(
        "honoured", "the user's text; empty: an empty response with done_reason load", schemas.Text
    ),
    "system": Rule("honoured", "a system message", schemas.Text),
    "raw": Rule(
        "honoured", "true: use the prompt unchanged, without the chat template", TRUE_FALSE
    ),
    "parse_special": Rule("honoured", f"with raw: {PARSE.help}", TRUE_FALSE),
    "suffix": Rule("refused", "infilling needs a model trained for it", only=("",)),
    "template": Rule("refused", "the server accepts no template from a request", only=("",)),
    "images": Rule("refused", "only text input is supported", only=([],)),
    "context": Rule(
        "refused", "deprecated by Ollama; send the conversation to /api/chat", only=([],)
    ),
    "width": Rule("refused", "only text output is supported"),
    "height": Rule("refused", "only text output is supported"),
    "steps": Rule("refused", "only text output is supported"),
}
_OLLAMA_EMBED: dict[str, Rule] = {
    "model": MODEL,
    "options": Rule(
        "honoured",
        "machine options have no effect, and the answer has a warning for each; an embedding is "
        "not sampled, so all other options are refused",
        schemas.OllamaEmbedOptions,
    ),
    "keep_alive": KEEP_ALIVE,
}
OLLAMA_EMBED: dict[str, Rule] = {
    **_OLLAMA_EMBED,
    "input": Rule(
        "honoured",
        "a text or a list of texts",
        schemas.Text | Annotated[list[schemas.Text], P(min_length=1)],
        required=True,
    ),
    "dimensions": Rule(
        "honoured", "keep this many leading dimensions and normalise to length 1", LENGTH
    ),
    "truncate": Rule("refused", "the server never truncates a prompt", only=(False,)),
}
OLLAMA_EMBEDDINGS: dict[str, Rule] = {
    **_OLLAMA_EMBED,
    "prompt": Rule("honoured", "a text", schemas.Text, required=True),
}
OLLAMA_SHOW: dict[str, Rule] = {
    "model": Rule("honoured", "a name from the start-up table", schemas.Label, required=True),
    "verbose": Rule("refused", "it would change nothing", only=(False,)),
}

LAST_N = Annotated[int, P(strict=True, ge=-1, le=MOST)]
# llama.cpp's name -> ours, where the value is passed on unchanged
_LLAMA_PARAMS = {
    **{
        name: name
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "typical_p",
            "top_n_sigma",
            "xtc_probability",
            "xtc_threshold",
            "presence_penalty",
            "frequency_penalty",
            "dry_multiplier",
            "dry_base",
            "dry_allowed_length",
            "ignore_eos",
            "json_schema",
            "grammar",
        )
    },
    "repeat_penalty": "repetition_penalty",
    "dry_sequence_breakers": "dry_breakers",
}
LLAMA_COMPLETION: dict[str, Rule] = {
    "model": Rule("honoured", "missing: the served model", schemas.Label),
    "prompt": Rule(
        "honoured",
        "a string in the model's own format, or token ids",
        schemas.Text | schemas.PromptIds,
        required=True,
    ),
    "n_predict": Rule(
        "honoured",
        "maximum number of output tokens; missing or -1: up to the context length",
        Annotated[int, P(strict=True, ge=-1, le=MOST)],
    ),
    "stream": STREAM,
    "stop": Rule("honoured", FIELDS["stop"].help, list[schemas.Text]),
    "seed": Rule(
        "honoured",
        "makes sampling repeatable; -1 or missing: the server chooses; the response reports the "
        "seed used",
        INT64,
    ),
    "n_probs": Rule(
        "honoured",
        "report each token's log-probability and this many alternatives",
        schemas.type_of("logprobs"),
    ),
    "logit_bias": Rule(
        "honoured",
        "pairs of a token id and a number added to its logit; false: the id is never drawn",
        list[schemas.BiasPair],
    ),
    "top_k": extensions()["top_k"],
    **{theirs: sampling(ours) for theirs, ours in _LLAMA_PARAMS.items()},
    "repeat_last_n": Rule(
        "honoured",
        "the penalties look back this many tokens; 0: they are off; missing or -1: all tokens",
        LAST_N,
    ),
    "dry_penalty_last_n": Rule(
        "honoured", "DRY looks back this many tokens; 0: it is off; missing or -1: all", LAST_N
    ),
    "parse_special": Rule(
        "honoured",
        "false: the text of a control token (<|im_start|>) in the prompt stays plain text; "
        "missing: it becomes that token, as in llama.cpp",
        TRUE_FALSE,
    ),
    "return_tokens": Rule("honoured", "the token ids of the output (not streamed)", TRUE_FALSE),
    "cache_prompt": Rule(
        "refused", "the prefix cache is always on, and changes no token", only=(True,)
    ),
    "id_slot": Rule("refused", "the scheduler has no slots to choose from", only=(-1,)),
    "n_keep": Rule("label", "the server never truncates a prompt", INT64),
    "samplers": Rule("refused", "the order of the samplers is fixed (docs/sampling.md)"),
    "mirostat": Rule("refused", "this sampler is not here", only=(0,)),
    "mirostat_tau": Rule("label", "without mirostat it has no effect", NUMBER),
    "mirostat_eta": Rule("label", "without mirostat it has no effect", NUMBER),
    "dynatemp_range": Rule("refused", "the temperature is fixed", only=(0, 0.0)),
    "dynatemp_exponent": Rule("label", "without dynatemp_range it has no effect", NUMBER),
    "min_keep": Rule("refused", "the filters keep at least one token", only=(0, 1)),
    "post_sampling_probs": Rule("refused", "use logprobs_mode on /v1/completions", only=(False,)),
    "timings_per_token": Rule("refused", "the last event has the timings", only=(False,)),
    "response_fields": Rule("refused", "a response has all its fields", only=([],)),
    "t_max_predict_ms": Rule("refused", "the time limit is the server's", only=(0, -1)),
    "n_indent": Rule("refused", "use a regex or a grammar", only=(0,)),
    "lora": Rule("refused", "adapters are chosen when the server starts", only=([],)),
    "report_params": REPORT,
}
LLAMA_TEMPLATE: dict[str, Rule] = {
    "model": Rule("honoured", "missing: the served model", schemas.Label),
    "messages": CHAT["messages"],
    "tools": CHAT["tools"],
    "add_generation_prompt": ADD_PROMPT,
    "continue_final_message": CONTINUE,
    "chat_template_kwargs": KWARGS,
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

LENS_STEP: dict[str, Rule] = {
    "prompt": Rule("honoured", "the prompt as token ids", schemas.PromptIds, required=True),
    "output": Rule("honoured", "the output before the step, as token ids", list[schemas.TokenId]),
    "params": Rule(
        "honoured",
        "sampling parameters by name, as in a receipt; max_tokens has no effect on a step",
        dict[str, Any],
    ),
    "choice": Rule(
        "honoured",
        "index of the choice, for its noise (default 0)",
        Annotated[int, P(strict=True, ge=0, le=1023)],
    ),
    "rest": Rule(
        "honoured",
        "also return every logit after bias, masks and penalties (base64, row_type f4 or f8); at "
        "most 4 such requests at once",
        TRUE_FALSE,
    ),
}
LENS_REPLAY: dict[str, Rule] = {
    "receipt": Rule("honoured", "a receipt of this server", dict[str, Any], required=True),
    "explain": Rule(
        "honoured", "also explain each token with this many candidates", schemas.type_of("explain")
    ),
}

CHAT_UPDATE: dict[str, Rule] = {
    "metadata": Rule("label", "replaces the stored metadata", schemas.Metadata, required=True),
}

# route -> (title, table), in the order of docs/api-fields.md
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
    "/completion": ("LlamaCompletion", LLAMA_COMPLETION),
    "/apply-template": ("LlamaApplyTemplate", LLAMA_TEMPLATE),
    "/v1/messages": ("AnthropicMessages", MESSAGES),
    "/v1/messages/count_tokens": ("AnthropicCountTokens", COUNT_TOKENS),
    "/api/chat": ("OllamaChat", OLLAMA_CHAT),
    "/api/generate": ("OllamaGenerate", OLLAMA_GENERATE),
    "/api/embed": ("OllamaEmbed", OLLAMA_EMBED),
    "/api/embeddings": ("OllamaEmbeddings", OLLAMA_EMBEDDINGS),
    "/api/show": ("OllamaShow", OLLAMA_SHOW),
    "/lens/api/step": ("LensStep", LENS_STEP),
    "/lens/api/replay": ("LensReplay", LENS_REPLAY),
}

# --------------------------------------------------------------------------------- queries


@dataclass(frozen=True, slots=True)
class Query:
    """A query parameter. Its value must match `pattern`."""

    help: str
    pattern: str = ".*"


_PAGE = {
    "after": Query("the id after which the page starts"),
    "limit": Query("maximum entries per page, 1 to 100; missing: 20", "[1-9][0-9]?|100"),
    "order": Query("asc or desc, by age", "asc|desc"),
}
_INCLUDE = Query(
    "message.output_text.logprobs: always included if the request had them",
    "message\\.output_text\\.logprobs",
)
# "METHOD route" -> its query parameters. Routes that are not listed have none, except ANY_QUERY.
QUERIES: dict[str, dict[str, Query]] = {
    "GET /v1/chat/completions": {
        **_PAGE,
        "model": Query("only responses of this model"),
        "metadata[KEY]": Query("only responses whose metadata has this value under KEY"),
    },
    "GET /v1/chat/completions/{id}/messages": _PAGE,
    "GET /v1/responses/{id}": {
        "include[]": _INCLUDE,
        "stream": Query("true: as stream events", "true|false"),
        "starting_after": Query(
            "with stream: only events with a higher sequence number", "[0-9]{1,9}"
        ),
        "include_obfuscation": Query("with stream: pad the deltas", "true|false"),
    },
    "GET /v1/responses/{id}/input_items": {**_PAGE, "include[]": _INCLUDE},
    "POST /v1/messages": {
        "beta": Query("set by Anthropic's clients on beta calls; has no effect", "true")
    },
    "POST /v1/messages/count_tokens": {"beta": Query("as above", "true")},
    "GET /lens/api/engine": {
        "after": Query("only steps with a higher number; missing: all that are kept", "[0-9]{1,15}")
    },
}
# These routes ignore query parameters, which probes and browsers add.
ANY_QUERY = ("/", "/health", "/health/live", "/health/ready", "/metrics", "/openapi.json", "/docs")
