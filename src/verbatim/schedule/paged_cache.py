"""The paged cache as the scheduler sees it: tables of sequences over the pools of all cache groups, and the prefixes
that can be shared.

A sequence and a wish come in ("room for n more positions"); its tables change, or the answer is no. Nothing here decides
who comes first.
"""

from __future__ import annotations

from verbatim.base.records import CacheGroup
from verbatim.schedule.blocks import BlockPool
from verbatim.schedule.prefix import PrefixChain
from verbatim.schedule.sequence import Sequence

Copies = list[tuple[int, int, int]]  # (group, from block, to block)


class PagedCache:
    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        blocks: tuple[int, ...],
        block_size: int,
        prefix: PrefixChain | None,
    ) -> None:
        self.groups = groups
        self.blocks = blocks
        self.pools = [BlockPool(n) for n in blocks]
        self.block_size = block_size
        self.prefix = prefix
        self.windows = [g.window for g in groups]
        self._windowed = any(w is not None for w in self.windows)

    def blocks_for(self, positions: int) -> int:
        return -(-positions // self.block_size)

    @property
    def available(self) -> int:
        return sum(pool.available for pool in self.pools)

    def scarce(self, running: int) -> bool:
        """Fewer blocks are left than one for each who runs."""
        return any(pool.available <= running for pool in self.pools)

    def make_room(self, seq: Sequence, n: int, copies: Copies) -> bool:
        """Blocks to write the next n positions: all of them, or False and nothing changed."""
        size = self.block_size
        first, need = seq.computed // size, (seq.computed + n - 1) // size + 1
        if self._windowed:
            self._release_behind(seq)
        grow = False
        for pool, table in zip(self.pools, seq.blocks, strict=True):
            more = need - len(table)
            if first < len(table) and pool.refs[table[first]] > 1:
                more = max(more, 0) + 1  # shared since a fork: whoever writes takes a copy
            if more > 0:
                if more > pool.available:
                    return False
                grow = True
        if grow:
            self._grow(seq, first, need, copies)
        return True

    def _grow(self, seq: Sequence, first: int, need: int, copies: Copies) -> None:
        seq.frozen = None
        for g, (pool, table) in enumerate(zip(self.pools, seq.blocks, strict=True)):
            if first < len(table) and pool.refs[table[first]] > 1:
                mine = pool.take()
                copies.append((g, table[first], mine))
                pool.release(table[first])
                table[first] = mine
            while len(table) < need:
                table.append(pool.take())

    def fitting(self, seq: Sequence) -> int:
        """How many positions could be written with the blocks at hand."""
        first, size = seq.computed // self.block_size, self.block_size
        most = []
        for pool, table in zip(self.pools, seq.blocks, strict=True):
            shared = first < len(table) and pool.refs[table[first]] > 1
            most.append((len(table) + pool.available - shared) * size - seq.computed)
        return min(most)

    def fits(self, seq: Sequence, running: int) -> bool:
        """A waiting sequence starts when all it knows fits, and one block for each who runs would still be left."""
        need = self.blocks_for(len(seq.tokens))
        for group, pool, table in zip(self.groups, self.pools, seq.blocks, strict=True):
            more = need - len(table)
            if group.window is not None:
                more = min(more, self._window_blocks(group.window))
            if more + running > pool.available:
                return False
        return True

    def needed(self, group: CacheGroup, positions: int) -> int:
        """Blocks that a lone sequence of this many computed positions must hold."""
        blocks = self.blocks_for(positions)
        return blocks if group.window is None else min(blocks, self._window_blocks(group.window))

    def _window_blocks(self, window: int) -> int:
        """Blocks that the positions p-window+1 … p can touch, wherever p is."""
        return -(-(window - 1) // self.block_size) + 1

    def _release_behind(self, seq: Sequence) -> None:
        """Give back the blocks that no position from `computed` on can see."""
        for g, window in enumerate(self.windows):
            if window is None:
                continue
            table, pool = seq.blocks[g], self.pools[g]
            gone = min(max(seq.computed - window + 1, 0) // self.block_size, len(table))
            for i in range(seq.released[g], gone):
                pool.release(table[i])
                table[i] = -1
                seq.frozen = None
            seq.released[g] = max(seq.released[g], gone)

    def release_all(self, seq: Sequence) -> None:
        """Blocks go back last first, so that of a cached prefix the end is the first to be evicted."""
        for pool, table in zip(self.pools, seq.blocks, strict=True) if seq.blocks else ():
            for block in reversed(table):
                if block >= 0:
                    pool.release(block)
        seq.blocks = [[] for _ in self.pools]
        seq.released = [0] * len(self.pools)
        seq.frozen = None
        seq.computed = seq.published = 0

    def reuse_prefix(self, seq: Sequence) -> None:
        """Raise `computed` for free: the longest run of full blocks that are still in the cache. The last known token is
        always computed, since its logits are needed. A windowed group needs only the blocks that the next position can
        see."""
        self.release_all(seq)
        if self.prefix is None or not seq.reuse or seq.unscored:
            return
        if not seq.root:
            seq.root = self.prefix.root(seq.salt)
        k, lows = self._longest_hit(seq, (len(seq.tokens) - 1) // self.block_size)
        for g, pool in enumerate(self.pools):
            table = [-1] * lows[g]
            for name in seq.names[lows[g] : k]:
                block = pool.by_name[name]
                pool.share(block)
                table.append(block)
            seq.blocks[g], seq.released[g] = table, lows[g]
        seq.computed = k * self.block_size
        seq.published = k

    def _longest_hit(self, seq: Sequence, most: int) -> tuple[int, list[int]]:
        """(blocks k, for each group the first one it needs)."""
        prefix = self.prefix
        assert prefix is not None
        full = [
            pool for pool, window in zip(self.pools, self.windows, strict=True) if window is None
        ]
        k = 0 if full else most
        prefix.extend(seq.names, seq.root, seq.tokens, k)
        while full and k < most:
            prefix.extend(seq.names, seq.root, seq.tokens, k + 1)
            if any(seq.names[k] not in pool.by_name for pool in full):
                break
            k += 1
        while True:
            lows = [
                0 if w is None else max(k * self.block_size - w + 1, 0) // self.block_size
                for w in self.windows
            ]
            gap = -1  # the last block that is needed and missing: no hit can reach beyond it
            for pool, low in zip(self.pools, lows, strict=True):
                gap = max(
                    gap,
                    next(
                        (i for i in range(k - 1, low - 1, -1) if seq.names[i] not in pool.by_name),
                        -1,
                    ),
                )
            if gap < 0:
                return k, lows
            k = gap

    def share(self, parent: Sequence, child: Sequence) -> None:
        """The child reads the parent's blocks as far as they are computed; whoever writes first into a shared one copies it."""
        keep = self.blocks_for(parent.computed)
        child.blocks = [table[:keep] for table in parent.blocks]
        for pool, table in zip(self.pools, child.blocks, strict=True):
            for block in table:
                if block >= 0:
                    pool.share(block)
        child.released = parent.released[:]
        child.names, child.root, child.published = parent.names[:], parent.root, parent.published
        child.computed = parent.computed
        child.frozen = None

    def publish(self, seq: Sequence) -> None:
        """Name the blocks that are full and verified, so that others can use them."""
        full = seq.computed // self.block_size
        if self.prefix is None or full <= seq.published:
            return
        if not seq.root:
            seq.root = self.prefix.root(seq.salt)
        self.prefix.extend(seq.names, seq.root, seq.tokens, full)
        for pool, table in zip(self.pools, seq.blocks, strict=True):
            for i in range(seq.published, full):
                if table[i] >= 0:
                    pool.publish(table[i], seq.names[i])
        seq.published = full

    def trim(self, seq: Sequence) -> None:
        """Blocks that held only rejected drafts go back."""
        keep = self.blocks_for(len(seq.tokens))
        for pool, table in zip(self.pools, seq.blocks, strict=True):
            while len(table) > keep:
                pool.release(table.pop())
                seq.frozen = None
