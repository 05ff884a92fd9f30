"""Block pool: reference counts of KV-cache blocks, the free list, and the prefix cache's LRU list.

One BlockPool serves one CacheGroup. A block is always in exactly one of three states:

    free     no table refers to it; its contents mean nothing
    used     `refs[block]` block-table entries refer to it
    cached   no table refers to it, but it holds a full block of a prefix, found by its hash;
             the least recently used one is evicted when the free list is empty

The pool holds block ids only; the backend owns the memory. `check` verifies the three states.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import compress

RECENT = 64  # evictions whose block ids are kept, for the Lens


class BlockPool:
    """`total` blocks of one cache group."""

    __slots__ = ("by_hash", "cached", "evicted", "evictions", "free", "hashes", "refs", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.refs = [0] * total  # references from block tables
        self.hashes: list[bytes | None] = [None] * total  # set for published blocks
        self.by_hash: dict[bytes, int] = {}
        # A stack: the block released last is still in the CPU's caches and is reused first.
        self.free = list(range(total - 1, -1, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.evictions = 0
        self.evicted: deque[int] = deque(maxlen=RECENT)  # blocks of the last evictions, newest last

    @property
    def available(self) -> int:
        return len(self.free) + len(self.cached)

    @property
    def used(self) -> int:
        return self.total - len(self.free) - len(self.cached)

    def allocate(self) -> int:
        """A block with one reference and no hash. The caller has checked `available`."""
        if self.free:
            block = self.free.pop()
        else:
            block, _ = self.cached.popitem(last=False)
            self._drop_hash(block)
            self.evictions += 1
            self.evicted.append(block)
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a used or cached block."""
        if self.refs[block] == 0:
            del self.cached[block]
        self.refs[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference. The last one moves the block to the LRU list, or to the free list."""
        self.refs[block] -= 1
        if self.refs[block] == 0:
            if self.hashes[block] is None:
                self.free.append(block)
            else:
                self.cached[block] = None

    def find(self, block_hash: bytes) -> int | None:
        return self.by_hash.get(block_hash)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Make a full, verified block available to prefix hits. When two sequences have computed
        the same block, the first stays published."""
        if block_hash not in self.by_hash and self.hashes[block] is None:
            self.by_hash[block_hash] = block
            self.hashes[block] = block_hash

    def unpublish(self, block_hash: bytes) -> None:
        """Withdraw a block from prefix hits. It is free once no table refers to it."""
        block = self.by_hash.get(block_hash)
        if block is not None:
            self._drop_hash(block)
            if self.refs[block] == 0:
                del self.cached[block]
                self.free.append(block)

    def evict_cached(self) -> int:
        """Evict every cached block. Returns the number of blocks freed."""
        dropped = len(self.cached)
        for block in self.cached:
            self._drop_hash(block)
            self.free.append(block)
        self.cached.clear()
        return dropped

    def _drop_hash(self, block: int) -> None:
        block_hash = self.hashes[block]
        if block_hash is not None:
            del self.by_hash[block_hash]
            self.hashes[block] = None

    def check(self, counts: dict[int, int]) -> None:
        """Verify the accounting. `counts`: references per block, found by walking all tables."""
        # Only calls that run in C visit all blocks: tests check after every step, and a pool has
        # thousands of them.
        blocks = range(self.total)
        free, cached, used = set(self.free), set(self.cached), set(compress(blocks, self.refs))
        ensure(len(free) == len(self.free), "a block is twice in the free list")
        ensure(
            free.isdisjoint(cached) and free.isdisjoint(used) and cached.isdisjoint(used),
            "a block is in two states at once",
        )
        ensure(
            len(free) + len(cached) + len(used) == self.total,
            f"free {len(free)} + cached {len(cached)} + used {len(used)} is not total {self.total}",
        )
        wrong = {
            b: (self.refs[b], counts.get(b, 0))
            for b in used | set(counts)
            if self.refs[b] != counts.get(b, 0)
        }
        ensure(not wrong, f"wrong reference counts (block: counted, in tables): {wrong}")
        hashed = set(compress(blocks, self.hashes))
        ensure(free.isdisjoint(hashed), "a free block has a hash")
        ensure(cached <= hashed, "a cached block has no hash")
        by_hash = {self.hashes[b]: b for b in hashed}
        ensure(by_hash == self.by_hash, "hashes and blocks do not match")


def ensure(condition: bool, message: str) -> None:
    """assert that also runs under `python -O`: corrupt block accounting must stop the engine."""
    if not condition:
        raise AssertionError(f"block accounting: {message}")
