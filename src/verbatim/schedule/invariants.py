"""Invariants of the scheduler and the block accounting, checked after every step in tests and while
idle in production.

Per cache group: free + used + cached = total; every reference count equals the table entries; a
block is in two tables only where both hold the same tokens at the same positions; every block hash
is the hash of the tokens in the block.
"""

from __future__ import annotations

from verbatim.schedule.blocks import ensure
from verbatim.schedule.scheduler import Scheduler
from verbatim.schedule.sequence import RUNNING, WAITING, Sequence


def check_scheduler(s: Scheduler) -> None:
    """Raise AssertionError for the first broken invariant. Time is linear in all known tokens."""
    _check_queues(s)
    for g, pool in enumerate(s.cache.pools):
        counts: dict[int, int] = {}
        owners: dict[int, list[tuple[Sequence, int]]] = {}
        for seq in s.sequences.values():
            if seq.state != RUNNING:
                ensure(
                    not any(seq.blocks) and seq.computed == 0,
                    f"sequence {seq.id} is waiting and holds blocks",
                )
                continue
            _check_table(s, seq, g)
            for i, block in enumerate(seq.blocks[g]):
                if block >= 0:
                    ensure(block < pool.total, f"sequence {seq.id}: block {block} does not exist")
                    counts[block] = counts.get(block, 0) + 1
                    owners.setdefault(block, []).append((seq, i))
        pool.check(counts)
        _check_contents(s, g, owners)


def _check_queues(s: Scheduler) -> None:
    for queue, state in ((s.running, RUNNING), (s.waiting, WAITING)):
        ensure(all(seq.state == state for seq in queue), "a sequence is in the wrong queue")
        ensure(
            all(s.sequences.get(seq.id) is seq for seq in queue),
            "a queue holds a sequence that has ended",
        )
        ranks = [seq.rank for seq in queue]
        ensure(ranks == sorted(set(ranks)), "a queue is out of order")
    for name, tenant in s.tenants.items():
        ensure(bool(tenant.running or tenant.waiting), f"tenant {name!r} has no sequence")
        for whole, part in ((s.running, tenant.running), (s.waiting, tenant.waiting)):
            ensure(part == [q for q in whole if q.tenant == name], f"tenant {name!r}: wrong queue")
    ensure({q.tenant for q in (*s.running, *s.waiting)} == set(s.tenants), "a tenant is missing")
    queued = {seq.id for seq in s.running} | {seq.id for seq in s.waiting}
    queued |= {child.id for seq in s.sequences.values() for child in seq.siblings}
    ensure(queued == set(s.sequences), "a sequence is in no queue")
    ensure(len(s.running) <= s.max_running, f"{len(s.running)} sequences run, max {s.max_running}")


def _check_table(s: Scheduler, seq: Sequence, g: int) -> None:
    table, window = seq.blocks[g], s.cache.groups[g].window
    ensure(
        0 <= seq.computed <= len(seq.tokens),
        f"sequence {seq.id}: computed {seq.computed} of {len(seq.tokens)}",
    )
    ensure(
        len(table) >= -(-seq.computed // s.block_size),
        f"sequence {seq.id}: the table is shorter than the computed tokens",
    )
    ensure(
        len(table) <= -(-seq.span // s.block_size),
        f"sequence {seq.id}: the table is longer than the known tokens",
    )
    released = seq.released[g]
    ensure(
        all(b == -1 for b in table[:released]),
        f"sequence {seq.id}: a released block is still in the table",
    )
    ensure(
        all(b >= 0 for b in table[released:]),
        f"sequence {seq.id}: a released block in the middle of the table",
    )
    visible = 0 if window is None else max(seq.computed - window + 1, 0)
    ensure(
        released <= visible // s.block_size,
        f"sequence {seq.id}: a block within its window was released",
    )
    if seq.frozen_blocks is not None:
        ensure(seq.frozen_blocks[g] == tuple(table), f"sequence {seq.id}: frozen_blocks is stale")


def _check_contents(s: Scheduler, g: int, owners: dict[int, list[tuple[Sequence, int]]]) -> None:
    pool, size = s.cache.pools[g], s.block_size
    memo: dict[int, list[bytes]] = {}
    for block, holders in owners.items():
        first, i = holders[0]
        for other, j in holders[1:]:
            ensure(
                other is not first, f"block {block} is twice in the table of sequence {first.id}"
            )
            ensure(i == j, f"block {block} is at two positions: {first.id}, {other.id}")
            both = min(first.computed, other.computed, (i + 1) * size)
            ensure(
                first.tokens[:both] == other.tokens[:both],
                f"block {block} is shared by {first.id} and {other.id}, whose tokens differ",
            )
            ensure(first.salt == other.salt, f"block {block} is shared across salts")
        block_hash = pool.hashes[block]
        if block_hash is not None:
            ensure(
                s.cache.prefix is not None,
                f"block {block} has a hash although the prefix cache is off",
            )
            ensure(first.computed >= (i + 1) * size, f"block {block} has a hash and is not full")
            # Of a diffusion model another choice may have published it, with its own later tokens.
            own = _hashes(s, first, memo)
            ensure(
                block_hash in own[i : i + 1] or (len(own) <= i and first.canvas is not None),
                f"block {block} has the hash of other tokens",
            )


def _hashes(s: Scheduler, seq: Sequence, memo: dict[int, list[bytes]]) -> list[bytes]:
    """Hashes of the sequence's full blocks, computed from its tokens."""
    prefix = s.cache.prefix
    assert prefix is not None
    if seq.id not in memo:
        memo[seq.id] = []
        full = s.cache.whole_groups(seq, seq.computed)
        prefix.extend(
            memo[seq.id], prefix.root(seq.salt), seq.tokens, full, s.cache.hash_group(seq)
        )
    return memo[seq.id]
