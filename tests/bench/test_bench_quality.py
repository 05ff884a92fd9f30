"""bench/quality.py: its batched float32 engine agrees with the reference backend, and it rounds
activations as documented."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from verbatim.backend.reference import ReferenceBackend
from verbatim.base.records import SeqStep, StepPlan
from verbatim.testing.tiny_models import tiny_model


@pytest.fixture(scope="module")
def quality() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "quality", Path(__file__).parents[2] / "bench" / "quality.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3", "gpt2", "mixtral"])
def test_the_batched_engine_agrees_with_the_reference_backend(
    family: str, quality: ModuleType
) -> None:
    """Families with biases, soft caps, sliding windows, learnt positions and experts."""
    model = tiny_model(family)
    window = np.random.default_rng(3).integers(0, 40, 48)
    backend = ReferenceBackend(model)
    groups = len(model.spec.groups)
    backend.allocate((3,) * groups)
    ids = tuple(window.tolist())
    step = SeqStep(0, ids[:-1], 0, ((0, 1, 2),) * groups, targets=ids[1:], target_top=1)
    scored = backend.execute(StepPlan(0, (step,))).sequences[0].scored
    logprob, top1, entropy = quality.figures(quality.batched(model, [])(list(ids)), window)
    assert np.abs(logprob - [s.logprob for s in scored]).max() < 1e-4
    assert top1.tolist() == [s.top[0][0] for s in scored]
    assert (entropy > 0).all()
    rounded = quality.figures(
        quality.batched(model, [(re.compile("."), "4x16")])(list(ids)), window
    )[0]
    assert np.abs(rounded - logprob).max() > 1e-4, "the rounding rule has an effect"


def test_activations_are_rounded_per_group_of_values(quality: ModuleType) -> None:
    x = np.array([[127.0, 0.4, -0.6, -127.0, 2.0, -1.0, 0.0, 0.25]], np.float32)
    assert quality.rounded(x, "none") is x
    assert quality.rounded(x, "8x8").tolist() == [[127, 0, -1, -127, 2, -1, 0, 0]]
    fine = quality.rounded(x, "8x4")
    assert fine[0, :4].tolist() == [127, 0, -1, -127]
    assert np.abs(fine[0, 4:] - x[0, 4:]).max() <= 1 / 127
    assert quality.rounded(np.zeros((1, 8), np.float32), "8x8").tolist() == [[0.0] * 8]
