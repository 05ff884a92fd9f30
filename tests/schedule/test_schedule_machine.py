"""Stateful property test: any order of add, step, abort, fork, drafts and cache exhaustion leaks no
block, shares no block wrongly and starves no sequence."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from schedule_rig import Rig

from verbatim.schedule.invariants import check_scheduler
from verbatim.schedule.token_cost import TokenCost

WINDOWS = [(None,), (None, 9), (6,), (None, 5, 17)]


class Traffic(RuleBasedStateMachine):
    """Every step runs check_scheduler() and the canary (see Rig.step). Teardown finishes all
    sequences and compares each output with the oracle."""

    total = 0
    preemptions = 0

    @initialize(
        blocks=st.sampled_from([6, 8, 10, 14, 40]),
        windows=st.sampled_from(WINDOWS),
        step_tokens=st.sampled_from([1, 3, 8, 16, 64]),
        max_running=st.sampled_from([1, 4, 8, 12]),
        prefix=st.booleans(),
        use_cache=st.sampled_from([True, True, True, False]),
        cost=st.sampled_from([TokenCost(), TokenCost(30, 1), TokenCost(1, 5)]),
        overlap=st.booleans(),
    )
    def start(
        self, blocks, windows, step_tokens, max_running, prefix, use_cache, cost, overlap
    ) -> None:
        self.rig = Rig(
            blocks=blocks,
            windows=windows,
            step_tokens=step_tokens,
            max_running=max_running,
            prefix_cache=prefix,
            use_cache=use_cache,
            cost=cost,
            overlap=overlap,
        )
        self.longest = blocks * 4 - 1

    @rule(
        data=st.data(),
        n=st.sampled_from([1, 1, 1, 2, 5]),
        priority=st.integers(-2, 2),
        salt=st.sampled_from(["", "a"]),
        tenant=st.sampled_from(["", "", "b", "c"]),
        scored=st.sampled_from([{}, {}, {"prompt_logprobs": 0}]),
    )
    def add(self, data, n, priority, salt, tenant, scored) -> None:
        length = data.draw(st.integers(1, min(self.longest - 1, 40)))
        prompt = data.draw(st.lists(st.sampled_from([1, 2]), min_size=length, max_size=length))
        more = data.draw(st.integers(0, min(self.longest - length, 40)))
        named = {"salt": salt, "tenant": tenant, "priority": priority, **scored}
        self.rig.add(prompt, more, n=n, min_tokens=min(more, 12), **named)

    @rule(
        length=st.integers(1, 12), more=st.integers(2, 10), tenant=st.sampled_from(["", "b", "c"])
    )
    def add_beam(self, length, more, tenant) -> None:
        if length + more < self.longest:
            self.rig.add([3] * length, more, beam=3, tenant=tenant)

    @rule(times=st.integers(1, 25), drafts=st.sampled_from([0, 0, 1, 4]))
    def step(self, times, drafts) -> None:
        for _ in range(times):
            if drafts:
                self.draft(drafts)
            # In every third step beams stay held, with blocks that other sequences need.
            if self.rig.step() is None or self.rig.steps % 3:
                self.decide()

    def draft(self, count: int) -> None:
        """Drafts that are right, wrong, or right at first."""
        for seq in list(self.rig.scheduler.running):
            if seq.beam or seq.siblings or len(seq.tokens) - seq.computed != 1:
                continue
            truth = self.rig.oracle(seq)[len(seq.tokens) :][:count]
            if seq.id % 3 == 0:
                truth = [*truth[: count // 2], 1, 1]
            self.rig.scheduler.set_drafts(seq.id, truth)

    def decide(self) -> None:
        """Extend every held beam and fork it while fewer than four exist; abort it at its limit."""
        scheduler = self.rig.scheduler
        for seq in [s for s in scheduler.sequences.values() if s.held]:
            if len(seq.tokens) + 1 >= seq.limit:
                scheduler.abort(seq.id)
                continue
            if sum(1 for s in scheduler.sequences.values() if s.beam) < 4:
                twin = self.rig.sequence(
                    seq.tokens[: seq.prompt_len],
                    seq.limit - seq.prompt_len,
                    beam=3,
                    tenant=seq.tenant,
                )
                scheduler.fork(seq, twin)
                scheduler.extend(twin.id, 2)
            scheduler.extend(seq.id, 1 + seq.id % 2)
        check_scheduler(scheduler)

    @precondition(lambda self: self.rig.scheduler.sequences)
    @rule(data=st.data(), publish=st.booleans())
    def abort(self, data, publish) -> None:
        """Without `publish`: values that are not finite, whose blocks leave the prefix cache."""
        known = sorted(self.rig.scheduler.sequences)
        self.rig.abort(data.draw(st.sampled_from(known)), publish=publish)

    @precondition(lambda self: self.rig.scheduler.sequences)
    @rule(data=st.data())
    def abort_while_computing(self, data) -> None:
        """The client disconnects during a step: the result refers to an aborted sequence."""
        rig = self.rig
        plan = rig.scheduler.plan()
        if plan is not None:
            result = rig.backend.execute(plan)
            rig.scheduler.abort(data.draw(st.sampled_from(sorted(rig.scheduler.sequences))))
            for event in rig.scheduler.commit(plan, result):
                if event.finish is not None:
                    rig.ended[event.seq_id] = event
            check_scheduler(rig.scheduler)
            rig.steps += 1
            self.decide()

    @rule()
    def clear_prefix_cache(self) -> None:
        self.rig.scheduler.clear_prefix_cache()
        check_scheduler(self.rig.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for _ in range(20_000):
            if self.rig.step() is None and not self.rig.scheduler.sequences:
                break
            self.decide()
        self.rig.at_rest()
        Traffic.total += self.rig.steps
        Traffic.preemptions += self.rig.scheduler.preemptions


def run(examples: int) -> None:
    Traffic.total = Traffic.preemptions = 0
    quick = settings(
        max_examples=examples, stateful_step_count=40, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(Traffic, settings=quick)


def test_thousands_of_steps_in_any_order() -> None:
    run(25)
    assert Traffic.total >= 2_000
    assert Traffic.preemptions >= 10


@pytest.mark.soak
def test_a_million_steps_in_any_order() -> None:
    run(12_000)
    assert Traffic.total >= 1_000_000
