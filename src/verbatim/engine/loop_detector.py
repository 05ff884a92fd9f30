"""Loop detector: output tokens come in; the length of the n-gram that repeats at their end goes
out.

An output loops in one of two cases:

- Its last max(64, 4 n) tokens repeat one n-gram, n at most 64. So "-----" needs 64 tokens, and a
  paragraph of 50 tokens must occur four times in a row: rulers and table edges do not count,
  degenerate repetition does.
- Its last 256 tokens contain nothing new: nine tenths of their 12-grams occurred at least twice
  before. So a JSON object whose members return in turn with one of a few values is a loop without
  a period. A list with a counter or a name per row is none, and neither is a program that is
  printed a second time with changes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from verbatim.base.records import STALE_LOOP

MIN_TOKENS = 64  # minimum length of a loop, in tokens; longer than any ruler or table edge
MIN_REPEATS = 4  # occurrences of the n-gram
MAX_NGRAM = 64  # tokens
TAIL = 16  # tokens that the quick test searches for; any loop repeats at least this many
# Tokens between checks. Counted in tokens of the output, so that the position where a loop is found
# does not depend on step boundaries or drafts.
INTERVAL = 16
# The second case. Of 160 files of this repository (code, data, prose) none is a loop within 2,500
# tokens. Of nine random tables two are taken for a loop, with STALE_DISTINCT = 64: records without
# an id, drawn from 16 possible ones, after 576 tokens; rows of a week's plan, drawn from 42, after
# 1,920.
STALE_NGRAM = 12  # tokens
STALE_SHARE = 0.9  # fraction of the 12-grams of the last STALE_LOOP tokens
STALE_EARLIER = 2  # occurrences before
STALE_DISTINCT = 96  # at most so many different tokens; 256 tokens of prose have more
STALE_HISTORY = 2048  # tokens in which occurrences are counted
STALE_INTERVAL = 64  # tokens between checks


def loop_length(tokens: Sequence[int]) -> int:
    """n, if `tokens` end in a loop of an n-gram; else 0.

    The Knuth-Morris-Pratt border table of the reversed tail gives the shortest period of every
    suffix in one pass.

    >>> loop_length([9, 9] + [1, 2, 3] * 22), loop_length([1, 2, 3] * 20)
    (3, 0)
    """
    if not _repeats(tokens[-MAX_NGRAM - TAIL :]):
        return 0
    tail = list(tokens[: -(MAX_NGRAM * MIN_REPEATS) - 1 : -1])
    border = [0] * len(tail)
    k = 0
    for i in range(1, len(tail)):
        while k and tail[i] != tail[k]:
            k = border[k - 1]
        if tail[i] == tail[k]:
            k += 1
        border[i] = k
        length = i + 1
        period = length - k
        if period <= MAX_NGRAM and length >= max(MIN_TOKENS, MIN_REPEATS * period):
            return period
    return 0


def _repeats(tokens: Sequence[int]) -> bool:
    """Quick test with one memory search: do the last TAIL tokens also occur up to MAX_NGRAM tokens
    earlier? Almost never, so the exact test rarely runs."""
    data = array("i", tokens).tobytes()
    return data.find(data[-4 * TAIL :]) < len(data) - 4 * TAIL


def is_stale(tokens: Sequence[int]) -> bool:
    """Whether the last STALE_LOOP tokens only repeat what came before."""
    if len(tokens) <= STALE_LOOP or len(set(tokens[-STALE_LOOP:])) > STALE_DISTINCT:
        return False
    tail = tokens[-STALE_HISTORY:]
    grams = list(zip(*(tail[i:] for i in range(STALE_NGRAM)), strict=False))
    seen = Counter(grams[:-STALE_LOOP])
    known = 0
    for gram in grams[-STALE_LOOP:]:
        known += seen[gram] >= STALE_EARLIER
        seen[gram] += 1
    return known >= STALE_SHARE * STALE_LOOP


class LoopDetector:
    """Checks the output of one choice after each token; `length` is the n of the last loop found,
    or STALE_LOOP."""

    __slots__ = ("length",)

    def __init__(self) -> None:
        self.length = 0

    def look(self, tokens: Sequence[int]) -> bool:
        """True when a loop ends at the last token."""
        if len(tokens) % INTERVAL or len(tokens) < MIN_TOKENS:
            return False
        found = loop_length(tokens)
        if not found and len(tokens) % STALE_INTERVAL == 0 and is_stale(tokens):
            found = STALE_LOOP
        self.length = found or self.length
        return found > 0
