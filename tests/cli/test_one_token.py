"""The documents say what the code does: docs/one-token.md its words exactly and its numbers within the spread of BLAS libraries, README its example."""

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


def test_the_example_of_the_readme_runs(default_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert example is not None
    exec(compile(example[1], "README.md", "exec"), {})
    assert "Paris" in capsys.readouterr().out


def test_every_link_between_documents_leads_somewhere() -> None:
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")] + list(
        (ROOT / "docs").rglob("*.md")
    )
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
