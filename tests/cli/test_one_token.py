"""docs/one-token.md says what the code does: its words exactly, its measured numbers within the spread of BLAS libraries."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.model
ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"-?\d+\.\d+")  # whole numbers are ids, counts and positions: they must be equal


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_token", ROOT / "examples" / "one_token.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_document_is_what_the_code_gives(default_model: Path) -> None:
    module = load()
    written, made = module.blocks(module.DOCUMENT.read_text("utf-8")), module.trace()
    assert set(written) == set(made), "every block is in the document"
    for name, text in made.items():
        assert NUMBER.sub("#", written[name]).split() == NUMBER.sub("#", text).split(), (
            f"{name}: run examples/one_token.py --write"
        )
        for a, b in zip(NUMBER.findall(written[name]), NUMBER.findall(text), strict=True):
            assert float(a) == pytest.approx(float(b), rel=2e-3, abs=5e-3), name


def test_the_files_it_names_are_there() -> None:
    text = (ROOT / "docs" / "one-token.md").read_text("utf-8")
    named = re.findall(r"^## \d+ · `([\w/]+\.py)`", text, re.MULTILINE)
    assert len(named) == 10  # the eleventh is backend/…
    for file in named:
        assert (ROOT / "src" / "verbatim" / file).is_file(), file
