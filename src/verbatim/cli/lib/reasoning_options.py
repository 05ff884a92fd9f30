"""Flags of a reasoning model: --think, --no-think and --reasoning-effort.

In: the flags, or a word of /set think in a chat. Out: variables for the chat template, by the
mapping that the server uses (text/reasoning/reasoning_switches.py). A switch that the template does
not have is refused by the name of its flag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from verbatim.base.errors import ParameterError
from verbatim.cli.lib.command_class import Group, OptionalValue, option, switch
from verbatim.cli.lib.options import Values, all_of
from verbatim.text.reasoning.reasoning_switches import (
    EFFORTS,
    effort_variables,
    switch_variables,
    switches_of,
)

if TYPE_CHECKING:
    from verbatim.engine.calls.llm import LLM

SECTION = "Reasoning"
LEVELS = ("true", "false", *EFFORTS)


@dataclass(frozen=True, slots=True)
class ReasoningLevel:
    """level: one of LEVELS; field: the flag that said so, for errors."""

    level: str
    field: str = "think"

    def variables(self, llm: LLM) -> dict[str, object]:
        """Variables for the model's chat template; raises where it has no such switch."""
        switches, reasoning = switches_of(llm.loaded.template), llm.reasoning is not None
        if self.level in ("true", "false"):
            return switch_variables(switches, reasoning, self.level == "true", self.field)
        return effort_variables(switches, reasoning, self.level, self.field)


def _flags() -> Group:
    """The flags, which reasoning_level() reads."""
    think = (
        "let a reasoning model think: true, false, or an effort as in --reasoning-effort; alone:"
        " true"
    )
    effort = (
        "none, minimal, low, medium, high or xhigh; a chat template without levels gets none as"
        " off, any other as on"
    )
    level: Values = {"cls": OptionalValue, "words": LEVELS, "bare": "true", "metavar": "[LEVEL]"}
    levels, efforts = click.Choice(LEVELS), click.Choice(EFFORTS)
    return all_of(
        option("--think", section=SECTION, common=True, type=levels, help=think, **level),
        switch("--no-think", section=SECTION, help="same as --think=false"),
        option("--reasoning-effort", section=SECTION, type=efforts, metavar="LEVEL", help=effort),
    )


reasoning_options = _flags()


def reasoning_level(flags: Values) -> ReasoningLevel | None:
    """Remove the three flags from `flags`. None: none of them was given."""
    think, off, effort = (flags.pop(n) for n in ("think", "no_think", "reasoning_effort"))
    given = [
        ReasoningLevel(level, field)
        for level, field in (
            (think, "think"),
            ("false" if off else None, "no_think"),
            (effort, "reasoning_effort"),
        )
        if level is not None
    ]
    for one in given[1:]:
        before = given[0].level
        if one.level != before and (before != "true" or one.level in ("false", "none")):
            flag = "--no-think" if given[0].field == "no_think" else f"--think={before}"
            raise ParameterError(one.field, f"contradicts {flag}; leave one out")
    return given[-1] if given else None
