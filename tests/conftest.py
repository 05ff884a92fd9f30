"""Fixtures of the whole suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import not_run

# One profile: the same examples in every run and on every machine, no deadline (two shared cores make any deadline a lottery).
settings.register_profile("ci", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    not_run.pytest_configure(config)  # the table of tests that did not run


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's GGUF file, fetched once into the cache by the catalog."""
    from verbatim.weights import catalog

    return catalog.resolve(catalog.DEFAULT)
