"""Cache blocks as integers: who holds which, which are free, and which still hold a prefix that may be used again.

One BlockPool serves one CacheGroup. A block is always in exactly one of three states:

    free     nobody refers to it, its contents mean nothing
    used     `refs[block]` table entries refer to it
    cached   nobody refers to it, but it holds a full, named block of some prefix;
             the least recently used is taken when free runs out

The memory behind a block belongs to the backend; here is only the accounting, and `check` proves it.
"""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """`total` blocks of one group. Counts are references from block tables."""

    __slots__ = ("by_name", "cached", "evictions", "free", "names", "refs", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.refs = [0] * total
        self.names: list[bytes | None] = [None] * total
        self.by_name: dict[bytes, int] = {}
        self.free = list(
            range(total - 1, -1, -1)
        )  # a stack: low ids first, and the last one freed is the first taken, still warm
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.evictions = 0

    @property
    def available(self) -> int:
        return len(self.free) + len(self.cached)

    @property
    def used(self) -> int:
        return self.total - len(self.free) - len(self.cached)

    def take(self) -> int:
        """A block with one reference and no name. The caller has made sure that one is available."""
        if self.free:
            block = self.free.pop()
        else:
            block, _ = self.cached.popitem(last=False)
            self._forget(block)
            self.evictions += 1
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more table refers to a block that is used or cached."""
        if self.refs[block] == 0:
            del self.cached[block]
        self.refs[block] += 1

    def release(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block] == 0:
            if self.names[block] is None:
                self.free.append(block)
            else:
                self.cached[block] = None

    def find(self, name: bytes) -> int | None:
        return self.by_name.get(name)

    def publish(self, block: int, name: bytes) -> None:
        """The block is full and verified: others may use it. Where two sequences computed the same block, the first
        one's is kept."""
        if name not in self.by_name and self.names[block] is None:
            self.by_name[name] = block
            self.names[block] = name

    def forget_cached(self) -> int:
        """Drop every prefix that nobody uses at the moment. Returns how many blocks became free."""
        dropped = len(self.cached)
        for block in self.cached:
            self._forget(block)
            self.free.append(block)
        self.cached.clear()
        return dropped

    def _forget(self, block: int) -> None:
        name = self.names[block]
        if name is not None:
            del self.by_name[name]
            self.names[block] = None

    def check(self, counts: dict[int, int]) -> None:
        """`counts`: references found by walking every block table."""
        free, cached = set(self.free), set(self.cached)
        used = {b for b in range(self.total) if self.refs[b] > 0}
        prove(len(free) == len(self.free), "a block is twice in the free list")
        prove(
            not free & cached and not free & used and not cached & used,
            "a block is in two states at once",
        )
        prove(
            len(free) + len(cached) + len(used) == self.total,
            f"free {len(free)} + cached {len(cached)} + used {len(used)} is not total {self.total}",
        )
        wrong = {
            b: (self.refs[b], counts.get(b, 0))
            for b in range(self.total)
            if self.refs[b] != counts.get(b, 0)
        }
        prove(not wrong, f"counts differ from the tables (block: counted, in tables): {wrong}")
        prove(all(self.names[b] is None for b in free), "a free block has a name")
        prove(all(self.names[b] is not None for b in cached), "a cached block has no name")
        named = {b: n for b, n in enumerate(self.names) if n is not None}
        prove({n: b for b, n in named.items()} == self.by_name, "names and blocks do not match")


def prove(truth: bool, message: str) -> None:
    """assert that stays on under `python -O`: a broken cache must never go unnoticed in production."""
    if not truth:
        raise AssertionError(f"block accounting: {message}")
