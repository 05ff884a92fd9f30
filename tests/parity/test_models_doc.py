"""docs/model-parity.md is current, and every family has the tests that the table promises."""

from __future__ import annotations

from pathlib import Path

from checkpoints import CASES
from models_doc import KINDS, cases_of, document

from verbatim.model.config_keys import CONFIG_KEYS
from verbatim.model.families import WRAPPERS
from verbatim.model.gguf_keys import GGUF_KEYS
from verbatim.testing_models import TINY_CONFIGS

ROOT = Path(__file__).parents[2]


def test_docs_models_is_up_to_date() -> None:
    assert (ROOT / "docs/model-parity.md").read_text("utf-8") == document(), "run `make models`"


def test_every_model_type_has_a_checkpoint_and_runs_on_every_backend() -> None:
    kinds = set(CONFIG_KEYS) - set(WRAPPERS)
    assert {kind for kind, _ in KINDS.values()} == kinds
    assert all(cases for cases in cases_of(CASES).values())
    assert {config["model_type"] for config in TINY_CONFIGS.values()} == kinds


def test_every_gguf_architecture_has_a_checkpoint() -> None:
    assert {case.gguf for case in CASES} - {""} == set(GGUF_KEYS)
