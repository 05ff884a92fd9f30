"""Draft layers and heads on the cuda backend: their drafts are those of the published mathematics,
and change no output.

test_cuda.py runs this file under Triton's interpreter, with few tokens; `make test-gpu` runs it on
a GPU, with all of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import test_eagle3
import test_mtp
from draft_checkpoints import random_state
from draft_engine import compare_answers

from verbatim.backend.cuda.kernels import kernels
from verbatim.backend.cuda.step_launcher import CudaLaunch
from verbatim.base.records import Drawn

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from backend import fast_interpreter

    fast_interpreter.speed_up()
    kernels.heads_per_program = lambda block: 16  # as in cuda_kernels.py
TOKENS = 5 if INTERPRETED else 40
gpu_only = pytest.mark.skipif(INTERPRETED, reason="takes minutes under Triton's interpreter")


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3", marks=gpu_only)])
def test_drafts_of_a_head_are_those_of_the_published_mathematics(kind: str, tmp_path: Path) -> None:
    test_eagle3.check_drafts(kind, "cuda", tmp_path, TOKENS)


@pytest.mark.parametrize(
    "kind",
    ["qwen3_5", *[pytest.param(kind, marks=gpu_only) for kind in ("qwen3_next", "glm4_moe")]],
)
def test_drafts_of_a_layer_are_those_of_the_published_mathematics(
    kind: str, tmp_path: Path
) -> None:
    test_mtp.check_drafts(kind, "safetensors", "cuda", tmp_path, TOKENS)


@gpu_only
def test_a_head_never_changes_an_answer(tmp_path: Path) -> None:
    compare_answers(test_eagle3.agreeing_model(tmp_path), "cuda", "head", 48)


@gpu_only
@pytest.mark.parametrize("kind", ["qwen3_next", "glm4_moe"])
def test_a_draft_layer_never_changes_an_answer(kind: str, tmp_path: Path) -> None:
    state = test_mtp.damped(random_state(kind))
    compare_answers(test_mtp.checkpoint(tmp_path, kind, "gguf", state), "cuda", "mtp", 48)


def test_steps_that_are_launched_ahead_return_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence whose drafts are not submitted decodes in overlapped steps, and its layer sees all
    of their positions."""
    launched: list[int] = []
    collect = CudaLaunch.collect

    def watched(self: CudaLaunch, rows: Sequence[int]) -> list[Drawn | None]:
        launched.extend(rows)
        return collect(self, rows)

    monkeypatch.setattr(CudaLaunch, "collect", watched)
    test_eagle3.check_drafts("llama", "cuda", tmp_path, TOKENS, quiet=TOKENS - 1)
    assert len(launched) >= TOKENS - 4
