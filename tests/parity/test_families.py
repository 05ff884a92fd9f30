"""Every family against transformers: logits of the prompt and of greedy steps within 1e-4, greedy tokens equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import CASES, VOCAB, Case, build
from convert import to_gguf
from drive import Driver

from verbatim.model.load import load_model

pytestmark = pytest.mark.torch
TOLERANCE = 1e-4


def expected(model: Any, case: Case) -> tuple[list[int], np.ndarray]:
    """transformers: all tokens (prompt and greedy answer) and the logits of every position, recomputed without a cache."""
    import torch

    random = np.random.default_rng(sum(case.name.encode()))
    tokens = random.integers(3, VOCAB, case.prompt).tolist()
    rows: list[np.ndarray] = []
    with torch.no_grad():
        for step in range(case.steps + 1):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
            rows.extend(logits if step == 0 else logits[-1:])
            if step < case.steps:
                tokens.append(int(logits[-1].argmax()))
    return tokens, np.stack(rows)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """name -> (directory, tokens, logits), made once for all tests of this file."""
    made: dict[str, tuple[Path, list[int], np.ndarray]] = {}

    def get(case: Case) -> tuple[Path, list[int], np.ndarray]:
        if case.name not in made:
            directory = tmp_path_factory.mktemp(case.name)
            made[case.name] = (directory, *expected(build(case, directory), case))
        return made[case.name]

    return get


def compare(driver: Driver, case: Case, tokens: list[int], logits: np.ndarray) -> None:
    """The prompt in two chunks, then one token at a time."""
    cut = case.prompt // 3
    got = [driver.feed(tokens[:cut]), driver.feed(tokens[cut : case.prompt])]
    for i in range(case.prompt, len(tokens)):
        assert int(got[-1][-1].argmax()) == tokens[i], f"greedy token {i - case.prompt} differs"
        got.append(driver.feed([tokens[i]]))
    ours = np.concatenate(got)
    assert ours.shape == logits.shape
    assert np.abs(ours - logits).max() < TOLERANCE
    assert np.ptp(logits, axis=-1).mean() > 1.0, "a flat model proves nothing"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_safetensors_equals_transformers(case: Case, built: Any) -> None:
    directory, tokens, logits = built(case)
    compare(Driver(load_model(directory, context=case.context)), case, tokens, logits)


@pytest.mark.parametrize("case", [c for c in CASES if c.gguf], ids=lambda c: c.name)
def test_gguf_equals_transformers(case: Case, built: Any, tmp_path: Path) -> None:
    directory, tokens, logits = built(case)
    to_gguf(directory, tmp_path / "model.gguf", case.gguf)
    compare(Driver(load_model(tmp_path / "model.gguf", context=case.context)), case, tokens, logits)
