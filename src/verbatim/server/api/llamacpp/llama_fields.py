"""The request fields of llama.cpp's routes (see common/field_rules.py)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verbatim.base.json_io import JsonObject
from verbatim.base.migration_hints import hints
from verbatim.base.params import FIELDS, FILTERS
from verbatim.server.api.common import field_rules as shared
from verbatim.server.api.common.field_rules import (
    Refused,
    RequestBody,
    Unchecked,
    WithTopK,
    honoured,
    ignored,
    refused,
    taking,
)
from verbatim.server.api.common.schemas import (
    Alternatives,
    BiasPair,
    Int64,
    Label,
    LastN,
    Message,
    Number,
    Prompt,
    PromptIds,
    Text,
    Tool,
)

# llama.cpp's name -> ours, where the value is passed on unchanged
_SAME = (
    *("temperature", *(name for name in FILTERS if name != "top_k"), "xtc_threshold"),
    *("presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base"),
    *("dry_allowed_length", "ignore_eos", "json_schema", "grammar"),
)
_PARAMS = {name: name for name in _SAME} | {
    "repeat_penalty": "repetition_penalty",
    "dry_sequence_breakers": "dry_breakers",
}


class LlamaCompletion(taking(_PARAMS, WithTopK)):  # type: ignore[misc]
    model: Label | None = honoured("missing: the served model")
    prompt: Text | PromptIds = honoured(
        "a string in the model's own format, or token ids", required=True
    )
    n_predict: LastN | None = honoured(
        "maximum number of output tokens; missing or -1: up to the context length"
    )
    stream: bool | None = shared.STREAM
    stop: list[Text] | None = honoured(FIELDS["stop"].help)
    seed: Int64 | None = honoured(
        "makes sampling repeatable; -1 or missing: the server chooses; the response reports the "
        "seed used"
    )
    n_probs: Alternatives | None = honoured(
        "report each token's log-probability and this many alternatives"
    )
    logit_bias: list[BiasPair] | None = honoured(
        "pairs of a token id and a number added to its logit; false: the token is never sampled"
    )
    repeat_last_n: LastN | None = honoured(
        "the penalties look back this many tokens; 0: they are off; missing or -1: all tokens"
    )
    dry_penalty_last_n: LastN | None = honoured(
        "DRY looks back this many tokens; 0: it is off; missing or -1: all"
    )
    parse_special: bool | None = honoured(
        "false: the text of a control token (<|im_start|>) in the prompt stays plain text; "
        "missing: it becomes that token, as in llama.cpp"
    )
    return_tokens: bool | None = honoured("the token ids of the output (not streamed)")
    cache_prompt: bool | None = shared.CACHE_PROMPT
    id_slot: Int64 | None = ignored("the scheduler has no slots to choose from", -1)
    n_keep: Int64 | None = ignored("the server never truncates a prompt")
    samplers: Refused = refused("the order of the samplers is fixed (docs/sampling.md)")
    mirostat: Literal[0] | None = refused(hints("parameters")["mirostat"], 0)
    mirostat_tau: Number | None = ignored("there is no mirostat")
    mirostat_eta: Number | None = ignored("there is no mirostat")
    dynatemp_range: Unchecked | None = refused("the temperature is fixed", 0, 0.0)
    dynatemp_exponent: Number | None = ignored("there is no dynatemp_range")
    min_keep: Literal[0, 1] | None = refused("the filters keep at least one token", 0, 1)
    post_sampling_probs: Literal[False] | None = refused(
        "use logprobs_mode on /v1/completions", False
    )
    timings_per_token: Literal[False] | None = refused("the last event has the timings", False)
    response_fields: Unchecked | None = refused("a response has all its fields", [])
    t_max_predict_ms: Literal[0, -1] | None = refused("the time limit is the server's", 0, -1)
    n_indent: Literal[0] | None = refused("use a regex or a grammar", 0)
    lora: Unchecked | None = refused(
        "use the adapter's name as model; serve --adapter loads it", []
    )
    report_params: bool | None = shared.REPORT


class LlamaEmbedding(RequestBody):
    model: Label | None = honoured("missing: the served model")
    content: Prompt = honoured(
        "a string, a list of strings, token ids, or a list of lists of them", required=True
    )
    embd_normalize: Literal[-1, 2] | None = honoured(
        "2: scale the vector to length 1 (default); -1: as it is"
    )
    truncate: bool | None = shared.TRUNCATE


class LlamaApplyTemplate(RequestBody):
    model: Label | None = honoured("missing: the served model")
    messages: Annotated[list[Message], Field(min_length=1)] = shared.CHAT_MESSAGES
    tools: list[Tool] | None = shared.TOOLS
    add_generation_prompt: bool | None = shared.ADD_PROMPT
    continue_final_message: bool | None = shared.CONTINUE
    chat_template_kwargs: JsonObject | None = shared.KWARGS
