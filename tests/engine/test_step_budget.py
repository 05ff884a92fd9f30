"""The prefill chunk by measured time: a step beside other sequences takes at most step_ms. The
clock is the fake backend's, which knows what each step costs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from verbatim.backend.protocol import BackendInfo
from verbatim.base.config import EngineConfig
from verbatim.base.errors import ParameterError
from verbatim.base.params import SamplingParams
from verbatim.base.records import StepPlan, StepResult
from verbatim.engine import core as core_module
from verbatim.engine.core import EngineCore
from verbatim.testing.fakes import FakeBackend, fake_parts

BASE, TOKEN = 0.010, 0.002  # seconds of a step, and of a token at depth 0
LONG = [3] * 300  # the last ones cost 30 tokens each: attention dominates in the fake model


class ClockedBackend(FakeBackend):
    """Each step moves the clock by its cost; `slow` steps take twenty times as long."""

    def __init__(self, name: str = "cpu") -> None:
        super().__init__(pipeline=False)
        self.name, self.now, self.slow = name, 0.0, 0
        self.core: Any = None
        self.seconds: list[float] = []  # duration of each step
        self.chunks: list[int] = []  # tokens of the longest sequence of each step

    @property
    def info(self) -> BackendInfo:
        return replace(super().info, name=self.name)

    def execute(self, plan: StepPlan) -> StepResult:
        scheduler = self.core.scheduler
        tokens = sum(scheduler.cost.of_step(s, scheduler.cache.groups) for s in plan.sequences)
        seconds = (BASE + TOKEN * tokens) * (20 if self.slow else 1)
        self.slow = max(0, self.slow - 1)
        self.now += seconds
        self.seconds.append(seconds)
        self.chunks.append(max(len(step.tokens) for step in plan.sequences))
        return super().execute(plan)


def engine(monkeypatch: pytest.MonkeyPatch, name: str = "cpu", **options: Any) -> EngineCore:
    backend = ClockedBackend(name)
    clock = SimpleNamespace(perf_counter=lambda: backend.now)
    monkeypatch.setattr(core_module, "time", clock)
    config = EngineConfig(kv_blocks=400, speculate="off", **options)
    backend.core = core = EngineCore(fake_parts(backend), config)
    return core


def add(core: EngineCore, prompt: list[int], output: int) -> Any:
    params = SamplingParams(max_tokens=output, min_tokens=output, seed=1)
    core.add(core.request(prompt, params))
    return list(core.requests.values())[-1]


def beside_a_stream(core: EngineCore) -> list[float]:
    """Seconds of each step while a long prompt is prefilled beside a stream."""
    add(core, [1, 2, 3], 900)
    for _ in range(10):
        core.step()
    backend, late = core.backend, add(core, LONG, 2)
    assert isinstance(backend, ClockedBackend)
    before = len(backend.seconds)
    while not late.output_tokens:
        core.step()
    return backend.seconds[before:]


def test_a_step_beside_a_stream_takes_at_most_step_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    for step_ms in (60, 100, 300):
        found = beside_a_stream(engine(monkeypatch, step_ms=step_ms))
        assert max(found) <= step_ms / 1000 + 2 * TOKEN
        assert max(found) >= 0.8 * step_ms / 1000  # and uses it


def test_the_default_is_100_ms_on_a_cpu_and_no_limit_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert max(beside_a_stream(engine(monkeypatch))) <= 0.1 + 2 * TOKEN
    assert max(beside_a_stream(engine(monkeypatch, "cuda", step_tokens=512))) > 0.5


def test_an_interrupted_step_does_not_shrink_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine(monkeypatch, step_ms=100)
    add(core, [1, 2, 3], 900)
    add(core, LONG, 2)
    for _ in range(12):
        core.step()
    backend = core.backend
    assert isinstance(backend, ClockedBackend)
    usual, backend.slow = backend.seconds[-1], 1
    for _ in range(2):
        core.step()
    assert backend.seconds[-1] >= 0.8 * usual


def test_a_lone_prompt_takes_long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times as long as beside others: a request that arrives waits for one of them at most."""
    core = engine(monkeypatch, step_ms=100)
    late = add(core, LONG, 2)
    while not late.output_tokens:
        core.step()
    backend = core.backend
    assert isinstance(backend, ClockedBackend)
    assert max(backend.seconds[1:]) <= 1.1
    assert sorted(backend.seconds)[len(backend.seconds) // 2] >= 0.8


def test_a_step_makes_progress_though_decoding_takes_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = beside_a_stream(engine(monkeypatch, step_ms=1))
    assert found  # the prompt was prefilled


def test_step_ms_is_checked() -> None:
    with pytest.raises(ParameterError, match="step_ms"):
        EngineConfig(step_ms=0)
