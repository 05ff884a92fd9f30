"""Prompt lookup: draft what followed the latest earlier occurrence of the last n tokens.

In: a sequence's tokens. Out: the continuation of the longest n-gram match. Copying, quoting,
editing, lists and JSON repeat their context, so many tokens are accepted at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.speculate.proposer import Draft, SeqView

MAX_NGRAM, MIN_NGRAM = 5, 2  # tokens; match lengths that are tried, longest first


class _Index:
    """Per n-gram, where it ended last (`last`) and the time before (`before`). Grows with the
    sequence; each token costs a few dictionary writes."""

    __slots__ = ("before", "last", "seen")

    def __init__(self) -> None:
        self.seen = 0
        self.last: list[dict[tuple[int, ...], int]] = [{} for _ in range(MAX_NGRAM + 1)]
        self.before: list[dict[tuple[int, ...], int]] = [{} for _ in range(MAX_NGRAM + 1)]

    def grow(self, tokens: Sequence[int]) -> None:
        for end in range(self.seen + 1, len(tokens) + 1):
            for n in range(MIN_NGRAM, MAX_NGRAM + 1):
                if end < n:
                    break
                gram = tuple(tokens[end - n : end])
                earlier = self.last[n].get(gram)
                if earlier is not None:
                    self.before[n][gram] = earlier
                self.last[n][gram] = end
        self.seen = len(tokens)

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(end of the earlier match, its length); (0, 0) if the last tokens did not occur
        before."""
        for n in range(min(MAX_NGRAM, len(tokens) - 1), MIN_NGRAM - 1, -1):
            at = self.before[n].get(tuple(tokens[-n:]))
            if at is not None:
                return at, n
        return 0, 0


class NgramProposer:
    name = "ngram"
    token_cost = 0.0
    states_probs = False

    def __init__(self) -> None:
        self._index: dict[int, _Index] = {}

    def propose(self, views: Sequence[SeqView], limit: int, floor: float = 0.0) -> dict[int, Draft]:
        out: dict[int, Draft] = {}
        for view in views:
            index = self._index.get(view.seq_id)
            if index is None or index.seen > len(view.tokens):
                index = self._index[view.seq_id] = _Index()
            index.grow(view.tokens)
            at, n = index.find(view.tokens)
            if n:
                draft = unroll(view.tokens, at, min(limit, view.max_drafts))
                if draft:
                    out[view.seq_id] = Draft(draft, self.name, n)
        return out

    def finish(self, view: SeqView) -> None:
        self._index.pop(view.seq_id, None)

    def close(self) -> None:
        self._index.clear()


def unroll(tokens: Sequence[int], at: int, count: int) -> tuple[int, ...]:
    """The `count` tokens after position `at`; past the end the sequence repeats itself.

    >>> unroll([1, 2, 3, 1, 2], 2, 5)
    (3, 1, 2, 3, 1)
    """
    found = tuple(tokens[at : at + count])
    if len(found) < count:
        found = (found * (count // len(found) + 1))[:count]
    return found
