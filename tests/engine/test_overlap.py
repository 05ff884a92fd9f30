"""Overlapped decoding in the engine, on the fake backend: step N+1 is launched before step N is
read, and no token changes. cuda_kernels.py runs the same requests on the cuda backend."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from overlap_crowd import count_rows, generate_all
from verbatim.base.config import EngineConfig
from verbatim.base.errors import VerbatimError
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion, Drawn, DrawSpec, SeqStep, StepPlan, StepResult
from verbatim.engine.core import EngineCore
from verbatim.engine.step.overlap import BACK_OFF, EarlyStep, Overlap, next_step
from verbatim.testing.fakes import FakeBackend, fake_parts, fake_spec

ONE = SamplingParams(temperature=0, seed=3, max_tokens=30, ignore_eos=True, speculate="off")


class Recorder(FakeBackend):
    """Writes down what the engine asks for, in order."""

    def __init__(self, **options: Any) -> None:
        super().__init__(overlap=True, canary=True, **options)
        self.calls: list[str] = []

    @property
    def launcher(self) -> Any:
        return RecordedLauncher(super().launcher, self.calls)

    def execute(self, plan: StepPlan) -> StepResult:
        self.calls.append("execute")
        return super().execute(plan)


class RecordedLauncher:
    def __init__(self, inner: Any, calls: list[str]) -> None:
        self._inner, self._calls = inner, calls

    def can_launch(self, steps: Sequence[SeqStep]) -> bool:
        return bool(self._inner.can_launch(steps))

    def launch(self, steps: tuple[SeqStep, ...]) -> Any:
        return RecordedLaunch(self._inner.launch(steps), self._calls, steps[0].start)


class RecordedLaunch:
    def __init__(self, inner: Any, calls: list[str], position: int) -> None:
        self._inner, self._calls, self._position = inner, calls, position
        calls.append(f"launch {position}")

    def launch_next(self, steps: tuple[SeqStep, ...], rows: Sequence[int]) -> Any:
        return RecordedLaunch(self._inner.launch_next(steps, rows), self._calls, self._position + 1)

    def collect(self, rows: Sequence[int]) -> list[Drawn | None]:
        self._calls.append(f"collect {self._position}")
        return list(self._inner.collect(rows))

    def states(self, row: int) -> None:
        return None


def complete(core: EngineCore, prompt: list[int], params: SamplingParams) -> Completion:
    core.add(core.request(prompt, params))
    while core.busy:
        for out in core.step():
            if isinstance(out, Completion):
                return out
    raise AssertionError("no completion")


def core_of(backend: FakeBackend, **options: Any) -> EngineCore:
    return EngineCore(fake_parts(backend), EngineConfig(kv_blocks=32, check=True, **options))


@pytest.mark.parametrize("windows", [(None,), (None, 20)])
def test_overlapped_decoding_does_not_change_the_tokens(
    windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, rows = fake_spec(windows=windows), count_rows(monkeypatch)
    for seed in (1, 2, 3):
        plain = generate_all(FakeBackend(spec, canary=True), random.Random(seed), blocks=6)
        before = rows.launched
        backend = FakeBackend(spec, canary=True, overlap=True)
        assert generate_all(backend, random.Random(seed), blocks=6) == plain
        assert rows.launched > before
    assert 100 < rows.matched < rows.launched, "some rows match the plan, and some are discarded"


def test_a_step_is_launched_before_the_one_before_is_read() -> None:
    backend = Recorder()
    complete(core_of(backend), [1, 2, 3], ONE)
    calls = backend.calls
    assert calls[:5] == ["execute", "launch 3", "launch 4", "collect 3", "launch 5"]
    launched = [i for i in range(4, 40) if f"launch {i}" in calls]
    assert len(launched) > 12
    for i in launched:
        before = f"collect {i - 1}"
        assert before not in calls or calls.index(f"launch {i}") < calls.index(before)


def test_beam_search_is_not_launched_ahead() -> None:
    backend = Recorder()
    beams = SamplingParams(num_beams=2, max_tokens=12, ignore_eos=True)
    found = complete(core_of(backend), [1, 2, 3], beams)
    assert set(backend.calls) == {"execute"}
    assert found.choices == complete(core_of(FakeBackend()), [1, 2, 3], beams).choices


def test_a_failed_launch_discards_the_kv_cache_and_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = complete(core_of(FakeBackend()), [1, 2, 3], ONE)
    core = core_of(FakeBackend(overlap=True, canary=True))
    launch_next, failures = Overlap.launch_next, iter([False] * 6 + [True] + [False] * 99)

    def sometimes(self: Overlap, *args: Any) -> EarlyStep | None:
        if next(failures):
            raise VerbatimError("the device is lost")
        return launch_next(self, *args)

    monkeypatch.setattr(Overlap, "launch_next", sometimes)
    core.add(core.request([1, 2, 3], ONE))
    failed, done = 0, None
    while core.busy:
        try:
            done = ([out for out in core.step() if isinstance(out, Completion)] or [done])[0]
        except VerbatimError:
            failed += 1
    assert failed == 1
    assert done is not None
    assert done.choices == expected.choices
    assert done.timings.preemptions == 1


# ---- which steps are launched, and which rows are used


class Launched:
    """A launched step of which the device decides nothing."""

    def launch_next(self, steps: tuple[SeqStep, ...], rows: Sequence[int]) -> Launched:
        return Launched()

    def collect(self, rows: Sequence[int]) -> list[Drawn | None]:
        return [None for _ in rows]


class AnyLauncher:
    def can_launch(self, steps: Sequence[SeqStep]) -> bool:
        return True

    def launch(self, steps: tuple[SeqStep, ...]) -> Launched:
        return Launched()


def overlap() -> Overlap:
    return Overlap(FakeBackend(), AnyLauncher())


def test_only_launched_rows_that_match_the_plan_are_used() -> None:
    spec, other = (DrawSpec(SamplingParams(), 5, 1) for _ in range(2))
    tables = ((4, 7), (1, 2))
    step = SeqStep(1, (9,), 18, tables, draws=1, draw=spec)
    right = [
        step,
        step._replace(blocks=((4, 7, 3), (1, 2, 6))),
        step._replace(blocks=((4, 7), (-1, 2))),
    ]
    wrong = [
        step._replace(seq_id=2),
        step._replace(tokens=(8,)),
        step._replace(tokens=(9, 8), draws=2),
        step._replace(start=17),
        step._replace(blocks=((4, 8), (1, 2))),
        step._replace(blocks=((4,), (1, 2))),
        step._replace(draw=other),
        step._replace(targets=(3,)),
        step._replace(hidden=True),
        step._replace(draws=0),
    ]
    plans = [StepPlan(0, (planned,)) for planned in (*right, *wrong)]
    plans.append(StepPlan(0, (step,), copies=((0, 1, 2),)))
    for i, plan in enumerate(plans):
        loop, launched = overlap(), Launched()
        loop._ahead = EarlyStep(launched, (step._replace(tokens=(0,)),), (9,))
        current = loop.launch(plan)
        if i < len(right):
            assert current == (launched, {1: 0}, True), plan
        else:
            assert current == (None, {}, False), plan
        assert loop._ahead is None


def test_the_next_step_needs_a_block_and_a_position_in_the_context() -> None:
    step = SeqStep(1, (9,), 15, ((4,),), draws=1)
    longer = step._replace(blocks=((4, 6),))
    assert next_step(step, 99) is None
    assert next_step(longer, 17) == SeqStep(1, (0,), 16, ((4, 6),), draws=1)
    assert next_step(longer, 16) is None, "the position is beyond the context"


def test_launching_ahead_backs_off_after_a_discarded_step() -> None:
    spec = DrawSpec(SamplingParams(), 5, 1)
    loop, launches = overlap(), []
    for position in range(30):
        plan = StepPlan(position, (SeqStep(1, (9,), position, ((4, 7),), draws=1, draw=spec),))
        if position == 10:
            loop._ahead = EarlyStep(Launched(), plan.sequences, (8,))
        launches.append(loop.launch(plan).steady)
    discarded = range(10, 10 + BACK_OFF)
    assert launches == [position not in (0, *discarded) for position in range(30)]
    other = plan.sequences[0]._replace(start=30, draw=DrawSpec(SamplingParams(), 5, 1))
    assert not loop.launch(StepPlan(30, (other,))).steady, (
        "another DrawSpec, as the drafts of a draft model have"
    )
    masked = [
        StepPlan(i, (other._replace(start=i, draw=DrawSpec(SamplingParams(), 5, 1, masks=(b"",))),))
        for i in (31, 32)
    ]
    assert not any(loop.launch(plan).steady for plan in masked), "a grammar has a mask per step"
    assert not loop.launch(StepPlan(30, ())).steady, "no sequence decodes"
    assert not loop.launch(plan).steady, "the same step again does not continue it"
