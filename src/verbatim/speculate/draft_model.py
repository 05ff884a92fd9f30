"""Speculative decoding with a smaller model of the same vocabulary.

In: the tokens of sequences. Out: the draft model's continuation, drawn with the target's parameters
and noise key (cached_proposer.py).

The draft model has its own backend, KV cache and context limit; beyond that limit it drafts
nothing. The KV cache is reused for the longest prefix that still matches the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.backend.protocol import Backend
from verbatim.base.records import Drawn
from verbatim.speculate.cached_proposer import CachedProposer
from verbatim.speculate.proposer import SeqView

CHUNK = 512  # prompt tokens per step of the draft model


class DraftProposer(CachedProposer):
    name = "draft"
    what = "draft model"

    def __init__(self, backend: Backend, blocks: int) -> None:
        super().__init__(backend, blocks)
        self._context = backend.spec.context
        self._cached: dict[int, list[int]] = {}  # seq_id -> tokens whose KV is in the cache

    def _reserve_for(self, view: SeqView, limit: int, in_use: set[int]) -> int:
        # + 1: the last drafted token is never computed.
        count = min(limit, self._context + 1 - len(view.tokens))
        if count < 1:
            self._release(view.seq_id)
            return 0
        if not self._reserve(view.seq_id, len(view.tokens) + count, in_use):
            return 0
        self._cached.setdefault(view.seq_id, [])
        return count

    def _evicted(self, seq_id: int) -> None:
        self._cached.pop(seq_id, None)

    def _catch_up(self, views: Sequence[SeqView]) -> None:
        """Prefill all known tokens but the last, which the first draw computes."""
        for view in views:
            cached = self._cached[view.seq_id]
            del cached[_common_prefix(cached, view.tokens) :]
            while len(view.tokens) - 1 - len(cached) > 0:
                start = len(cached)
                chunk = tuple(view.tokens[start : min(start + CHUNK, len(view.tokens) - 1)])
                self._execute((self._sequence(view, chunk, start),))
                cached.extend(chunk)

    def _draw(self, views: Sequence[SeqView], drafts: dict[int, list[int]]) -> list[Drawn]:
        steps = []
        for view in views:
            so_far = drafts.get(view.seq_id, [])
            last = so_far[-1] if so_far else view.tokens[-1]
            start = len(view.tokens) - 1 + len(so_far)
            steps.append(self._sequence(view, (last,), start, self._spec(view, so_far)))
            self._cached[view.seq_id][start:] = [last]
        return [result.drawn[0] for result in self._execute(steps)]


def _common_prefix(computed: Sequence[int], known: Sequence[int]) -> int:
    """Length of the common prefix, without the last known token: it must be computed again to
    get the logits of the next token."""
    count = min(len(computed), len(known) - 1)
    if list(computed[:count]) == list(known[:count]):
        return count
    return next(i for i in range(count) if computed[i] != known[i])
