"""The request fields of Ollama's routes (see common/field_rules.py)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verbatim.base.json_io import JsonObject
from verbatim.server.api.common.field_rules import (
    MODEL,
    PARSE_TEXT,
    REPORT,
    TOOLS,
    TRUNCATE,
    Refused,
    RequestBody,
    Unchecked,
    honoured,
    ignored,
    refused,
)
from verbatim.server.api.common.schemas import Alternatives, Label, Length, Text, Tool
from verbatim.server.api.ollama.ollama_schemas import (
    KeepAlive,
    OllamaEmbedOptions,
    OllamaMessage,
    OllamaOptions,
)

OLLAMA_OPTIONS = (
    "sampling options by Ollama's names. Machine options (num_gpu, num_thread, use_mmap, ...) are "
    "accepted without effect, because no token depends on the machine here, and the answer has a "
    "warning for each. repeat_last_n: the penalties look back this many tokens; 0: they are off; "
    "missing or -1: all tokens. num_ctx: maximum number of "
    "prompt and output tokens together, up to the server's context; a prompt that does not fit, "
    "alone or with num_predict, is refused, and nothing is truncated. seed: -1 or missing: the "
    "server chooses; any other negative seed is taken modulo 2**63"
)
KEEP_ALIVE = ignored(
    "a model stays loaded until the server ends or needs its memory (--model-idle-seconds); only "
    "0 without a prompt unloads one of several models"
)


class _OllamaText(RequestBody):
    model: Label = MODEL
    stream: bool | None = honoured("stream the output as lines of JSON (default true)")
    format: Literal["json", ""] | JsonObject | None = honoured(
        '"json" or a JSON schema (enforced while sampling)'
    )
    options: OllamaOptions | None = honoured(OLLAMA_OPTIONS)
    keep_alive: KeepAlive | None = KEEP_ALIVE
    think: bool | Literal["low", "medium", "high"] | None = honoured(
        "true or a level switches thinking on, false off, where the chat template has the switch"
    )
    logprobs: bool | None = honoured("report each token's log-probability")
    top_logprobs: Alternatives | None = honoured("alternatives for each token; needs logprobs")
    truncate: bool | None = ignored(
        "a prompt is never truncated; one that does not fit is refused", False
    )
    shift: bool | None = ignored("an answer ends where the context does", False)
    debug_render_only_: Literal[False] | None = refused(
        "use /tokenize", False, alias="_debug_render_only"
    )
    report_params: bool | None = REPORT


class OllamaChat(_OllamaText):
    messages: list[OllamaMessage] = honoured(
        "roles system, user, assistant, tool; a last message of the assistant is continued; "
        "thinking that the model's template does not read is refused; a tool_name that it does not "
        "read has no effect and gets a warning",
        required=True,
    )
    tools: list[Tool] | None = TOOLS


class OllamaGenerate(_OllamaText):
    prompt: Text | None = honoured(
        "the user's text; empty: an empty response with done_reason load"
    )
    system: Text | None = honoured("a system message")
    raw: bool | None = honoured("true: use the prompt unchanged, without the chat template")
    parse_special: bool | None = honoured(f"with raw: {PARSE_TEXT}")
    suffix: Literal[""] | None = refused("infilling needs a model trained for it", "")
    template: Literal[""] | None = refused("the server accepts no template from a request", "")
    images: Unchecked | None = refused("only text input is supported", [])
    context: Unchecked | None = refused(
        "deprecated by Ollama; send the conversation to /api/chat", []
    )
    width: Refused = refused("only text output is supported")
    height: Refused = refused("only text output is supported")
    steps: Refused = refused("only text output is supported")


class _OllamaVectors(RequestBody):
    model: Label = MODEL
    options: OllamaEmbedOptions | None = honoured(
        "machine options have no effect, and the answer has a warning for each; an embedding is "
        "not sampled, so all other options are refused"
    )
    keep_alive: KeepAlive | None = KEEP_ALIVE


class OllamaEmbed(_OllamaVectors):
    input: Text | Annotated[list[Text], Field(min_length=1)] = honoured(
        "a text or a list of texts", required=True
    )
    dimensions: Length | None = honoured(
        "keep this many leading dimensions and normalise to length 1"
    )
    truncate: bool | None = TRUNCATE


class OllamaEmbeddings(_OllamaVectors):
    prompt: Text = honoured("a text", required=True)


class OllamaShow(RequestBody):
    model: Label = honoured("a name from the start-up table", required=True)
    verbose: Literal[False] | None = refused(
        "the vocabulary is not sent; /tokenize and /detokenize read it", False
    )


class OllamaPull(RequestBody):
    model: Label = honoured(
        "a served model: success at once; any other name is refused, with the command that fetches "
        "a model",
        required=True,
    )
    stream: bool | None = honoured("lines of JSON (default true), or one object")
    insecure: Literal[False] | None = refused("no model is fetched on request", False)
