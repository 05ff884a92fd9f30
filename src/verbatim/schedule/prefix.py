"""Block hashes of the prefix cache: token ids in, one hash per full block out.

A block's hash is keyed and covers the hash before it, so one hash identifies a whole prefix:

    hash[i] = blake2b(hash[i-1] + tokens of block i, key)        hash[-1] = blake2b(salt, key)

The key is random per engine and the salt is the tenant's. A client therefore can neither construct
a collision nor learn another tenant's prompts from the timing of prefix hits.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b


def prefix_salt(tenant: str, cache_salt: str, adapter: str = "") -> str:
    """The salt of a request's block hashes. `adapter` identifies a LoRA adapter: keys and values
    depend on it, so prefixes are never shared across adapters."""
    return "\0".join((*([f"adapter {adapter}"] if adapter else []), tenant, cache_salt))


class PrefixChain:
    __slots__ = ("_key", "block_size")

    def __init__(self, block_size: int, key: bytes | None = None) -> None:
        self.block_size = block_size
        self._key = secrets.token_bytes(32) if key is None else key

    def root(self, salt: str) -> bytes:
        return blake2b(salt.encode(), digest_size=16, key=self._key, person=b"root").digest()

    def block_hash(self, before: bytes, tokens: Sequence[int]) -> bytes:
        return blake2b(
            before + array("q", tokens).tobytes(), digest_size=16, key=self._key
        ).digest()

    def extend(
        self, hashes: list[bytes], root: bytes, tokens: Sequence[int], blocks: int, group: int = 1
    ) -> None:
        """Append to `hashes` until it has `blocks` entries. Each hash covers all tokens of its
        group of blocks: in a diffusion block keys depend on later tokens, too."""
        size = self.block_size
        for i in range(len(hashes), blocks):
            before = hashes[-1] if hashes else root
            if group > 1 and i % group == 0:
                before = self.block_hash(before, tokens[i * size : (i + group) * size])
            hashes.append(self.block_hash(before, tokens[i * size : (i + 1) * size]))
