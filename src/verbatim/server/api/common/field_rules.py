"""The field table of a route is its pydantic model: each field has a type and a rule.

    honoured   has the effect that its protocol defines
    label      stored with the request (log, stored object, echo); has no effect on the tokens
    ignored    cannot change the answer here: accepted with a warning, unless `only` lists the value
    refused    a field of the protocol that is not supported: 400, naming it; `only` lists the
               values that have no effect and are accepted

Any other field is unknown: 400, naming it. Requests are validated with these models, and
/openapi.json and docs/api-fields.md are generated from them, so they cannot disagree. A protocol's
models are in its own folder; here are the rules that several share.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field, create_model
from pydantic.json_schema import SkipJsonSchema

from verbatim.base.params import FIELDS
from verbatim.server.api.common.schemas import Strict, type_of

Kind = Literal["honoured", "label", "ignored", "refused"]
Unchecked = Any  # the rule decides, or the value is never read
Refused = SkipJsonSchema[None]  # no value is accepted
CACHE = "the prefix cache matches prefixes by content and needs no hint"
NO_LIMIT = -1  # max_tokens of llama.cpp's clients: up to the context length


@dataclass(frozen=True, slots=True)
class Rule:
    kind: Kind
    help: str
    required: bool = False
    param: str = ""  # the SamplingParams field that takes the value unchanged
    only: tuple[object, ...] = ()

    def holds(self, value: object) -> bool:
        """Whether the value asks for what holds anyway."""
        return any(type(value) is type(other) and value == other for other in self.only)

    def __call__(self, schema: Mapping[str, object]) -> None:
        """pydantic calls a field's json_schema_extra. A rule adds nothing to the field's schema."""


class RequestBody(Strict):
    """The body of a request."""


def honoured(help: str, *, required: bool = False, param: str = "") -> Any:
    return _field(Rule("honoured", help, required, param))


def label(help: str, *, required: bool = False) -> Any:
    return _field(Rule("label", help, required))


def ignored(help: str, *only: object) -> Any:
    return _field(Rule("ignored", help, only=only))


def refused(help: str, *only: object, alias: str | None = None) -> Any:
    return _field(Rule("refused", help, only=only), alias)


def _field(rule: Rule, alias: str | None = None) -> Any:
    return Field(... if rule.required else None, json_schema_extra=rule, alias=alias)


@functools.cache
def rules_of(model: type[BaseModel]) -> Mapping[str, Rule]:
    """The rules of a model's fields: first its own, then those of its base."""
    inherited = getattr(model.__base__, "model_fields", {})
    names = sorted(model.model_fields, key=inherited.__contains__)
    found = ((model.model_fields[name].alias or name, name) for name in names)
    return {
        shown: rule
        for shown, name in found
        if isinstance(rule := model.model_fields[name].json_schema_extra, Rule)
    }


def member_model(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The model of a field that is an object, as Ollama's `options` is."""
    member = model.model_fields.get(name)
    kinds = get_args(member.annotation) if member is not None else ()
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def subset(title: str, model: type[RequestBody], *names: str) -> type[RequestBody]:
    """A model with some of the fields of another."""
    kept: Any = {
        name: (field.annotation, field)
        for name, field in model.model_fields.items()
        if name in names
    }
    return create_model(title, __base__=RequestBody, **kept)


def taking(params: Mapping[str, str], base: type[RequestBody] = RequestBody) -> Any:
    """A base with sampling parameters as fields: the client's name -> the SamplingParams field."""
    made: Any = {
        theirs: (type_of(ours) | None, honoured(FIELDS[ours].help, param=ours))
        for theirs, ours in params.items()
    }
    return create_model("Taking", __base__=base, **made)


REPORT = honoured(
    "true: the response ends with params, the parameters in force and where each came from "
    "(request, model, protocol, default)"
)
MODEL = honoured("a name from the start-up table (see /v1/models)", required=True)
SEED_TEXT = (
    "makes sampling repeatable; a negative seed, which OpenAI allows, is taken modulo 2**63 "
    "(-1 is 9223372036854775807); the response reports the seed used"
)
SEED = honoured(SEED_TEXT)
TRUNCATE = honoured(
    "true: cut the end of a text that is longer than the context, with a warning (of a pair, the "
    "longer text first); missing: such a text is refused"
)
STREAM = honoured("stream the output as events")
USER = label("written to the log")
CACHE_PROMPT = ignored("the prefix cache is always on", True)
NO_VERBOSITY = ignored(
    "no model here has such a setting; ask for a short or a long answer in a message", "medium"
)
PARSE_TEXT = (
    "true: the text of a control token (<|im_start|>) in the prompt becomes that token; missing: "
    "it stays plain text, and the response has a warning"
)
PARSE = honoured(PARSE_TEXT)
ADD_PROMPT = honoured(
    "false: the template starts no answer after the last message; true, also after a last message "
    "of the assistant"
)
CONTINUE = honoured(
    "true: the model continues the last message, which is one of the assistant, and the answer is "
    "the continuation; missing: true for a last message of the assistant without tool calls, "
    "unless add_generation_prompt is set"
)
CHAT_MESSAGES = honoured(
    "roles system, developer, user, assistant, tool; text parts; reasoning_content that the "
    "model's template does not read is refused; a name that it does not read, and "
    "cache_control, have no effect and get a warning",
    required=True,
)
TOOLS = honoured("functions the model may call")
KWARGS = honoured(
    "further variables for the chat template; a variable that the template never reads is refused"
)


class WithTopK(RequestBody):
    top_k: type_of("top_k") | Literal[-1] | None = honoured(  # type: ignore[valid-type]
        f"{FIELDS['top_k'].help}, and so is -1", param="top_k"
    )
