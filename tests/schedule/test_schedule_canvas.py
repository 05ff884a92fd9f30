"""Blocks of a diffusion model in the scheduler, as a property: random traffic (chunks, few blocks,
tenants, forks, aborts, preemption of all) changes no token of a sequence, and every sequence ends.
Each is compared with a run of its own."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verbatim.base.params import SamplingParams
from verbatim.sampling.remasking import policy
from verbatim.schedule.canvas import Canvas, CanvasRules
from verbatim.schedule.invariants import check_scheduler
from verbatim.schedule.scheduler import Scheduler
from verbatim.schedule.sequence import Sequence
from verbatim.testing.fakes import FakeBackend, fake_spec

MASK, VOCAB, SIZE = 39, 40, 4
NAMES = ("sequential", "random", "low_confidence_static", "low_confidence_dynamic")


def sequence(seq_id: int, draw: random.Random, longest: int, kind: str) -> Sequence:
    length = draw.choice([1, 2, 3, 4, 6, 8])
    rules = CanvasRules(
        MASK, length, draw.randint(1, length), policy(draw.choice(NAMES), 0.5, 0.5),
        full=kind == "full", causal=kind == "causal",
    )  # fmt: skip
    prompt = [draw.choice([1, 2]) for _ in range(draw.randint(1, longest // 2))]
    limit = min(len(prompt) + draw.randint(1, 12), longest // length * length - length)
    limit = max(limit, len(prompt) + 1)
    key = draw.randint(0, 99)
    return Sequence(
        *(seq_id, prompt, SamplingParams(min_tokens=draw.choice([0, 3]))),
        limit=limit,
        key=key,
        stop_ids={7: "eos"},
        salt=f"{length}",
        tenant=draw.choice(["", "b", "c"]),
        canvas=Canvas(rules, len(prompt), limit, key),
    )


def rig(**options: object) -> tuple[Scheduler, FakeBackend]:
    spec = fake_spec(VOCAB)
    blocks = int(str(options.pop("blocks", 40)))
    backend = FakeBackend(spec, block_size=SIZE, pipeline=False, canary=True)
    backend.allocate((blocks,))
    scheduler = Scheduler(spec.groups, (blocks,), block_size=SIZE, prefix_key=b"t", **options)  # type: ignore[arg-type]
    return scheduler, backend


def step(scheduler: Scheduler, backend: FakeBackend) -> None:
    plan = scheduler.plan()
    assert plan is not None, "sequences are left and none of them can advance"
    assert plan.rows <= scheduler.step_tokens
    scheduler.commit(plan, backend.execute(plan))
    check_scheduler(scheduler)


def alone(seq_id: int, seed: int, longest: int, kind: str) -> list[int]:
    scheduler, backend = rig(use_cache=kind != "full", step_tokens=200)
    seq = sequence(seq_id, random.Random(seed), longest, kind)
    scheduler.add(seq)
    while scheduler.sequences:
        step(scheduler, backend)
    return seq.tokens


@pytest.mark.parametrize("kind", ["blocks", "full", "causal"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6))
def test_traffic_changes_no_token(kind: str, seed: int) -> None:
    draw = random.Random(seed)
    blocks = draw.choice([8, 10, 16, 40])
    longest = (blocks - 2) * SIZE
    scheduler, backend = rig(
        blocks=blocks,
        step_tokens=max(longest if kind == "full" else 8, draw.choice([9, 16, 40])),
        max_running=draw.choice([1, 3, 8]),
        prefix_cache=draw.random() < 0.7,
        use_cache=kind != "full" and draw.random() < 0.8,
    )
    scheduler.prompt_tokens = draw.choice([None, 4])
    seeds = {i: draw.randint(0, 30) for i in range(draw.randint(2, 10))}
    kept: dict[int, Sequence] = {}
    for i, own in seeds.items():
        seq = kept[i] = sequence(i, random.Random(own), longest, kind)
        if i % 3 == 2:  # a second choice of the same prompt
            twin = kept[100 + i] = sequence(100 + i, random.Random(own), longest, kind)
            seq.siblings = [twin]
        scheduler.add(seq)
        for _ in range(draw.randint(0, 3)):
            if scheduler.sequences:
                step(scheduler, backend)
        if draw.random() < 0.2:
            scheduler.preempt_all()
        if draw.random() < 0.1 and scheduler.sequences:
            gone = draw.choice(sorted(scheduler.sequences))
            scheduler.abort(gone)
            kept.pop(gone)
    for _ in range(2000):
        if not scheduler.sequences:
            break
        step(scheduler, backend)
    assert not scheduler.sequences, "a sequence starves"
    for i, seq in kept.items():
        assert seq.tokens == alone(i, seeds[i % 100], longest, kind), i
