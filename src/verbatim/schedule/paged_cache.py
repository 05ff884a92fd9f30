"""Paged KV cache: block tables of sequences over the block pools, and prefix hits.

In: a sequence and a request for blocks or a prefix. Out: its tables change, or False and
nothing changes. The scheduler decides which sequence is served first.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from verbatim.base.records import CacheGroup
from verbatim.schedule.block_store import BlockStore
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
        store: BlockStore | None = None,
    ) -> None:
        self.groups = groups
        self.blocks = blocks
        self.pools = [BlockPool(n) for n in blocks]
        self.block_size = block_size
        self.prefix = prefix
        self.store = store  # blocks outside the pools: the disk cache
        self.windows = [g.window for g in groups]
        self.windowed = any(w is not None for w in self.windows)

    def set_prefix_key(self, key: bytes) -> None:
        """Hash blocks with this key instead of a random one: engines with one key agree on the
        hash of a prefix. Called before the first request."""
        if self.prefix is not None:
            self.prefix = PrefixChain(self.block_size, key)

    def prefix_hashes(self, limit: int) -> list[bytes]:
        """The hashes of at most `limit` blocks that a prefix hit can use, newest first. Groups
        with a window keep only the end of a prefix, so a group without one is asked if any."""
        full = [pool for pool, window in zip(self.pools, self.windows, strict=True) if not window]
        hashes = reversed((full or self.pools)[0].by_hash)
        return list(itertools.islice(hashes, limit))

    def blocks_for(self, positions: int) -> int:
        return -(-positions // self.block_size)

    def hash_group(self, seq: Sequence) -> int:
        """KV blocks that are published together: the keys of a diffusion block depend on all of its
        tokens."""
        return 1 if seq.canvas is None else seq.canvas.hash_group(self.block_size)

    def whole_groups(self, seq: Sequence, positions: int) -> int:
        """Blocks of the first `positions` that can be published."""
        group = self.hash_group(seq)
        return positions // self.block_size // group * group

    @property
    def available(self) -> int:
        return sum(pool.available for pool in self.pools)

    def low_on_blocks(self, running: int) -> bool:
        """At most one free block per running sequence is left in some group."""
        return any(pool.available <= running for pool in self.pools)

    def allocate(self, seq: Sequence, n: int, copies: Copies) -> bool:
        """Allocate blocks for the next n positions. False: too few are free, and no block was
        allocated. Copies of shared blocks are appended to `copies`."""
        size = self.block_size
        first, need = seq.computed // size, (seq.computed + n - 1) // size + 1
        if self.windowed:
            self._release_outside_window(seq)
        grow = False
        for pool, table in zip(self.pools, seq.blocks, strict=True):
            more = need - len(table)
            if first < len(table) and pool.refs[table[first]] > 1:
                more = max(more, 0) + 1  # shared since a fork: copy on write
            if more > 0:
                if more > pool.available:
                    return False
                grow = True
        if grow:
            self._append_blocks(seq, first, need, copies)
        return True

    def _append_blocks(self, seq: Sequence, first: int, need: int, copies: Copies) -> None:
        """Extend the tables to `need` blocks; copy block `first` where it is shared."""
        seq.frozen_blocks = None
        for g, (pool, table) in enumerate(zip(self.pools, seq.blocks, strict=True)):
            if first < len(table) and pool.refs[table[first]] > 1:
                copy = pool.allocate()
                copies.append((g, table[first], copy))
                pool.release(table[first])
                table[first] = copy
            while len(table) < need:
                table.append(pool.allocate())

    def max_positions(self, seq: Sequence, others: Iterable[Sequence] = ()) -> int:
        """Positions that the sequence could compute with its own and all available blocks. In
        groups with a window, a block stays free for each of `others` that may need one."""
        self._release_outside_window(seq)
        first, size = seq.computed // self.block_size, self.block_size
        limits = []
        for g, (pool, table) in enumerate(zip(self.pools, seq.blocks, strict=True)):
            shared = first < len(table) and pool.refs[table[first]] > 1
            spare = 0 if self.windows[g] is None else self._growing(g, others)
            free = max(pool.available - shared - spare, 0)
            limits.append((len(table) + free) * size - seq.computed)
        return min(limits)

    def can_admit(
        self, seq: Sequence, running: Iterable[Sequence], freed: Iterable[Sequence] = ()
    ) -> bool:
        """All known tokens of a waiting sequence fit, with one block left per running sequence that
        may need one. `freed`: sequences that would be preempted first."""
        need = self.blocks_for(seq.span)
        for g, (pool, table) in enumerate(zip(self.pools, seq.blocks, strict=True)):
            more, window = need - len(table), self.windows[g]
            if window is not None:  # a prefix hit holds a part of the window
                more = min(more, self._window_blocks(window) - _held(seq, g))
            refs = Counter(block for other in freed for block in other.blocks[g] if block >= 0)
            available = pool.available + sum(pool.refs[block] == n for block, n in refs.items())
            if more + self._growing(g, running) > available:
                return False
        return True

    def _growing(self, group: int, sequences: Iterable[Sequence]) -> int:
        """How many of these sequences may need one more block than they hold: all of them, or those
        without a whole window."""
        window = self.windows[group]
        if window is None:
            return sum(1 for _ in sequences)
        whole = self._window_blocks(window)
        return sum(_held(seq, group) < whole for seq in sequences)

    def held(self, seq: Sequence) -> int:
        """Blocks of a running sequence in all groups."""
        return sum(map(len, seq.blocks)) - sum(seq.released)

    def needed(self, seq: Sequence) -> int:
        """Blocks of all groups that the known tokens of a sequence take."""
        return sum(self.blocks_needed(group, seq.span) for group in self.groups)

    def blocks_needed(self, group: CacheGroup, positions: int) -> int:
        """Blocks that a sequence of this many computed positions holds in one group."""
        blocks = self.blocks_for(positions)
        return blocks if group.window is None else min(blocks, self._window_blocks(group.window))

    def _window_blocks(self, window: int) -> int:
        """The most blocks that positions p-window+1 … p can touch, over all p."""
        return -(-(window - 1) // self.block_size) + 1

    def _release_outside_window(self, seq: Sequence) -> None:
        """Release the blocks that no position from `computed` on attends to."""
        for g, window in enumerate(self.windows):
            if window is None:
                continue
            table, pool = seq.blocks[g], self.pools[g]
            end = min(max(seq.computed - window + 1, 0) // self.block_size, len(table))
            for i in range(seq.released[g], end):
                pool.release(table[i])
                table[i] = -1
                seq.frozen_blocks = None
            seq.released[g] = max(seq.released[g], end)

    def release_all(self, seq: Sequence) -> None:
        """Release every block and reset `computed`. Last block first: the LRU order then evicts the
        end of a cached prefix before its start."""
        for pool, table in zip(self.pools, seq.blocks, strict=True) if seq.blocks else ():
            for block in reversed(table):
                if block >= 0:
                    pool.release(block)
        seq.blocks = [[] for _ in self.pools]
        seq.released = [0] * len(self.pools)
        seq.frozen_blocks = None
        seq.computed = seq.published = 0

    def reuse_prefix(self, seq: Sequence) -> None:
        """Prefix hit: set `computed` to the longest cached run of full blocks. The last known token
        is never part of it, since its logits are needed. A windowed group needs only the blocks
        that the next position attends to."""
        self.release_all(seq)
        if self.prefix is None or not seq.reuse or seq.unscored:
            return
        if not seq.root:
            seq.root = self.prefix.root(seq.salt)
        if seq.canvas is None:
            max_blocks = (len(seq.tokens) - 1) // self.block_size
        else:  # the block in progress is computed in any case
            max_blocks = self.whole_groups(seq, seq.canvas.start)
        hit = self._longest_hit(seq, max_blocks, self.store)
        if self.store is not None and not self._load_missing(seq, *hit):
            hit = self._longest_hit(seq, max_blocks, None)
        k, firsts = hit
        for g, pool in enumerate(self.pools):
            table = [-1] * firsts[g]
            for block_hash in seq.hashes[firsts[g] : k]:
                block = pool.by_hash[block_hash]
                pool.share(block)
                table.append(block)
            seq.blocks[g], seq.released[g] = table, firsts[g]
        seq.computed = k * self.block_size
        seq.published = k
        self._save_prompt(seq, firsts, k)

    def _load_missing(self, seq: Sequence, k: int, firsts: list[int]) -> bool:
        """Load the blocks of a hit that are only in the store. They are cached afterwards, as if
        a sequence had just released them. False: not all could be loaded."""
        assert self.store is not None
        held: list[tuple[BlockPool, int]] = []  # referenced, so that no allocation evicts them
        complete = True
        for g, pool in enumerate(self.pools):
            for block_hash in seq.hashes[firsts[g] : k]:
                block = pool.by_hash.get(block_hash)
                if block is not None:
                    pool.share(block)
                elif complete and pool.available:
                    block = pool.allocate()
                    complete = self.store.load(g, block_hash, block)
                    if complete:
                        pool.publish(block, block_hash)
                else:
                    complete = False
                    continue
                held.append((pool, block))
        for pool, block in reversed(held):
            pool.release(block)
        return complete

    def _save_prompt(self, seq: Sequence, firsts: list[int], end: int) -> None:
        """Store the blocks of the prompt from index `firsts` of each group to `end`."""
        if self.store is None:
            return
        end = min(end, seq.prompt_len // self.block_size)
        for g, table in enumerate(seq.blocks):
            for i in range(firsts[g], end):
                if table[i] >= 0:
                    self.store.save(g, seq.hashes[i], table[i])

    def _longest_hit(
        self, seq: Sequence, max_blocks: int, store: BlockStore | None
    ) -> tuple[int, list[int]]:
        """(blocks hit, per group the index of the first block it needs)."""

        def missing(group: int, block_hash: bytes) -> bool:
            return block_hash not in self.pools[group].by_hash and (
                store is None or not store.has(group, block_hash)
            )

        prefix = self.prefix
        assert prefix is not None
        full = [g for g, window in enumerate(self.windows) if window is None]
        k = 0 if full else max_blocks
        step = self.hash_group(seq)
        prefix.extend(seq.hashes, seq.root, seq.tokens, k, step)
        while full and k < max_blocks:
            prefix.extend(seq.hashes, seq.root, seq.tokens, k + step, step)
            if any(missing(g, h) for g in full for h in seq.hashes[k : k + step]):
                break
            k += step
        while True:
            firsts = [
                0 if w is None else max(k * self.block_size - w + 1, 0) // self.block_size
                for w in self.windows
            ]
            gap = -1  # last needed block that is not cached: the prefix hit must end before it
            for g, first in enumerate(firsts):
                absent = (i for i in range(k - 1, first - 1, -1) if missing(g, seq.hashes[i]))
                gap = max(gap, next(absent, -1))
            if gap < 0:
                return k, firsts
            k = gap

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares the parent's computed blocks. The first to write into a shared block
        copies it (see allocate)."""
        keep = self.blocks_for(parent.computed)
        child.blocks = [table[:keep] for table in parent.blocks]
        for pool, table in zip(self.pools, child.blocks, strict=True):
            for block in table:
                if block >= 0:
                    pool.share(block)
        child.released = parent.released[:]
        child.hashes, child.root, child.published = parent.hashes[:], parent.root, parent.published
        child.computed, child.cached_tokens = parent.computed, parent.cached_tokens
        child.frozen_blocks = None

    def publish(self, seq: Sequence) -> None:
        """Publish the sequence's full blocks to the prefix cache. The steps of a prompt before its
        last compute no logits, so blocks with NaN are withdrawn later, by unpublish()."""
        full = self.whole_groups(seq, seq.computed)
        if self.prefix is None or full <= seq.published:
            return
        if not seq.root:
            seq.root = self.prefix.root(seq.salt)
        self.prefix.extend(seq.hashes, seq.root, seq.tokens, full, self.hash_group(seq))
        for pool, table in zip(self.pools, seq.blocks, strict=True):
            for i in range(seq.published, full):
                if table[i] >= 0:
                    pool.publish(table[i], seq.hashes[i])
        self._save_prompt(seq, [seq.published] * len(self.pools), full)
        seq.published = full

    def unpublish(self, seq: Sequence) -> None:
        """Withdraw the blocks that the sequence has published: their values are not finite. Blocks
        that other sequences have computed stay."""
        if not seq.blocks:  # never admitted
            return
        for g, (pool, table) in enumerate(zip(self.pools, seq.blocks, strict=True)):
            for i in range(seq.cached_tokens // self.block_size, len(seq.hashes)):
                own = table[i] if i < len(table) else -1  # -1: released, or never allocated
                if own in (-1, pool.find(seq.hashes[i])):
                    pool.unpublish(seq.hashes[i])
                    if self.store is not None:
                        self.store.drop(g, seq.hashes[i])

    def trim(self, seq: Sequence) -> None:
        """Release the blocks that held only rejected drafts."""
        keep = self.blocks_for(len(seq.tokens))
        for pool, table in zip(self.pools, seq.blocks, strict=True):
            while len(table) > keep:
                pool.release(table.pop())
                seq.frozen_blocks = None


def _held(seq: Sequence, group: int) -> int:
    """Blocks of the sequence in one group."""
    return len(seq.blocks[group]) - seq.released[group]
