"""Where KV blocks are kept outside the block pools: the interface that PagedCache uses.

engine.loading.disk_cache implements it with files. Blocks are found by cache group and block
hash, as in the prefix cache.
"""

from __future__ import annotations

from typing import Protocol


class BlockStore(Protocol):
    def has(self, group: int, block_hash: bytes) -> bool: ...

    def load(self, group: int, block_hash: bytes, block: int) -> bool:
        """Copy a stored block into `block` of the KV cache. False: it is gone or damaged; `has` is
        then false from now on."""

    def save(self, group: int, block_hash: bytes, block: int) -> None:
        """Store the contents of `block`, unless they are stored already."""

    def drop(self, group: int, block_hash: bytes) -> None:
        """Delete a stored block, if it is there."""
