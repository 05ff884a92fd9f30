"""Fields of other servers' clients: those without an effect here, and those with another name here.

In: a validated body. Out: the body in this server's fields. A field that cannot change the answer
is removed or left alone, and becomes a sentence for `warnings`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verbatim.base.json_io import JsonMapping, JsonObject, loads_strict
from verbatim.server.api.common.field_rules import CACHE, RequestBody, Rule, member_model, rules_of
from verbatim.server.problem import invalid
from verbatim.text.tools.redundant_names import CACHE_KEYS

# A field of another server's clients -> this server's. structured_outputs has more than one member.
SAME = {
    "repeat_penalty": "repetition_penalty",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "enable_thinking": "think",
}
STRUCTURED_OUTPUTS = {name.removeprefix("guided_"): ours for name, ours in SAME.items()
                      if name.startswith("guided_")}  # fmt: skip


def take_ignored(model: type[RequestBody], body: JsonObject) -> list[str]:
    """A sentence for each field without an effect. Those inside messages and tools are removed,
    because a chat template may print a tool as it is."""
    found = _no_effect(rules_of(model), body, "")
    for name, value in body.items():
        if isinstance(value, dict) and (members := member_model(model, name)):
            found += _no_effect(rules_of(members), value, f"{name}.")
    if "stream_options" in body and not body.get("stream"):
        found.append("stream_options: has no effect; only with stream: true")
    places: dict[str, str] = {}  # the first of each
    for field in ("system", "messages", "input", "tools"):
        for place, item in _objects(body.get(field), field):
            for name in CACHE_KEYS:
                if item.pop(name, None) is not None:
                    places.setdefault(name, f"{place}.{name}")
    return found + [f"{place}: has no effect; {CACHE}" for place in places.values()]


def _no_effect(rules: Mapping[str, Rule], given: JsonMapping, place: str) -> list[str]:
    return [
        f"{place}{name}: has no effect; {rules[name].help}"
        for name, value in given.items()
        if name in rules and rules[name].kind == "ignored"
        if value is not None and not rules[name].holds(value)
    ]


def _objects(value: Any, place: str) -> Iterator[tuple[str, JsonObject]]:
    """The objects of a list of messages or tools, and those inside that are no client's data."""
    for index, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, dict):
            here = f"{place}[{index}]"
            yield here, item
            for name in ("content", "output"):
                yield from _objects(item.get(name), f"{here}.{name}")
            if isinstance(item.get("function"), dict):
                yield f"{here}.function", item["function"]


def translate(table: Mapping[str, Rule], body: JsonObject) -> dict[str, str]:
    """Rename the fields of other servers' clients. Returns this server's field -> the client's."""
    names: dict[str, str] = {}

    def put(ours: str, theirs: str, value: Any) -> None:
        if body.get(ours, value) != value:
            other = names.get(ours, ours)
            raise invalid(theirs, f"differs from {other}; send one of them")
        body[ours], names[ours] = value, theirs

    for theirs, ours in SAME.items():
        if theirs in body and theirs in table and not table[theirs].param:
            value = body.pop(theirs)
            put(ours, theirs, _schema(theirs, value) if ours == "json_schema" else value)
    for member, value in (body.pop("structured_outputs", None) or {}).items():
        place = f"structured_outputs.{member}"
        if member == "json_object" and value:
            put("json_schema", place, {"type": "object"})
        elif member in STRUCTURED_OUTPUTS and value is not None:
            made = _schema(place, value) if member == "json" else value
            put(STRUCTURED_OUTPUTS[member], place, made)
    top = body.pop("n_probs", 0) if "n_predict" not in table else 0
    if top and "top_logprobs" in table:
        put("top_logprobs", "n_probs", top)
        if "logprobs" in table:
            put("logprobs", "n_probs", True)
    elif top:
        put("logprobs", "n_probs", top)
    return names


def _schema(field: str, value: Any) -> Any:
    """A schema that vLLM's clients may send as text."""
    if not isinstance(value, str):
        return value
    try:
        made = loads_strict(value)
    except ValueError:
        made = None
    if not isinstance(made, dict | bool):
        raise invalid(field, "the text is no JSON schema")
    return made
