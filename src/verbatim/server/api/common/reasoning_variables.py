"""Switches of a reasoning model: `reasoning_effort`, `think` and `thinking` as template variables.

In: the request in chat fields and the model's facts. Out: variables for the chat template, or an
error that names the field: what the template cannot switch is refused
(text/reasoning/reasoning_switches.py), and what holds anyway becomes a notice.
"""

from __future__ import annotations

from collections.abc import Mapping

from verbatim.base.json_io import JsonMapping, JsonObject
from verbatim.server.problem import invalid
from verbatim.server.process.messages import ModelFacts
from verbatim.text.reasoning.reasoning_switches import (
    BOOLEAN_SWITCHES,
    effort_variables,
    idle_switches,
    no_effect,
    switch_variables,
)


def reasoning_variables(
    facts: ModelFacts, body: JsonMapping, names: Mapping[str, str], notices: list[str]
) -> JsonObject:
    """Template variables of a request: chat_template_kwargs, `reasoning_effort` and `think`."""
    made: JsonObject = {}
    switches, reasoning = facts.reasoning_switches, facts.reasoning
    given = dict(body.get("chat_template_kwargs") or {})
    said = []  # fields without an effect
    if (effort := body.get("reasoning_effort")) is not None:
        field = names.get("reasoning_effort", "reasoning_effort")
        if switches or reasoning:
            made |= effort_variables(switches, reasoning, effort, field)
        said += [] if switches else [field]
    if (think := body.get("think")) is not None:
        field = names.get("think", "think")
        made |= switch_variables(switches, reasoning, think, field)
        said += [] if switches else [field]
    for name in idle_switches(given, switches, reasoning):
        del given[name]
        said.append(f"chat_template_kwargs.{name}")
    notices += [no_effect(field, reasoning) for field in said]
    for name in BOOLEAN_SWITCHES:  # in a template the text "false" would be true
        if isinstance(given.get(name), str):
            raise invalid(f"chat_template_kwargs.{name}", "true or false is needed")
    for name, value in made.items():
        if given.get(name, value) != value:
            why = "contradicts reasoning_effort or think; send one of them"
            raise invalid(f"chat_template_kwargs.{name}", why)
    return given | made
