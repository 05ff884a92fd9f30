"""The rule of a request field, and the rules that several protocols share (see field_table.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field as P

from verbatim.base.param_checks import MOST
from verbatim.base.params import FIELDS
from verbatim.server.api.common import schemas

Kind = Literal["honoured", "label", "ignored", "refused"]
CACHE = "the prefix cache matches prefixes by content and needs no hint"


@dataclass(frozen=True, slots=True)
class Rule:
    kind: Kind
    help: str
    type: Any = Any
    required: bool = False
    param: str = ""  # the SamplingParams field that takes the value unchanged
    only: tuple[Any, ...] = ()

    def holds(self, value: Any) -> bool:
        """Whether the value asks for what holds anyway."""
        return any(type(value) is type(other) and value == other for other in self.only)


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
    return made | {"explain_rows": ROWS, "report_params": REPORT} | _other_names()


def _other_names() -> dict[str, Rule]:
    """The fields of vLLM's and llama.cpp's clients (field_effects.py)."""

    def same(name: str, type: Any = None) -> Rule:
        return Rule("honoured", f"vLLM's name of {name}", type or schemas.type_of(name))

    schema_or_text = schemas.type_of("json_schema") | schemas.Text
    return {
        "repeat_penalty": Rule(
            "honoured",
            "llama.cpp's name of repetition_penalty",
            schemas.type_of("repetition_penalty"),
        ),
        "n_probs": Rule(
            "honoured",
            "llama.cpp's clients: report each token's log-probability and this many alternatives",
            schemas.type_of("logprobs"),
        ),
        "cache_prompt": CACHE_PROMPT,
        "guided_json": same("json_schema", schema_or_text),
        "guided_regex": same("regex"),
        "guided_choice": same("choice"),
        "guided_grammar": same("grammar"),
        "guided_decoding_backend": Rule("ignored", "there is one grammar engine", schemas.Label),
        "guided_whitespace_pattern": Rule("refused", "white space between JSON tokens is fixed"),
        "structured_outputs": Rule(
            "honoured",
            "one of vLLM's json, json_object, regex, choice, grammar",
            schemas.StructuredOutputs,
        ),
    }


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
TRUNCATE = Rule(
    "honoured",
    "true: cut the end of a text that is longer than the context, with a warning (of a pair, the "
    "longer text first); missing: such a text is refused",
    TRUE_FALSE,
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
TIER = Rule(
    "ignored",
    "there is one tier",
    Literal["auto", "default", "flex", "priority", "scale"],
    only=("auto", "default"),
)
NO_METADATA = Rule("ignored", "it is not stored; metadata is", dict[str, Any])
CACHE_HINT = Rule("ignored", CACHE)
CACHE_KEY = Rule("ignored", CACHE, schemas.Label)
CACHE_PROMPT = Rule("ignored", "the prefix cache is always on", TRUE_FALSE, only=(True,))
RETENTION = Rule(
    "ignored",
    "cached prefixes stay in memory until they are evicted",
    Literal["in_memory", "in-memory", "24h"],
    only=("in_memory", "in-memory"),
)
VERBOSITY = "no model here has such a setting; ask for a short or a long answer in a message"
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
