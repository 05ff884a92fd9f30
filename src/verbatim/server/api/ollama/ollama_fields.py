"""The request fields of Ollama's routes (see common/field_rules.py): messages, tool calls,
options."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from verbatim.base.json_io import JsonObject
from verbatim.base.param_checks import MAX_STOP_STRINGS, MOST
from verbatim.server.api.common import field_rules as shared
from verbatim.server.api.common.field_rules import (
    Refused,
    RequestBody,
    Unchecked,
    honoured,
    ignored,
    refused,
    taking,
)
from verbatim.server.api.common.schemas import (
    Alternatives,
    Int64,
    Label,
    LastN,
    Length,
    Strict,
    Text,
    Tool,
)

# Ollama option -> SamplingParams field, where both have the same range
OLLAMA_PARAMS = {
    **{n: n for n in ("temperature", "top_k", "top_p", "min_p", "typical_p")},
    "repeat_penalty": "repetition_penalty",
    **{n: n for n in ("presence_penalty", "frequency_penalty")},
}


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
    name: Label | None = None
    thinking: Text | None = None
    images: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: Text | None = None
    tool_call_id: Text | None = None
    cache_control: JsonObject | None = None  # without effect (common/field_effects.py)


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
    "draft_num_predict": f"{_AT_START} (--speculate)",
    "num_gqa": "the model's file states it",
    "num_keep": "the server never truncates a prompt, so no token has to be kept",
}
_NO_SAMPLER = refused("this sampler does not exist here; min_p and typical_p do")
_PENALISED = refused("the penalties apply to a newline as to any token")
_NO_MIROSTAT = ignored("there is no mirostat")
_machine: Any = {
    name: (bool | int | None, ignored(why)) for name, why in OLLAMA_MACHINE_OPTIONS.items()
}
_Machine: Any = create_model("_Machine", __base__=RequestBody, **_machine)


class OllamaOptions(taking(OLLAMA_PARAMS, _Machine)):  # type: ignore[misc]
    num_predict: Annotated[int, Field(ge=-2, le=MOST)] | None = None
    num_ctx: Length | None = None
    repeat_last_n: LastN | None = None
    penalize_newline: Literal[True] | None = _PENALISED
    mirostat: Literal[0] | None = _NO_SAMPLER
    mirostat_tau: float | None = _NO_MIROSTAT
    mirostat_eta: float | None = _NO_MIROSTAT
    tfs_z: Literal[1] | None = _NO_SAMPLER
    seed: Int64 | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOP_STRINGS)] | None = None


class OllamaEmbedOptions(_Machine):  # type: ignore[misc]
    penalize_newline: Refused = _PENALISED
    mirostat: Refused = _NO_SAMPLER
    tfs_z: Refused = _NO_SAMPLER


# Seconds, or a duration as Go writes it ("5m", "1h30m"); negative: for ever
KeepAlive = (
    Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)]
    | Annotated[float, Field(strict=True, allow_inf_nan=False)]
    | Annotated[str, Field(pattern=r"^-?[0-9]{1,9}([.][0-9]{1,9})?$")]
    | Annotated[str, Field(pattern=r"^-?([0-9]{1,9}([.][0-9]{1,9})?(ns|us|µs|ms|s|m|h))+$")]
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
    model: Label = shared.MODEL
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
    report_params: bool | None = shared.REPORT


class OllamaChat(_OllamaText):
    messages: list[OllamaMessage] = honoured(
        "roles system, user, assistant, tool; a last message of the assistant is continued; "
        "thinking that the model's template does not read is refused; a tool_name that it does not "
        "read has no effect and gets a warning",
        required=True,
    )
    tools: list[Tool] | None = shared.TOOLS


class OllamaGenerate(_OllamaText):
    prompt: Text | None = honoured(
        "the user's text; empty: an empty response with done_reason load"
    )
    system: Text | None = honoured("a system message")
    raw: bool | None = honoured("true: use the prompt unchanged, without the chat template")
    parse_special: bool | None = honoured(f"with raw: {shared.PARSE_TEXT}")
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
    model: Label = shared.MODEL
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
    truncate: bool | None = shared.TRUNCATE


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
