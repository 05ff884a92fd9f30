"""Pydantic models of the Ollama API: messages, tool calls, options."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from verbatim.base.param_checks import MAX_STOP_STRINGS, MOST
from verbatim.server.api.common.schemas import JsonObject, Strict, Text, type_of

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
IGNORED_OPTIONS = OLLAMA_MACHINE_OPTIONS | dict.fromkeys(
    ("mirostat_tau", "mirostat_eta"), "there is no mirostat"
)


# Option -> why it is refused. A value that _OllamaOptions allows is accepted all the same.
REFUSED_OPTIONS = {
    "mirostat": "this sampler does not exist here; min_p and typical_p do",
    "tfs_z": "this sampler does not exist here; min_p and typical_p do",
    "penalize_newline": "the penalties apply to a newline as to any token",
}


class _OllamaOptions(Strict):
    """Ollama options that are not SamplingParams fields, or have another range."""

    num_predict: Annotated[int, Field(ge=-2, le=MOST)] | None = None
    num_ctx: Annotated[int, Field(ge=1, le=MOST)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=MOST)] | None = None
    # accepted where they change nothing; REFUSED_OPTIONS has the reasons
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
OllamaEmbedOptions = create_model("OllamaEmbedOptions", __base__=Strict, **_machine)
# Seconds, or a duration as Go writes it ("5m", "1h30m"); negative: for ever
KeepAlive = (
    Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)]
    | Annotated[float, Field(strict=True, allow_inf_nan=False)]
    | Annotated[str, Field(pattern=r"^-?[0-9]{1,9}([.][0-9]{1,9})?$")]
    | Annotated[str, Field(pattern=r"^-?([0-9]{1,9}([.][0-9]{1,9})?(ns|us|µs|ms|s|m|h))+$")]
)
