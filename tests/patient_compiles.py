"""Fixtures that remove the wall-clock limits of grammar compiles. Imported by the conftest.py of
each folder whose tests compile grammars."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from verbatim.grammar import compiler
from verbatim.grammar.compile_pool import CompilePool


@pytest.fixture(scope="session")
def patient_pool() -> Iterator[CompilePool]:
    """A compile pool with the real memory and CPU limits and no wall-clock limit."""
    pool = CompilePool(compiler.LIMITS, timeout=3600.0)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch, patient_pool: CompilePool) -> None:
    monkeypatch.setattr(compiler, "ARRIVAL_TIMEOUT", 3600.0)
    monkeypatch.setattr(compiler, "_pool", patient_pool)
