"""Fault injection: check_scheduler() or the cache canary catches 100 of 100 planted faults before a
wrong token could leave the engine.

Each trial runs healthy traffic, plants one fault, and runs on. When the fault finds nothing to
break (for example no fork is running), the trial is repeated with other traffic.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from schedule_rig import Rig

from verbatim.base.records import StepPlan
from verbatim.schedule.invariants import check_scheduler
from verbatim.schedule.sequence import Sequence

Plant = Callable[[Rig, random.Random], bool]  # True: the fault is planted


def holder(rig: Rig, rng: random.Random, least: int = 2) -> Sequence | None:
    """A running sequence with at least this many full blocks."""
    found = [
        s for s in rig.scheduler.running if s.computed >= 4 * least and len(s.tokens) + 4 < s.limit
    ]
    return rng.choice(found) if found else None


def lost_free(rig: Rig, rng: random.Random) -> bool:
    """A block is dropped from a table without a release."""
    seq = holder(rig, rng)
    if seq:
        seq.blocks[0].pop()
        seq.computed = min(seq.computed, len(seq.blocks[0]) * 4)
        seq.published = min(seq.published, seq.computed // 4)
        seq.frozen_blocks = None
    return seq is not None


def double_free(rig: Rig, rng: random.Random) -> bool:
    seq = holder(rig, rng)
    if seq:
        rig.scheduler.cache.pools[0].release(seq.blocks[0][-1])
    return seq is not None


def freed_while_in_use(rig: Rig, rng: random.Random) -> bool:
    """The free list contains a block that a sequence holds."""
    seq, pool = holder(rig, rng), rig.scheduler.cache.pools[0]
    if seq:
        pool.free.append(seq.blocks[0][-1])
    return seq is not None


def wrong_count(rig: Rig, rng: random.Random) -> bool:
    seq = holder(rig, rng)
    if seq:
        rig.scheduler.cache.pools[0].refs[rng.choice(seq.blocks[0])] += rng.choice((-1, 1))
    return seq is not None


def swapped_table(rig: Rig, rng: random.Random) -> bool:
    """Two entries of a table are swapped, in the plans too: only the contents reveal it."""
    seq = holder(rig, rng)
    if seq:
        i, j = rng.sample(range(seq.computed // 4), 2)
        seq.blocks[0][i], seq.blocks[0][j] = seq.blocks[0][j], seq.blocks[0][i]
        seq.frozen_blocks = None
    return seq is not None


def block_of_another_sequence(rig: Rig, rng: random.Random) -> bool:
    """A table refers to another sequence's block with correct counts: only the tokens reveal it."""
    mine, other = holder(rig, rng), holder(rig, rng)
    if not mine or not other:
        return False
    pool, i = rig.scheduler.cache.pools[0], rng.randrange(2)
    if mine.tokens[: 4 * i + 4] == other.tokens[: 4 * i + 4]:
        return False
    pool.release(mine.blocks[0][i])
    mine.blocks[0][i] = other.blocks[0][i]
    pool.share(other.blocks[0][i])
    mine.frozen_blocks = None
    return True


def stale_plan_table(rig: Rig, rng: random.Random) -> bool:
    seq = holder(rig, rng)
    if seq and seq.frozen_blocks:
        seq.frozen_blocks = (tuple(reversed(seq.frozen_blocks[0])),)
        return seq.frozen_blocks[0] != tuple(seq.blocks[0])
    return False


