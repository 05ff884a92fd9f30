"""DRY's sequence breakers: strings and a tokenizer in, ids and runs of ids out.

A token is a breaker when its bytes contain one of the strings, so "\\n" covers ".\\n" and "\\n\\n".
A string that no single token contains is matched as the run of ids that it is encoded to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class VocabBytes(Protocol):
    @property
    def vocab_size(self) -> int: ...
    def token_bytes(self, token: int) -> bytes: ...
    def encode(self, text: str, *, special: bool = False) -> list[int]: ...


def breakers_of(strings: Sequence[str], tokenizer: VocabBytes) -> tuple[tuple[int, ...], ...]:
    """DrawSpec.breakers of a request. Walks the vocabulary: call it once per request with DRY."""
    wanted = [s.encode() for s in strings]
    missing = set(wanted)
    out: list[tuple[int, ...]] = []
    for token in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(token)
        hits = [w for w in wanted if w in data]
        if hits:
            out.append((token,))
            missing.difference_update(hits)
    for text in strings:
        if text.encode() in missing:
            run = tuple(tokenizer.encode(text))
            if run:
                out.append(run)
    return tuple(out)
