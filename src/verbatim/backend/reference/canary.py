"""The canary: a debug check that every step reads only KV cache blocks of its own sequence.

Every slot of the cache has a stamp, a hash of all tokens up to its position:
stamp(p) = mix(stamp(p - 1), token at p, p). Two sequences with the same prefix may share a block
(prefix hit, fork). Any other sharing breaks the chain: a block of another sequence, an overwritten
or released block, blocks in the wrong order. Stamps are kept per cache group; a block copy copies
its stamps.

The stamps that a sequence wrote are also kept per sequence. They catch a block table that is valid
as a whole but belongs to another sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbatim.base.records import CacheGroup, SeqStep, StepPlan

_MULTIPLY = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_WEYL = np.uint64(0x9E3779B97F4A7C15)
_MAX_SEQUENCES = 4096  # sequences whose stamps are kept; the oldest is evicted first


class CacheFault(AssertionError):
    """The plan would read keys and values of another sequence: a bug in the scheduler."""


class Canary:
    def __init__(self, groups: tuple[CacheGroup, ...], blocks: tuple[int, ...], size: int) -> None:
        self.groups, self.size = groups, size
        # per cache group [blocks, size]; stamp 0: the slot was never written
        self.stamps = [np.zeros((n, size), np.uint64) for n in blocks]
        self.tokens = [np.zeros((n, size), np.int64) for n in blocks]
        # seq_id -> stamps of positions 0, 1, …; 0 where unknown
        self.seq_stamps: dict[int, NDArray[Any]] = {}

    def step(self, plan: StepPlan) -> None:
        """Apply the plan's copies and writes to the stamps, then verify every slot that the plan
        reads. Raises CacheFault."""
        for group, source, target in plan.copies:
            self.stamps[group][target] = self.stamps[group][source]
            self.tokens[group][target] = self.tokens[group][source]
        for s in plan.sequences:
            if s.tokens:
                self._write(s)
        for s in plan.sequences:
            if s.tokens:
                for group in range(len(self.groups)):
                    self._verify(s, group)

    def _write(self, s: SeqStep) -> None:
        stamp = self._previous_stamp(s)
        stamps = np.zeros(len(s.tokens), np.uint64)
        for i, token in enumerate(s.tokens):
            stamp = np.uint64(_mix(stamp, np.int64(token), np.int64(s.start + i)))
            stamps[i] = stamp
        positions = np.arange(s.start, s.end)
        for group, table in enumerate(s.blocks):
            blocks = _blocks(s, group, table, positions // self.size)
            self.stamps[group][blocks, positions % self.size] = stamps
            self.tokens[group][blocks, positions % self.size] = s.tokens
        known = self.seq_stamps.pop(s.seq_id, np.zeros(0, np.uint64))
        extended = np.zeros(s.end, np.uint64)
        extended[: min(len(known), s.start)] = known[: s.start]
        extended[s.start :] = stamps
        self.seq_stamps[s.seq_id] = extended
        if len(self.seq_stamps) > _MAX_SEQUENCES:
            del self.seq_stamps[next(iter(self.seq_stamps))]

    def _previous_stamp(self, s: SeqStep) -> np.uint64:
        """The stamp of the position before this step: the one that the sequence wrote, else (after
        a prefix hit) the one in the cache."""
        if s.start == 0:
            return np.uint64(0)
        known = self.seq_stamps.get(s.seq_id)
        if known is not None and len(known) >= s.start and known[s.start - 1]:
            return np.uint64(known[s.start - 1])
        last = np.array([s.start - 1])
        block = _blocks(s, 0, s.blocks[0], last // self.size)
        return np.uint64(self.stamps[0][block[0], int(last[0]) % self.size])

    def _verify(self, s: SeqStep, group: int) -> None:
        window = self.groups[group].window
        first = 0 if window is None else max(0, s.start - window + 1)
        positions = np.arange(first, s.end)
        blocks = _blocks(s, group, s.blocks[group], positions // self.size)
        stamps = self.stamps[group][blocks, positions % self.size]
        tokens = self.tokens[group][blocks, positions % self.size]
        good = stamps[1:] == _mix(stamps[:-1], tokens[1:], positions[1:])
        if first == 0:
            good = np.concatenate([[stamps[0] == _mix(np.uint64(0), tokens[0], np.int64(0))], good])
        else:
            good = np.concatenate([[stamps[0] != 0], good])
        own = self.seq_stamps[s.seq_id][first : s.end]
        good &= (own == 0) | (own == stamps)
        if not good.all():
            p = int(positions[np.argmin(good)])
            block = s.blocks[group][p // self.size]
            raise CacheFault(
                f"sequence {s.seq_id} would read position {p} of group {group} from block {block}, "
                "which is not its own"
            )


def _blocks(s: SeqStep, group: int, table: tuple[int, ...], index: NDArray[Any]) -> NDArray[Any]:
    if int(index.max()) >= len(table):
        raise CacheFault(
            f"sequence {s.seq_id} has {len(table)} blocks in group {group}, "
            f"its positions need {int(index.max()) + 1}"
        )
    blocks: NDArray[Any] = np.asarray(table, np.int64)[index]
    if blocks.min() < 0:
        raise CacheFault(f"sequence {s.seq_id} would use a released block of group {group}")
    return blocks


def _mix(
    previous: NDArray[Any] | np.uint64,
    token: NDArray[Any] | np.int64,
    position: NDArray[Any] | np.int64,
) -> NDArray[Any]:
    """A 64-bit hash (splitmix64's finaliser), never 0."""
    with np.errstate(over="ignore"):
        parts = (np.asarray(token).astype(np.uint64) << np.uint64(32)) ^ np.asarray(
            position
        ).astype(np.uint64)
        x: Any = (np.asarray(previous, np.uint64) ^ parts) + _WEYL
        x = (x ^ (x >> np.uint64(30))) * _MULTIPLY[0]
        x = (x ^ (x >> np.uint64(27))) * _MULTIPLY[1]
        return np.asarray((x ^ (x >> np.uint64(31))) | np.uint64(1))
