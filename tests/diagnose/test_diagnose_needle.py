"""`verbatim verify`: the needle in every circumstance; a backend that breaks promise 1 is found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from cli_result import Call, CliResult
from verbatim.backend.reference.backend import ReferenceBackend
from verbatim.base.records import StepPlan, StepResult
from verbatim.diagnose import needle
from verbatim.diagnose.needle import circumstances


def groups(result: CliResult, backend: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(result.out)["backends"][backend]["rows"]:
        found.setdefault(row["group"], []).append(row)
    return found


def test_the_tiny_model_is_verified(verbatim: Call) -> None:
    result = verbatim("verify", "--json")
    assert result.code == 0
    found = groups(result, "auto")
    assert all(row["same"] and row["tokens"] == 64 for rows in found.values() for row in rows)
    # Each circumstance occurred.
    assert "tokens from the cache" in found["prefix cache"][0]["evidence"]
    assert found["prefix cache"][1]["evidence"] == ""
    assert all("preempted" in row["evidence"] for row in found["preemption"])
    assert all("drafts accepted" in row["evidence"] for row in found["speculation"])
    assert "VERBATIM_ISA" not in os.environ


def test_circumstances_of_a_gpu_have_no_threads() -> None:
    cpu = {c.group for c in circumstances("cpu", 4, ("scalar", "neon"))}
    gpu = {c.group for c in circumstances("cuda", 4, ())}
    assert cpu - gpu == {"threads", "instruction set", "processes"}


Execute = Callable[[ReferenceBackend, StepPlan], StepResult]


def test_a_backend_that_depends_on_the_batch_is_found(
    verbatim: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than two sequences in a step change the log-probability of the first one's token by the
    smallest step: no token changes, and it is still found."""
    original: Execute = ReferenceBackend.execute

    def execute(self: ReferenceBackend, plan: StepPlan) -> StepResult:
        result = original(self, plan)
        first = result.sequences[0]
        if len(plan.sequences) <= 2 or not first.drawn:
            return result
        import math

        drawn = first.drawn[0]
        changed = drawn._replace(logprob=math.nextafter(drawn.logprob, -math.inf))
        first = first._replace(drawn=(changed, *first.drawn[1:]))
        return result._replace(sequences=(first, *result.sequences[1:]))

    monkeypatch.setattr(ReferenceBackend, "execute", execute)
    few = circumstances("reference", 1, ())[:3]
    monkeypatch.setattr(needle, "circumstances", lambda *_: few)
    result = verbatim("verify", "--backends", "reference")
    assert result.code == 1
    lines = result.out.splitlines()
    wrong = [line for line in lines if line.startswith("DIFFERS")]
    assert any("batch-mates" in line for line in wrong)
    assert any(line.startswith("same") and "again" in line for line in lines)
    assert "NOT IDENTICAL" in result.out
    assert max(map(len, lines)) <= 80
