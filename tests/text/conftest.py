"""Fixtures of the text tests: the default model's metadata and tokenizer, read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verbatim.text.tokenizer import Tokenizer, from_gguf


@pytest.fixture(scope="session")
def default_metadata(default_model: Path) -> dict[str, Any]:
    from verbatim.files.gguf import read_gguf

    return dict(read_gguf(default_model).metadata)


@pytest.fixture(scope="session")
def default_tokenizer(default_metadata: dict[str, Any]) -> Tokenizer:
    return from_gguf(default_metadata)


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes while a template runs, so only size limits can reject it, on a CPU of any
    speed."""
    monkeypatch.setattr("verbatim.text.templates.template_budget.clock", lambda: 0.0)
