"""The prefix chain: token ids come in, the name of each full block goes out.

A block's name is a keyed hash of the name before it and of its own tokens, so one name stands for a whole prefix:

    name[i] = blake2b(name[i-1] + tokens of block i, key)        name[-1] = blake2b(salt, key)

The key is random for each engine and the salt is the tenant's, so nobody can make two prefixes collide on purpose, nor
learn by timing what another tenant has asked.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b


class PrefixChain:
    __slots__ = ("_key", "block_size")

    def __init__(self, block_size: int, key: bytes | None = None) -> None:
        self.block_size = block_size
        self._key = secrets.token_bytes(32) if key is None else key

    def root(self, salt: str) -> bytes:
        return blake2b(salt.encode(), digest_size=16, key=self._key, person=b"root").digest()

    def name(self, before: bytes, tokens: Sequence[int]) -> bytes:
        return blake2b(
            before + array("q", tokens).tobytes(), digest_size=16, key=self._key
        ).digest()

    def extend(self, names: list[bytes], root: bytes, tokens: Sequence[int], blocks: int) -> None:
        """Grow `names` until it has `blocks` entries."""
        size = self.block_size
        for i in range(len(names), blocks):
            names.append(self.name(names[-1] if names else root, tokens[i * size : (i + 1) * size]))
