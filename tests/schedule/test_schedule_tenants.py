"""Shares of the tenants: a tenant with a thousand requests delays another one's by a few steps, and
one with the processor to itself loses nothing. Time is counted in steps."""

from __future__ import annotations

from typing import Any

import pytest
from schedule_rig import Rig

from verbatim.schedule import shares
from verbatim.schedule.sequence import Sequence

LATER = 5  # steps of the full token budget that a first token may wait for other tenants
PROMPT, OUTPUT = 200, 100  # tokens of each of alice's requests
BOB = [5] * 36


def rig_of(max_running: int, **options: Any) -> Rig:
    options = {"blocks": 8000, "block_size": 16, "step_tokens": 512, **options}
    return Rig(max_running=max_running, **options)


def crowd(rig: Rig, requests: int, tenant: str = "alice", **more: int) -> list[Sequence]:
    prompts = ([1 + i % 30, i // 30 % 40, 3, i // 1200] * (PROMPT // 4) for i in range(requests))
    return [
        rig.add(prompt, OUTPUT, tenant=tenant, min_tokens=OUTPUT, **more)[0] for prompt in prompts
    ]


def steps_to_first_token(rig: Rig, seq: Sequence, most: int = 60) -> int:
    """Steps until the sequence has its first token; `most` if it takes longer."""
    steps = 0
    while len(seq.tokens) == seq.prompt_len and steps < most:
        rig.step()
        steps += 1
    return steps


def bob_beside(requests: int, max_running: int, before: int, tenants: int = 1) -> int:
    """Steps to bob's first token, who arrives when alice's requests (or those of several tenants)
    have run for `before` steps."""
    rig = rig_of(max_running)
    for number in range(tenants):
        crowd(rig, requests, f"alice {number}")
    for _ in range(before):
        rig.step()
    (bob,) = rig.add(BOB, 8, tenant="bob")
    return steps_to_first_token(rig, bob)


@pytest.mark.parametrize("before", [0, 1, 8, 20])
@pytest.mark.parametrize("max_running", [16, 256])
@pytest.mark.parametrize("requests", [120, 1200])
def test_a_tenant_with_many_requests_delays_another_by_a_few_steps(
    requests: int, max_running: int, before: int
) -> None:
    one = bob_beside(1, max_running, before)
    assert bob_beside(requests, max_running, before) <= one + LATER


@pytest.mark.parametrize("max_running", [32, 256])
def test_nineteen_tenants_with_many_requests_delay_another_by_a_few_steps(max_running: int) -> None:
    assert bob_beside(40, max_running, 8, tenants=19) <= bob_beside(1, max_running, 8) + LATER


def test_a_short_prompt_passes_the_long_prompts_of_another_tenant() -> None:
    rig = rig_of(16)
    for i in range(40):
        rig.add([i % 30] * 4000, 4, tenant="alice")
    for _ in range(3):
        rig.step()
    (bob,) = rig.add(BOB, 8, tenant="bob")
    assert steps_to_first_token(rig, bob) <= 1 + LATER


def test_a_tenant_that_holds_every_block_gives_some_to_another() -> None:
    """The newest sequences of the tenant with most blocks are preempted, though places are free."""
    rig = rig_of(16, blocks=80)
    alice = crowd(rig, 12)
    for _ in range(30):
        rig.step()
    assert rig.scheduler.cache.pools[0].available < 10
    (bob,) = rig.add([5] * 100, 8, tenant="bob")
    assert steps_to_first_token(rig, bob) <= 1 + LATER
    assert alice[0].preemptions == bob.preemptions == 0
    rig.run()
    rig.at_rest()


def test_when_blocks_run_out_the_tenant_with_most_of_them_is_preempted() -> None:
    """Bob's sequence is the newest of all, and alice's are the ones that grow."""
    rig = rig_of(16, blocks=64)
    alice = crowd(rig, 4)
    for _ in range(3):
        rig.step()
    (bob,) = rig.add([5] * 16, 120, tenant="bob", min_tokens=120)
    rig.run()
    assert sum(seq.preemptions for seq in alice) > 0
    assert (alice[0].preemptions, bob.preemptions) == (0, 0)
    rig.at_rest()


def test_equal_shares_are_reached_once_and_then_kept() -> None:
    """Sixteen places, two tenants: eight of alice's sequences are preempted for bob's, once."""
    rig = rig_of(16)
    crowd(rig, 30)
    for _ in range(10):
        rig.step()
    crowd(rig, 30, "bob")
    while len(rig.ended) < 50:
        rig.step()
        if min(sum(s.tenant == t for s in rig.scheduler.waiting) for t in ("alice", "bob")):
            running = sum(seq.tenant == "bob" for seq in rig.scheduler.running)
            assert running <= 8
    assert rig.scheduler.preemptions == 8


def test_single_requests_one_after_another_preempt_at_most_one_sequence_each() -> None:
    rig = rig_of(16)
    alice = crowd(rig, 40)
    rig.step()
    for _ in range(12):
        (bob,) = rig.add(BOB, 4, tenant="bob", min_tokens=4)
        while bob.id in rig.scheduler.sequences:
            rig.step()
    assert rig.scheduler.preemptions <= 12
    assert max(seq.preemptions for seq in alice[:8]) == 0
    rig.run()
    rig.at_rest()


def test_more_tenants_than_places_take_turns() -> None:
    rig = Rig(max_running=1)
    names = {rig.add([i] * 4, 2, tenant="a")[0].id: f"a{i}" for i in range(4)}
    rig.step()
    for name in ("b", "c"):
        names |= {rig.add([9] * 4, 2, tenant=name)[0].id: f"{name}{i}" for i in range(2)}
    rig.run()
    assert rig.scheduler.preemptions == 0
    assert [names[i] for i in rig.ended] == ["a0", "a1", "b0", "c0", "a2", "b1", "c1", "a3"]


def test_priorities_order_the_requests_of_one_tenant() -> None:
    """An urgent request passes the tenant's own; it takes no turn of another tenant."""
    rig = Rig(max_running=1)
    names = {rig.add([1] * 4, 2, tenant="a")[0].id: "a0"}
    rig.step()
    for name, tenant, priority in (("b0", "b", 0), ("a1", "a", 0), ("a2", "a", -3), ("b1", "b", 0)):
        names[rig.add([9] * 4, 2, tenant=tenant, priority=priority)[0].id] = name
    rig.run()
    assert [names[i] for i in rig.ended] == ["a0", "a2", "b0", "a1", "b1"]


def test_a_request_too_large_for_the_free_blocks_is_passed_but_not_starved() -> None:
    """Other tenants start while it does not fit, until it is the first in rank of all."""
    rig = rig_of(16, blocks=40)
    rig.add([1] * 300, 100, tenant="alice", min_tokens=100)
    rig.step()
    (large,) = rig.add([2] * 500, 20, tenant="bob", min_tokens=20)
    (small,) = rig.add(BOB, 4, tenant="carol")
    assert steps_to_first_token(rig, small) <= 1 + LATER
    for i in range(400):
        rig.add([i % 40] * 30, 40, tenant=f"{i % 5}", min_tokens=40)
        rig.step()
        if large.id in rig.ended:
            break
    assert large.id in rig.ended
    rig.run()
    rig.at_rest()


def test_drafts_of_one_tenant_leave_another_its_share_of_the_step() -> None:
    rig = rig_of(16, step_tokens=33)
    (alice,) = rig.add([1] * 4, 200, tenant="alice", min_tokens=200)
    rig.step()
    (bob,) = rig.add([5] * 64, 4, tenant="bob")
    while bob.computed < 64 and rig.steps < 20:
        rig.scheduler.set_drafts(alice.id, rig.oracle(alice)[len(alice.tokens) :][:60])
        rig.step()
    assert rig.steps <= 6


def test_scored_prompts_of_one_tenant_leave_another_some_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shares, "MAX_SCORES", 64)
    rig = rig_of(256)
    crowd(rig, 40, prompt_logprobs=0)
    for _ in range(3):
        rig.step()
    (bob,) = rig.add(BOB, 4, tenant="bob", prompt_logprobs=0)
    assert steps_to_first_token(rig, bob) <= 1 + LATER


def test_a_tenant_alone_is_served_as_without_tenants() -> None:
    """The same plans, step by step, as those of requests without a tenant; no preemption."""
    plans = []
    for tenant in ("", "alice"):
        rig = rig_of(16, blocks=500)
        crowd(rig, 24, tenant)
        seen = []
        while rig.step() is not None:
            assert rig.plan is not None
            seen.append([(s.seq_id, s.start, len(s.tokens)) for s in rig.plan.sequences])
        assert rig.scheduler.preemptions == 0
        plans.append(seen)
    assert plans[0] == plans[1]
