"""The field tables: every request field of every protocol, and how the server handles it.

    honoured   has the effect that its protocol defines
    label      stored with the request (log, stored object, echo); has no effect on the tokens
    ignored    cannot change the answer here: accepted with a warning, unless `only` lists the value
    refused    a field of the protocol that is not supported: 400, naming it; `only` lists the
               values that have no effect and are accepted

Any other field is unknown: 400, naming it. The pydantic request models, /openapi.json and
docs/api-fields.md are generated from these tables, so they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass

from verbatim.server.api.anthropic.anthropic_fields import COUNT_TOKENS, MESSAGES
from verbatim.server.api.common.field_rules import Rule
from verbatim.server.api.llamacpp.local_fields import (
    LENS_REPLAY,
    LENS_STEP,
    LLAMA_COMPLETION,
    LLAMA_EMBEDDING,
    LLAMA_TEMPLATE,
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    OLLAMA_GENERATE,
    OLLAMA_PULL,
    OLLAMA_SHOW,
)
from verbatim.server.api.openai.openai_fields import (
    CHAT,
    CHAT_UPDATE,
    COMPLETIONS,
    DETOKENIZE,
    EMBEDDINGS,
    INPUT_TOKENS,
    RERANK,
    RESPONSES,
    SCORE,
    TOKENIZE,
)

# route -> (title, table), in the order of docs/api-fields.md
PROTOCOLS: dict[str, tuple[str, dict[str, Rule]]] = {
    "/v1/completions": ("Completions", COMPLETIONS),
    "/v1/chat/completions": ("ChatCompletions", CHAT),
    "/v1/chat/completions/{id}": ("ChatCompletionUpdate", CHAT_UPDATE),
    "/v1/responses": ("Responses", RESPONSES),
    "/v1/responses/input_tokens": ("ResponsesInputTokens", INPUT_TOKENS),
    "/v1/embeddings": ("Embeddings", EMBEDDINGS),
    "/v1/rerank": ("Rerank", RERANK),
    "/rerank": ("LlamaRerank", RERANK),
    "/v1/score": ("Score", SCORE),
    "/tokenize": ("Tokenize", TOKENIZE),
    "/detokenize": ("Detokenize", DETOKENIZE),
    "/completion": ("LlamaCompletion", LLAMA_COMPLETION),
    "/embedding": ("LlamaEmbedding", LLAMA_EMBEDDING),
    "/apply-template": ("LlamaApplyTemplate", LLAMA_TEMPLATE),
    "/v1/messages": ("AnthropicMessages", MESSAGES),
    "/v1/messages/count_tokens": ("AnthropicCountTokens", COUNT_TOKENS),
    "/api/chat": ("OllamaChat", OLLAMA_CHAT),
    "/api/generate": ("OllamaGenerate", OLLAMA_GENERATE),
    "/api/embed": ("OllamaEmbed", OLLAMA_EMBED),
    "/api/embeddings": ("OllamaEmbeddings", OLLAMA_EMBEDDINGS),
    "/api/show": ("OllamaShow", OLLAMA_SHOW),
    "/api/pull": ("OllamaPull", OLLAMA_PULL),
    "/lens/api/step": ("LensStep", LENS_STEP),
    "/lens/api/replay": ("LensReplay", LENS_REPLAY),
}

# A field of another protocol -> the names that may mean the same here, for the error's suggestion.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "think": ("reasoning_effort", "reasoning", "thinking"),
    "thinking": ("reasoning_effort", "reasoning", "think"),
    "enable_thinking": ("reasoning_effort", "reasoning", "thinking", "think"),
    "reasoning_effort": ("reasoning", "thinking", "think"),
    "reasoning": ("reasoning_effort", "thinking", "think"),
    "content": ("prompt", "messages"),
    "texts": ("documents", "input"),
    "input": ("content", "prompt"),
    "name": ("model",),
    "num_predict": ("max_tokens", "max_output_tokens", "n_predict", "options"),
    "n_predict": ("max_tokens", "max_output_tokens", "options"),
    "max_tokens": ("max_output_tokens", "n_predict", "options", "num_predict"),
    "repetition_penalty": ("repeat_penalty", "options"),
    "repeat_penalty": ("repetition_penalty", "options"),
    "repeat_last_n": ("penalty_range", "options"),
    "temperature": ("options",),
    "stop": ("stop_sequences", "options"),
    "response_format": ("text", "output_config", "format", "json_schema"),
    "guided_json": ("json_schema", "output_config", "format"),
    "guided_regex": ("regex",),
    "guided_choice": ("choice",),
    "guided_grammar": ("grammar",),
    "structured_outputs": ("output_config", "format"),
    "use_beam_search": ("num_beams",),
    "lora_request": ("adapter",),
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
