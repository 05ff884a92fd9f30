"""The loop detector: output tokens come in, the length of the n-gram that repeats at their end goes out.

Text is caught in a loop when its last max(64, 4 n) tokens are one n-gram over and over, n at most 64. So "-----" needs
64 tokens and a repeated paragraph of 50 tokens must come four times: rulers and table edges do not count, a model that
has run dry does.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

LEAST = 64  # tokens that must be filled
TIMES = 4  # and this many repeats
LONGEST = 64  # longest n-gram looked for
GLANCE = 16  # a loop repeats at least this many of its last tokens
EVERY = (
    16  # look every so many tokens: the place depends on the text alone, never on how steps fell
)


def loop_length(tokens: Sequence[int]) -> int:
    """n, if the end of `tokens` is an n-gram repeated; 0 if not.

    The border table of the reversed tail gives the shortest period of every suffix in one pass.

    >>> loop_length([9, 9] + [1, 2, 3] * 22), loop_length([1, 2, 3] * 20)
    (3, 0)
    """
    if not _repeats(tokens[-LONGEST - GLANCE :]):
        return 0
    tail = list(tokens[: -(LONGEST * TIMES) - 1 : -1])
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
        if period <= LONGEST and length >= max(LEAST, TIMES * period):
            return period
    return 0


def _repeats(tokens: Sequence[int]) -> bool:
    """A glance at the speed of memory: were the last few tokens written before, at most LONGEST tokens ago? In nearly
    every text they were not."""
    data = array("i", tokens).tobytes()
    return data.find(data[-4 * GLANCE :]) < len(data) - 4 * GLANCE


class LoopDetector:
    """Looks at a text after each token; `length` is the last loop found."""

    __slots__ = ("length",)

    def __init__(self) -> None:
        self.length = 0

    def look(self, tokens: Sequence[int]) -> bool:
        """True when a loop is seen at the last token."""
        if len(tokens) % EVERY or len(tokens) < LEAST:
            return False
        found = loop_length(tokens)
        self.length = found or self.length
        return found > 0
