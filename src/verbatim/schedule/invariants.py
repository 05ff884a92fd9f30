"""The proof that the scheduler's books are right. Runs after every step in tests and at idle in production.

For every cache group: free + used + cached = total; every count equals the entries found in the tables; a block stands in two
tables only where both hold the same tokens at the same positions; every name is the name of the tokens that are in the block.
"""

from __future__ import annotations

from verbatim.schedule.blocks import prove
from verbatim.schedule.scheduler import Scheduler
from verbatim.schedule.sequence import RUNNING, WAITING, Sequence


def check_scheduler(s: Scheduler) -> None:
    """Raise AssertionError naming the first broken invariant. Linear in all known tokens."""
    _check_queues(s)
    for g, pool in enumerate(s.cache.pools):
        counts: dict[int, int] = {}
        owners: dict[int, list[tuple[Sequence, int]]] = {}
        for seq in s.sequences.values():
            if seq.state != RUNNING:
                prove(
                    not any(seq.blocks) and seq.computed == 0,
                    f"sequence {seq.id} waits and holds blocks",
                )
                continue
            _check_table(s, seq, g)
            for i, block in enumerate(seq.blocks[g]):
                if block >= 0:
                    prove(block < pool.total, f"sequence {seq.id}: block {block} does not exist")
                    counts[block] = counts.get(block, 0) + 1
                    owners.setdefault(block, []).append((seq, i))
        pool.check(counts)
        _check_contents(s, g, owners)


def _check_queues(s: Scheduler) -> None:
    for queue, state in ((s.running, RUNNING), (s.waiting, WAITING)):
        prove(all(seq.state == state for seq in queue), "a sequence is in the wrong queue")
        prove(
            all(s.sequences.get(seq.id) is seq for seq in queue),
            "a queue holds a sequence that has ended",
        )
        ranks = [seq.rank for seq in queue]
        prove(ranks == sorted(set(ranks)), "a queue is out of order")
    queued = {seq.id for seq in s.running} | {seq.id for seq in s.waiting}
    queued |= {child.id for seq in s.sequences.values() for child in seq.siblings}
    prove(queued == set(s.sequences), "a sequence is in no queue")
    prove(len(s.running) <= s.max_running, f"{len(s.running)} run, at most {s.max_running} may")


def _check_table(s: Scheduler, seq: Sequence, g: int) -> None:
    table, window = seq.blocks[g], s.cache.groups[g].window
    prove(
        0 <= seq.computed <= len(seq.tokens),
        f"sequence {seq.id}: computed {seq.computed} of {len(seq.tokens)}",
    )
    prove(
        len(table) >= -(-seq.computed // s.block_size),
        f"sequence {seq.id}: its table is shorter than what is computed",
    )
    prove(
        len(table) <= -(-len(seq.tokens) // s.block_size),
        f"sequence {seq.id}: its table is longer than what is known",
    )
    released = seq.released[g]
    prove(
        all(b == -1 for b in table[:released]),
        f"sequence {seq.id}: a released block is still in its table",
    )
    prove(all(b >= 0 for b in table[released:]), f"sequence {seq.id}: a hole in its table")
    visible = 0 if window is None else max(seq.computed - window + 1, 0)
    prove(
        released <= visible // s.block_size,
        f"sequence {seq.id}: a block within its window was released",
    )
    if seq.frozen is not None:
        prove(seq.frozen[g] == tuple(table), f"sequence {seq.id}: plans would carry a stale table")


def _check_contents(s: Scheduler, g: int, owners: dict[int, list[tuple[Sequence, int]]]) -> None:
    pool, size = s.cache.pools[g], s.block_size
    made: dict[int, list[bytes]] = {}
    for block, holders in owners.items():
        first, i = holders[0]
        for other, j in holders[1:]:
            prove(other is not first, f"block {block} is twice in the table of sequence {first.id}")
            prove(i == j, f"block {block} stands at different places of {first.id} and {other.id}")
            both = min(first.computed, other.computed, (i + 1) * size)
            prove(
                first.tokens[:both] == other.tokens[:both],
                f"block {block} is shared by {first.id} and {other.id}, whose tokens differ",
            )
            prove(first.salt == other.salt, f"block {block} is shared across salts")
        name = pool.names[block]
        if name is not None:
            prove(
                s.cache.prefix is not None, f"block {block} has a name and there is no prefix cache"
            )
            prove(first.computed >= (i + 1) * size, f"block {block} has a name and is not full")
            prove(name == _names(s, first, made)[i], f"block {block} has the name of other tokens")


def _names(s: Scheduler, seq: Sequence, made: dict[int, list[bytes]]) -> list[bytes]:
    """The names of its full blocks, made afresh from its tokens."""
    prefix = s.cache.prefix
    assert prefix is not None
    if seq.id not in made:
        made[seq.id] = []
        prefix.extend(made[seq.id], prefix.root(seq.salt), seq.tokens, seq.computed // s.block_size)
    return made[seq.id]
