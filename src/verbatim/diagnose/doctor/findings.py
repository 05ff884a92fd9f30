"""Finding: the result of one check of a model: what was looked at, the evidence, the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from verbatim.base.errors import VerbatimError

State = Literal["good", "note", "bad"]  # sound; worth knowing; a fault


@dataclass(frozen=True, slots=True)
class Finding:
    check: str  # short name, the same in every run
    state: State
    text: str
    evidence: str = ""
    remedy: str = ""


def good(check: str, text: str, evidence: str = "") -> Finding:
    return Finding(check, "good", text, evidence)


def note(check: str, text: str, evidence: str, remedy: str) -> Finding:
    return Finding(check, "note", text, evidence, remedy)


def bad(check: str, text: str, evidence: str, remedy: str) -> Finding:
    return Finding(check, "bad", text, evidence, remedy)


def guarded(check: str, run: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a check. A model file that makes the check itself fail is a finding too."""
    try:
        yield from run()
    except VerbatimError as error:
        yield bad(check, "the check failed on this model", error.message, "repair the file")


def is_sound(findings: list[Finding]) -> bool:
    return not any(finding.state == "bad" for finding in findings)
