"""A step that runs out of device memory: the engine continues with smaller steps and the same
tokens, and never ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from verbatim.base.config import EngineConfig
from verbatim.base.errors import OUT_OF_MEMORY, DeviceMemoryError
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion, SeqStep, StepPlan, StepResult
from verbatim.engine.core import EngineCore
from verbatim.testing.fakes import FakeBackend, fake_parts

CONFIG = EngineConfig(kv_blocks=60, step_tokens=64, max_running=8, check=True, speculate="off")
PARAMS = SamplingParams(temperature=0.8, seed=4, max_tokens=20, ignore_eos=True)


class SmallBackend(FakeBackend):
    """A step of more than `most` tokens does not fit into its memory."""

    def __init__(self, most: int, **options: Any) -> None:
        super().__init__(canary=True, **options)
        self.most = most

    def execute(self, plan: StepPlan) -> StepResult:
        self.check(plan.sequences)
        return super().execute(plan)

    def check(self, steps: Sequence[SeqStep]) -> None:
        if sum(len(step.tokens) for step in steps) > self.most:
            raise DeviceMemoryError(f"{OUT_OF_MEMORY}a step did not fit")

    @property
    def launcher(self) -> Any:
        inner = super().launcher
        return None if inner is None else SmallLauncher(inner, self)


class SmallLauncher:
    def __init__(self, inner: Any, backend: SmallBackend) -> None:
        self._inner, self._backend = inner, backend

    def can_launch(self, steps: Sequence[SeqStep]) -> bool:
        return bool(self._inner.can_launch(steps))

    def launch(self, steps: tuple[SeqStep, ...]) -> Any:
        self._backend.check(steps)
        return self._inner.launch(steps)


def answers(core: EngineCore, lengths: Sequence[int]) -> list[Completion]:
    for i, length in enumerate(lengths):
        prompt = [(i * 7 + j) % 250 for j in range(length)]
        core.add(core.request(prompt, PARAMS, request_id=str(i)))
    found = [out for _ in range(500) for out in core.step() if isinstance(out, Completion)]
    assert not core.busy
    core.check()
    return sorted(found, key=lambda one: one.request_id)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_engine_continues_with_smaller_steps_and_the_same_tokens(
    overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = [50, 3, 90, 12, 40]
    expected = answers(EngineCore(fake_parts(FakeBackend(canary=True)), CONFIG), lengths)
    core = EngineCore(fake_parts(SmallBackend(20, overlap=overlap)), CONFIG)
    with caplog.at_level(logging.WARNING, "verbatim.engine"):
        got = answers(core, lengths)
    assert [one.choices for one in got] == [one.choices for one in expected]
    assert core.scheduler.step_tokens == 16
    assert [record.message[-9:] for record in caplog.records] == ["okens now"] * 2


def test_requests_end_with_the_error_where_no_step_fits_and_the_engine_continues() -> None:
    backend = SmallBackend(0)
    core = EngineCore(fake_parts(backend), CONFIG)
    got = answers(core, [50, 3])
    assert [one.choices[0].finish.reason for one in got] == ["error"] * 2
    assert all(one.choices[0].finish.detail.startswith(OUT_OF_MEMORY) for one in got)
    assert core.scheduler.step_tokens == CONFIG.max_running
    backend.most = 64
    assert [one.choices[0].finish.reason for one in answers(core, [50, 3])] == ["length"] * 2


def test_a_draft_model_that_runs_out_of_memory_ends_no_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Drafts never change an answer: the engine continues without them, with steps as large."""
    lengths = [50, 3, 90]
    expected = answers(EngineCore(fake_parts(), CONFIG), lengths)
    draft = SmallBackend(40)
    core = EngineCore(replace(fake_parts(), draft=draft), replace(CONFIG, speculate="draft"))
    core.drafting.adaptive = False
    with caplog.at_level(logging.WARNING, "verbatim.engine"):
        got = answers(core, lengths)
    assert [one.choices for one in got] == [one.choices for one in expected]
    assert core.scheduler.step_tokens == CONFIG.step_tokens
    assert [record.message[-17:] for record in caplog.records] == ["no further drafts"]
