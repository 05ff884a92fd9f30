"""The canary: every slot of the cache remembers which tokens stand behind it, and each step proves what it is about to read.

A slot's stamp is a hash of all tokens up to its position: stamp(p) = mix(stamp(p - 1), token at p, p). So two sequences with the same
beginning may share a block (prefix cache, forks), and nothing else may: a block of another sequence, a block that was overwritten or
given away, a wrong order of blocks each break the chain. Stamps are kept for each group of layers and copied with the blocks.

What a sequence stamped itself is remembered as well, so that a whole table of somebody else's is noticed too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbatim.base.records import CacheGroup, SeqStep, StepPlan

_MULTIPLY = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_WEYL = np.uint64(0x9E3779B97F4A7C15)
_REMEMBERED = 4096  # sequences whose stamps are kept; the oldest is forgotten first


class CacheFault(AssertionError):
    """The plan would have read keys and values that are not this sequence's: a fault of the scheduler."""


class Canary:
    def __init__(self, groups: tuple[CacheGroup, ...], blocks: tuple[int, ...], size: int) -> None:
        self.groups, self.size = groups, size
        self.stamps = [
            np.zeros((n, size), np.uint64) for n in blocks
        ]  # 0: nothing was ever written here
        self.tokens = [np.zeros((n, size), np.int64) for n in blocks]
        self.own: dict[
            int, NDArray[Any]
        ] = {}  # seq_id -> stamps of positions 0, 1, …; 0 where unknown

    def step(self, plan: StepPlan) -> None:
        """Follow the plan's copies and writes, then verify all that it reads. Raises CacheFault."""
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
        before = self._before(s)
        stamps = np.zeros(len(s.tokens), np.uint64)
        for i, token in enumerate(s.tokens):
            before = np.uint64(_mix(before, np.int64(token), np.int64(s.start + i)))
            stamps[i] = before
        positions = np.arange(s.start, s.end)
        for group, table in enumerate(s.blocks):
            blocks = _blocks(s, group, table, positions // self.size)
            self.stamps[group][blocks, positions % self.size] = stamps
            self.tokens[group][blocks, positions % self.size] = s.tokens
        known = self.own.pop(s.seq_id, np.zeros(0, np.uint64))
        room = np.zeros(s.end, np.uint64)
        room[: min(len(known), s.start)] = known[: s.start]
        room[s.start :] = stamps
        self.own[s.seq_id] = room
        if len(self.own) > _REMEMBERED:
            del self.own[next(iter(self.own))]

    def _before(self, s: SeqStep) -> np.uint64:
        """The stamp of the position before this step: what the sequence itself wrote, else (a prefix hit) what the cache says."""
        if s.start == 0:
            return np.uint64(0)
        known = self.own.get(s.seq_id)
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
        own = self.own[s.seq_id][first : s.end]
        good &= (own == 0) | (own == stamps)
        if not good.all():
            p = int(positions[np.argmin(good)])
            block = s.blocks[group][p // self.size]
            raise CacheFault(
                f"sequence {s.seq_id} would read position {p} of group {group} from block {block}, which is not its own"
            )


def _blocks(s: SeqStep, group: int, table: tuple[int, ...], index: NDArray[Any]) -> NDArray[Any]:
    if int(index.max()) >= len(table):
        raise CacheFault(
            f"sequence {s.seq_id} has {len(table)} blocks in group {group}, its positions need {int(index.max()) + 1}"
        )
    blocks: NDArray[Any] = np.asarray(table, np.int64)[index]
    if blocks.min() < 0:
        raise CacheFault(
            f"sequence {s.seq_id} would use a block of group {group} that was released"
        )
    return blocks


def _mix(
    before: NDArray[Any] | np.uint64,
    token: NDArray[Any] | np.int64,
    position: NDArray[Any] | np.int64,
) -> NDArray[Any]:
    """A 64-bit hash (splitmix's finaliser), never 0."""
    with np.errstate(over="ignore"):
        parts = (np.asarray(token).astype(np.uint64) << np.uint64(32)) ^ np.asarray(
            position
        ).astype(np.uint64)
        x: Any = (np.asarray(before, np.uint64) ^ parts) + _WEYL
        x = (x ^ (x >> np.uint64(30))) * _MULTIPLY[0]
        x = (x ^ (x >> np.uint64(27))) * _MULTIPLY[1]
        return np.asarray((x ^ (x >> np.uint64(31))) | np.uint64(1))
