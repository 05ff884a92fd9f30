"""The documents match the code: docs/one-token.md exactly, except that numbers may vary as BLAS
libraries do. tests/docs runs the examples of README.md and of the other pages."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.model
ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"-?\d+\.\d+")  # integers are ids, counts and positions: they must be equal


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_token", ROOT / "examples" / "one_token.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_token_md_matches_the_output_of_its_example(default_model: Path) -> None:
    module = load()
    written, made = module.blocks(module.DOCUMENT.read_text("utf-8")), module.trace()
    assert set(written) == set(made), "every block is in the document"
    for name, text in made.items():
        assert NUMBER.sub("#", written[name]).split() == NUMBER.sub("#", text).split(), (
            f"{name}: run examples/one_token.py --write"
        )
        for a, b in zip(NUMBER.findall(written[name]), NUMBER.findall(text), strict=True):
            assert float(a) == pytest.approx(float(b), rel=2e-3, abs=5e-3), name


def stations() -> list[str]:
    """The files named in the headings, in the document's order."""
    text = (ROOT / "docs" / "one-token.md").read_text("utf-8")
    found = re.findall(r"^## (\d+) · `([\w/]+\.py)`: (.*)$", text, re.MULTILINE)
    assert [int(number) for number, _, _ in found] == list(range(1, 12)), (
        "eleven, numbered in order"
    )
    for _, file, what in found:  # a function named in a heading is in the file
        for name in re.findall(r"`(\w+)\(", what):
            assert f"def {name}(" in (ROOT / "src" / "verbatim" / file).read_text("utf-8"), (
                file,
                name,
            )
    return [file for _, file, _ in found]


def test_one_token_md_names_existing_files() -> None:
    text = (ROOT / "docs" / "one-token.md").read_text("utf-8")
    assert len(set(stations())) == 10, "the page says: ten files"
    for file in re.findall(r"`([\w/]+\.py)`", text):
        assert (ROOT / file).is_file() or (ROOT / "src" / "verbatim" / file).is_file(), file


def test_files_named_in_one_token_md_have_docstrings_and_short_functions() -> None:
    """Each file has a module docstring with its input and output, and at most 300 lines; no
    function exceeds 50 lines."""
    for file in dict.fromkeys(stations()):
        source = (ROOT / "src" / "verbatim" / file).read_text("utf-8")
        assert len(source.splitlines()) <= 300, file
        tree = ast.parse(source)
        assert len(ast.get_docstring(tree) or "") > 60, file
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= 50, f"{file}: {node.name} has {lines} lines"