def skipped_position(rig: Rig, rng: random.Random) -> bool:
    """`computed` is too large: a position is read that was never written."""
    seq = holder(rig, rng)
    if seq and len(seq.tokens) - seq.computed == 1 and seq.computed % 4 != 3:
        seq.tokens.append(1)
        seq.computed += 1
        seq.hashes = seq.hashes[: seq.computed // 4]
        return True
    return False


def wrong_hash(rig: Rig, rng: random.Random) -> bool:
    """The prefix cache has a block under the hash of other tokens."""
    seq, prefix = holder(rig, rng), rig.scheduler.cache.prefix
    pool = rig.scheduler.cache.pools[0]
    if not seq or prefix is None:
        return False
    block = seq.blocks[0][0]
    block_hash = pool.hashes[block]
    if block_hash is None:
        return False
    wrong = prefix.block_hash(prefix.root(""), [9, 9, 9, 9])
    del pool.by_hash[block_hash]
    pool.by_hash[wrong], pool.hashes[block] = block, wrong
    return True


def written_while_shared(rig: Rig, rng: random.Random) -> bool:
    """No copy on write: from now on forks write into each other's last block."""
    pool = rig.scheduler.cache.pools[0]
    for seq in rig.scheduler.running:
        at = seq.computed // 4
        # Forks share the last prompt token; harm needs the next token in the same block.
        if at < len(seq.blocks[0]) and pool.refs[seq.blocks[0][at]] > 1 and seq.computed % 4 < 3:

            def append_blocks(seq: Sequence, first: int, need: int, copies: object) -> None:
                seq.frozen_blocks = None
                for pool, table in zip(rig.scheduler.cache.pools, seq.blocks, strict=True):
                    while len(table) < need:
                        table.append(pool.allocate())

            rig.scheduler.cache._append_blocks = append_blocks
            return True
    return False


def copy_not_made(rig: Rig, rng: random.Random) -> bool:
    """The backend does not execute the block copies of a plan."""
    pool = rig.scheduler.cache.pools[0]
    if any(
        pool.refs[s.blocks[0][s.computed // 4]] > 1
        for s in rig.scheduler.running
        if s.computed // 4 < len(s.blocks[0])
    ):
        execute = rig.backend.execute
        rig.backend.execute = lambda plan: execute(StepPlan(plan.step, plan.sequences))
        return True
    return False


def lost_sequence(rig: Rig, rng: random.Random) -> bool:
    if rig.scheduler.running:
        rig.scheduler.running.remove(rng.choice(rig.scheduler.running))
        return True
    return False


def holds_while_waiting(rig: Rig, rng: random.Random) -> bool:
    """A preempted sequence keeps a block."""
    if not rig.scheduler.waiting or not rig.scheduler.cache.pools[0].available:
        return False
    rig.scheduler.waiting[-1].blocks = [[rig.scheduler.cache.pools[0].allocate()]]
    return True


def released_too_early(rig: Rig, rng: random.Random) -> bool:
    """A block inside the sliding window is released."""
    seq = holder(rig, rng)
    if seq is None or rig.scheduler.cache.groups[-1].window is None:
        return False
    table, first = seq.blocks[-1], seq.released[-1]
    if (
        first >= len(table)
        or first * 4 + 4 > seq.computed
        or first < max(seq.computed - 7 + 1, 0) // 4
    ):
        return False  # no full block yet, or it is outside the window
    rig.scheduler.cache.pools[-1].release(table[first])
    table[first], seq.frozen_blocks = -1, None
    seq.released[-1] += 1
    return True


FAULTS: dict[str, Plant] = {
    f.__name__: f
    for f in (
        lost_free,
        double_free,
        freed_while_in_use,
        wrong_count,
        swapped_table,
        block_of_another_sequence,
        stale_plan_table,
        skipped_position,
        wrong_hash,
        written_while_shared,
        copy_not_made,
        lost_sequence,
        holds_while_waiting,
        released_too_early,
    )
}
TRIALS = [(name, i) for i in range(8) for name in FAULTS][:100]


def traffic(rng: random.Random, blocks: int = 30) -> Rig:
    rig = Rig(blocks=blocks, step_tokens=16, windows=(None, 7) if rng.random() < 0.3 else (None,))
    for _ in range(6):
        rig.add(
            [rng.randrange(8, 30) for _ in range(rng.randrange(3, 20))],
            40,
            n=rng.choice((1, 1, 3)),
            min_tokens=39,
        )
    return rig


def caught(rig: Rig) -> bool:
    """Whether the invariants or the canary raise within the next 60 steps."""
    try:
        for _ in range(60):
            check_scheduler(rig.scheduler)
            if rig.step() is None:
                break
    except AssertionError:  # CanaryError is a subclass
        return True
    return False


@pytest.mark.parametrize(
    ("name", "trial"),
    [*TRIALS[:50], *(pytest.param(*trial, marks=pytest.mark.soak) for trial in TRIALS[50:])],
)
def test_a_planted_fault_is_caught(name: str, trial: int) -> None:
    for attempt in range(200):
        rng = random.Random(f"{name} {trial} {attempt}")
        # Forks harm each other only while both run: a large cache avoids preemption before.
        rig = traffic(rng, 200 if name in ("written_while_shared", "copy_not_made") else 30)
        for _ in range(rng.randrange(3, 30)):
            rig.step()
        if FAULTS[name](rig, rng):
            assert caught(rig), f"{name} was not caught (trial {trial}, attempt {attempt})"
            return
    raise AssertionError(f"{name} found nothing to break in 200 attempts")


def test_there_are_100_trials_over_all_faults() -> None:
    assert len(TRIALS) == 100
    assert {name for name, _ in TRIALS[:50]} == set(FAULTS)


def test_healthy_traffic_passes_all_checks() -> None:
    for seed in range(10):
        rig = traffic(random.Random(seed))
        rig.run()
        rig.at_rest()
