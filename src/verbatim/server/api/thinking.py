"""Switches of a reasoning model: `reasoning_effort`, `think` and `thinking` as template variables.

In: the request in chat fields and the model's facts. Out: variables for the chat template, or an
error that names the field: a switch that the template does not have is refused
(text/thinking_switches.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verbatim.server.api.api_errors import Problem
from verbatim.server.process.messages import ModelFacts
from verbatim.text.thinking_switches import BOOLEAN_SWITCHES, effort_variables, switch_variables


def thinking_variables(
    facts: ModelFacts, body: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, Any]:
    """Template variables for the fields `reasoning_effort` and `think` of a request."""
    made: dict[str, Any] = {}
    switches, thinks = facts.thinking_switches, facts.thinks
    if (effort := body.get("reasoning_effort")) is not None:
        field = names.get("reasoning_effort", "reasoning_effort")
        made |= effort_variables(switches, thinks, effort, field)
    if (think := body.get("think")) is not None:
        made |= switch_variables(switches, thinks, think, names.get("think", "think"))
    given = body.get("chat_template_kwargs") or {}
    for name in BOOLEAN_SWITCHES:  # in a template the text "false" would be true
        if isinstance(given.get(name), str):
            field = f"chat_template_kwargs.{name}"
            raise Problem("invalid_parameter", f"{field}: true or false is needed", field)
    for name, value in made.items():
        if given.get(name, value) != value:
            field = f"chat_template_kwargs.{name}"
            message = f"{field}: contradicts reasoning_effort or think; send one of them"
            raise Problem("invalid_parameter", message, field)
    return made
