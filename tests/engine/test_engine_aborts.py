"""Thousands of aborts in random phases: all blocks are free within one step, and no other
request's tokens change."""

from __future__ import annotations

import random

import pytest

from verbatim.base.config import EngineConfig
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion
from verbatim.engine.core import EngineCore
from verbatim.engine.request import Request
from verbatim.explain.receipt import compare
from verbatim.schedule.invariants import check_scheduler
from verbatim.testing.fakes import fake_parts


@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_aborts_in_every_phase(count: int) -> None:
    config = EngineConfig(kv_blocks=60, step_tokens=24, max_running=10, speculate="off")
    core = EngineCore(fake_parts(pipeline=False), config)
    watched = SamplingParams(max_tokens=40, temperature=0, seed=3, ignore_eos=True, logprobs=0)
    lonely = EngineCore(fake_parts(pipeline=False), config)
    lonely.add(lonely.request("the one who stays", watched, request_id="w"))
    alone = next(out for _ in range(1000) for out in lonely.step() if isinstance(out, Completion))

    rng = random.Random(5)
    states = {"waiting": 0, "prompt": 0, "writing": 0, "forked": 0, "over": 0}
    aborted = survived = number = 0
    core.add(core.request("the one who stays", watched, request_id="w"))
    while aborted < count:
        for _ in range(rng.randrange(4)):
            number += 1
            params = SamplingParams(
                max_tokens=rng.randrange(1, 12), n=rng.choice((1, 1, 4)), seed=number
            )
            core.add(
                core.request(
                    [rng.randrange(256)] * rng.choice((1, 5, 40)), params, request_id=f"r{number}"
                )
            )
        ended = []
        for out in core.step():
            if isinstance(out, Completion):
                ended.append(out.request_id)
                if out.request_id == "w":
                    assert out.choices == alone.choices
                    survived += 1
                    core.add(core.request("the one who stays", watched, request_id="w"))
        for request_id in rng.sample(
            [r for r in core.requests if r != "w"], k=min(len(core.requests) - 1, rng.randrange(5))
        ):
            states[phase(core, request_id)] += 1
            assert core.abort(request_id)
            assert not core.abort(request_id)  # twice is once
            aborted += 1
        for request_id in ended[:1]:
            states["over"] += 1
            assert request_id == "w" or not core.abort(request_id)
        check_scheduler(core.scheduler)
    core.abort("w")
    for request_id in list(core.requests):
        core.abort(request_id)
    core.check()  # nothing runs: nothing is used
    assert all(pool.used == 0 for pool in core.scheduler.cache.pools)
    assert survived >= count // 500
    assert min(states.values()) >= 50, states


def phase(core: EngineCore, request_id: str) -> str:
    sequences = [s for s in core.requests[request_id].sequences if s.id in core.scheduler.sequences]
    running = [s for s in sequences if s in core.scheduler.running]
    if not running:
        return "waiting"
    if len(running) > 1:
        return "forked"
    return "prompt" if running[0].computed < running[0].prompt_len else "writing"


def test_an_aborted_request_completes_once_with_cancel() -> None:
    core = EngineCore(fake_parts(), EngineConfig(kv_blocks=20, check=True))
    core.add(core.request("hello", SamplingParams(max_tokens=30, seed=1, n=2), request_id="a"))
    first = [out for _ in range(5) for out in core.step()]
    assert core.abort("a")
    rest = core.step()
    assert isinstance(rest[-1], Completion)
    assert sum(isinstance(out, Completion) for out in first + rest) == 1
    assert [c.finish.reason for c in rest[-1].choices] == ["cancel", "cancel"]
    written = [out for out in first + rest if not isinstance(out, Completion)]
    for choice in rest[-1].choices:
        assert "".join(d.text for d in written if d.index == choice.index) == choice.text
        assert len(choice.token_ids) > 0
    assert not core.busy
    assert core.step() == []


def test_best_of_cancelled_after_its_first_candidate_ends_with_cancel() -> None:
    """Not with the finish of a candidate that had ended: the others might have been better."""
    params = SamplingParams(max_tokens=60, seed=1, best_of=4, receipt=True, temperature=1.3)
    core = EngineCore(fake_parts(), EngineConfig(kv_blocks=80, check=True, speculate="off"))
    whole = finished(core, core.request("hello", params, request_id="whole"))
    core.add(core.request("hello", params, request_id="a"))
    while all(stream.finish is None for stream in core.requests["a"].streams.values()):
        core.step()
    core.abort("a")
    done = core.step()[-1]
    assert isinstance(done, Completion)
    assert [c.finish.reason for c in done.choices] == ["cancel"]
    assert core.stats()['requests_finished_total{reason="cancel"}'] == 1
    assert done.receipt is not None
    assert str(compare(done.receipt, whole.choices, {})).startswith("identical")


def finished(core: EngineCore, request: Request) -> Completion:
    core.add(request)
    while core.busy:
        outputs = core.step()
    assert isinstance(outputs[-1], Completion)
    return outputs[-1]
