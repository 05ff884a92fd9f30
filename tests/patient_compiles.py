"""Fixtures: grammar compiles with no wall-clock limit, for the conftest of each folder that compiles grammars."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from verbatim.grammar import matcher
from verbatim.grammar.compile_pool import CompilePool


@pytest.fixture(scope="session")
def patient_pool() -> Iterator[CompilePool]:
    """The limits on memory and CPU time are the real ones; the wall clock decides nothing."""
    pool = CompilePool(matcher.LIMITS, timeout=3600.0)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch, patient_pool: CompilePool) -> None:
    monkeypatch.setattr(matcher, "ARRIVAL_TIMEOUT", 3600.0)
    monkeypatch.setattr(matcher, "_pool", patient_pool)
