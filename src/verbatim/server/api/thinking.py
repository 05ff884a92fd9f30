"""Switches of a reasoning model: `reasoning_effort`, `think` and `thinking` as template variables.

In: the request in chat fields and the model's facts. Out: variables for the chat template, or a
Problem that names the field: a switch that the template does not have is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verbatim.server.api.api_errors import Problem
from verbatim.server.process.messages import ModelFacts

BOOLEAN_SWITCHES = ("enable_thinking", "thinking")  # template variables that are true or false
LEVEL = "reasoning_effort"  # template variable that holds a level
SWITCHES = (*BOOLEAN_SWITCHES, LEVEL)


def thinking_variables(
    facts: ModelFacts, body: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, Any]:
    """Template variables for the fields `reasoning_effort` and `think` of a request."""
    made: dict[str, Any] = {}
    if (effort := body.get("reasoning_effort")) is not None:
        made |= _effort(facts, effort, names.get("reasoning_effort", "reasoning_effort"))
    if (think := body.get("think")) is not None:
        made |= _switch(facts, think, names.get("think", "think"))
    given = body.get("chat_template_kwargs") or {}
    for name, value in made.items():
        if given.get(name, value) != value:
            field = f"chat_template_kwargs.{name}"
            message = f"{field}: contradicts reasoning_effort or think; send one of them"
            raise Problem("invalid_parameter", message, field)
    return made


def _effort(facts: ModelFacts, effort: str, field: str) -> dict[str, Any]:
    if LEVEL in facts.thinking_switches and effort != "none":
        return {LEVEL: effort}
    return _switch(facts, effort != "none", field)


def _switch(facts: ModelFacts, think: bool, field: str) -> dict[str, Any]:
    for name in BOOLEAN_SWITCHES:
        if name in facts.thinking_switches:
            return {name: think}
    if think == facts.thinks:  # the model does so anyway
        return {}
    why = (
        "this model always thinks; its chat template has no switch"
        if facts.thinks
        else "this model's chat template has no thoughts"
    )
    raise Problem("unsupported_parameter", f"{field}: {why}", field)
