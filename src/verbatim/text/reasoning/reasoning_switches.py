"""Switches of a reasoning model: whether it thinks, and with what effort, as template variables.

In: which switches the model's chat template reads, and what a request or a flag says. Out:
variables for the chat template, or an UnsupportedError that names the field: a switch that the
template does not have is refused. The server and the command line share this mapping.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from verbatim.base.errors import UnsupportedError
from verbatim.base.json_io import JsonObject

BOOLEAN_SWITCHES = ("enable_thinking", "thinking")  # template variables that are true or false
LEVEL = "reasoning_effort"  # template variable that holds a level
SWITCHES = (*BOOLEAN_SWITCHES, LEVEL)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


def switches_of(template: Any) -> list[str]:
    """The switches that a chat template reads; none without a template."""
    return [] if template is None else [name for name in SWITCHES if template.reads(name)]


def idle_switches(
    given: Mapping[str, object], switches: Collection[str], reasoning: bool
) -> list[str]:
    """The given switches that a template without any need not read: they say what holds anyway."""
    names = [] if switches else [name for name in SWITCHES if name in given]
    return [n for n in names if given[n] == reasoning or (n == LEVEL and not reasoning)]


def no_effect(field: str, reasoning: bool) -> str:
    why = "always reasons" if reasoning else "does not reason"
    return f"{field}: has no effect; this model {why}"


def effort_variables(
    switches: Collection[str], reasoning: bool, effort: str, field: str
) -> JsonObject:
    """Variables for a level of EFFORTS. A template without levels gets none as false and every
    other level as true. `thinks`: the template marks reasoning; `field`: the name for an error."""
    if LEVEL in switches and effort != "none":
        return {LEVEL: effort}
    return switch_variables(switches, reasoning, effort != "none", field)


def switch_variables(
    switches: Collection[str], reasoning: bool, wanted: bool, field: str
) -> JsonObject:
    """Variables that switch thinking on or off."""
    for name in BOOLEAN_SWITCHES:
        if name in switches:
            return {name: wanted}
    if wanted == reasoning:  # the model does so anyway
        return {}
    raise UnsupportedError(
        field,
        "this model always thinks; its chat template has no switch"
        if reasoning
        else "this model's chat template has no reasoning",
    )
