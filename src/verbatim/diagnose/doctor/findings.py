"""Finding: the result of one check of a model: what was looked at, the evidence, the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import wraps
from typing import Literal, ParamSpec

from verbatim.base.errors import VerbatimError

P = ParamSpec("P")
State = Literal["good", "note", "bad"]  # sound; worth knowing; a fault


@dataclass(frozen=True, slots=True)
class Finding:
    check: str  # short name, the same in every run
    state: State
    text: str
    evidence: str = ""
    remedy: str = ""


def good(text: str, evidence: str = "", *, check: str = "") -> Finding:
    return Finding(check, "good", text, evidence)


def note(text: str, evidence: str, remedy: str, *, check: str = "") -> Finding:
    return Finding(check, "note", text, evidence, remedy)


def bad(text: str, evidence: str, remedy: str, *, check: str = "") -> Finding:
    return Finding(check, "bad", text, evidence, remedy)


def checks(
    name: str, *, guarded: bool = True
) -> Callable[[Callable[P, Iterator[Finding]]], Callable[P, list[Finding]]]:
    """A function that yields the findings of the check `name`, as one that returns them. `guarded`:
    a model file that makes the check itself fail is a finding too."""

    def named(run: Callable[P, Iterator[Finding]]) -> Callable[P, list[Finding]]:
        @wraps(run)
        def check(*args: P.args, **kwargs: P.kwargs) -> list[Finding]:
            found = []
            try:
                for finding in run(*args, **kwargs):
                    found.append(replace(finding, check=name))
            except VerbatimError as error:
                if not guarded:
                    raise
                failed = bad("the check failed on this model", error.message, "repair the file")
                found.append(replace(failed, check=name))
            return found

        return check

    return named


def is_sound(findings: list[Finding]) -> bool:
    return not any(finding.state == "bad" for finding in findings)
