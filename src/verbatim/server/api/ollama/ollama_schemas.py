"""Pydantic models of the Ollama API: messages, tool calls, options."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from verbatim.base.json_io import JsonObject
from verbatim.base.param_checks import MAX_STOP_STRINGS, MOST
from verbatim.server.api.common.field_rules import Refused, RequestBody, ignored, refused, taking
from verbatim.server.api.common.schemas import Int64, Label, LastN, Length, Strict, Text

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
