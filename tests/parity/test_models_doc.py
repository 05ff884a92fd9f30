"""Every family has the tests that the table of docs/model-parity.md promises."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from checkpoints import CASES
from config_defaults import BODIES
from models_doc import MODELS, ROUNDED, cases_of, gguf_of
from parity_table import BACKENDS, INTERPRETER, all_cells
from registry_cases import INSIDE

from parity_types import PLAIN, WIDE, WIDE_QUANTISED
from verbatim.files.gguf_types import TYPES
from verbatim.model.families import CONFIG_KEYS, GGUF_KEYS, WRAPPERS
from verbatim.model.families.common.class_defaults import class_defaults
from verbatim.testing.tiny_models import TINY_CONFIGS

ROOT = Path(__file__).parents[2]


def test_every_model_type_has_a_checkpoint_and_runs_on_every_backend() -> None:
    kinds = set(CONFIG_KEYS) - set(WRAPPERS) - BODIES
    assert {kind for kind, _ in MODELS.values()} == kinds
    assert all(cases for cases in cases_of(CASES).values())
    assert {config["model_type"] for config in TINY_CONFIGS.values()} == kinds | BODIES


@pytest.mark.torch
def test_a_language_model_is_inside_where_transformers_has_no_class_of_its_own() -> None:
    import transformers

    classes = set(dir(transformers))
    kinds = set(CONFIG_KEYS) - set(WRAPPERS) - BODIES - {"gpt2"}  # GPT2LMHeadModel
    names = {kind: class_defaults(kind).name.removesuffix("Text") for kind in kinds}
    assert {kind for kind in kinds if f"{names[kind]}ForCausalLM" not in classes} == INSIDE


def test_every_gguf_architecture_has_a_checkpoint() -> None:
    found = {case.gguf or gguf_of(MODELS[case.kind][0]) for case in CASES}
    found |= {gguf_of(body) for body in BODIES} - {""}  # test_diffusion_parity.py
    assert found == set(GGUF_KEYS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_cell_names_a_test_that_exists(backend: str) -> None:
    cells = [cell for found in all_cells(backend).values() for cell in found]
    for test in {INTERPRETER, ROUNDED, *(cell.test for cell in cells)}:
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / file).read_text("utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_refused_cell_has_the_key_that_the_error_names(backend: str) -> None:
    for cells in all_cells(backend).values():
        assert all(bool(cell.key) == (cell.state == "refused by name") for cell in cells)


def test_every_weight_type_of_the_reader_is_in_the_table() -> None:
    """The backends' tests cover what the reader knows, and no type twice."""
    types = [*PLAIN, *WIDE, *WIDE_QUANTISED]
    assert sorted(types) == sorted(TYPES.values())
