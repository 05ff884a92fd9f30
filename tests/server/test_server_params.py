"""A sampling parameter is declared once, in base.params: its range is the same in every
protocol."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

import verbatim
from verbatim.base.errors import ParameterError
from verbatim.base.params import FIELDS, SamplingParams
from verbatim.server.api.common.schemas import type_of
from verbatim.server.api.ollama.ollama_fields import OLLAMA_PARAMS, OllamaOptions

ROOT = Path(verbatim.__file__).parent
NUMBERS = [name for name, rule in FIELDS.items() if rule.kind in ("int", "float")]


def at_the_border(name: str) -> list[Any]:
    """Values at and just outside each bound of a number."""
    rule, out = FIELDS[name], []
    for bound in (rule.low, rule.high, rule.above):
        if bound is not None:
            step = 1 if rule.kind == "int" else 1e-6
            out += [type(step)(bound + k * step) for k in (-1, 0, 1)]
    return out


def accepted(check: Any, name: str, value: Any) -> bool:
    try:
        check(name, value)
    except (ParameterError, ValidationError):
        return False
    return True


@pytest.mark.parametrize("name", NUMBERS)
def test_the_server_has_the_range_of_the_library(name: str) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(type_of(name))
    tried = at_the_border(name)
    assert tried
    for value in tried:
        library = accepted(lambda n, v: rule_only(n, v), name, value)
        assert accepted(lambda n, v: adapter.validate_python(v), name, value) == library, value


def rule_only(name: str, value: Any) -> None:
    """Check a parameter's own rule only, not those between parameters (best_of and n)."""
    try:
        SamplingParams(**{name: value})
    except ParameterError as error:
        if (
            " is above " in str(error)
            or " is below " in str(error)
            or " must be above " in str(error)
        ):
            raise


@pytest.mark.parametrize(("theirs", "ours"), OLLAMA_PARAMS.items())
def test_ollamas_options_have_the_same_ranges(theirs: str, ours: str) -> None:
    for value in at_the_border(ours):
        library = accepted(lambda n, v: rule_only(n, v), ours, value)
        assert accepted(lambda n, v: OllamaOptions(**{n: v}), theirs, value) == library, value


def test_the_table_is_made_from_the_dataclass() -> None:
    declared = [f for f in fields(SamplingParams) if f.name != "origins"]
    assert list(FIELDS) == [f.name for f in declared]
    for f in declared:
        assert f.default == FIELDS[f.name].default
        assert FIELDS[f.name].optional == str(f.type).endswith("| None"), f.name


def test_the_list_of_grammar_parameters_exists_once() -> None:
    """STRUCTURE in base.params is the only list of the grammar parameters."""
    found = []
    for path in ROOT.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not all(f'"{name}"' in text for name in ("json_schema", "regex", "grammar", "choice")):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                words = {e.value for e in node.elts if isinstance(e, ast.Constant)}
                if {"json_schema", "regex", "grammar", "choice"} <= words:
                    found.append(path.relative_to(ROOT).as_posix())
    assert found == ["base/params.py"]
