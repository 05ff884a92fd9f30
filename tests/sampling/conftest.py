"""Fixtures of the sampling tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from verbatim.sampling import grammar
from verbatim.sampling.compile_pool import CompilePool


@pytest.fixture(scope="session")
def patient_pool() -> Iterator[CompilePool]:
    """The limits on memory and CPU time are the real ones; the wall clock decides nothing."""
    pool = CompilePool(grammar.LIMITS, timeout=3600.0)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch, patient_pool: CompilePool) -> None:
    monkeypatch.setattr(grammar, "PATIENCE", 3600.0)
    monkeypatch.setattr(grammar, "_pool", patient_pool)
