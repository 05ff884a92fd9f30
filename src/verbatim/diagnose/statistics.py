"""Numbers about texts and small samples: a confidence interval of a share, repetition,
diversity."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z = 1.959964  # two-sided 95 %


def wilson(right: float, count: int) -> tuple[float, float]:
    """The 95 % Wilson interval of a share. Unlike the normal one it is right near 0 and 1.

    >>> [round(x, 3) for x in wilson(8, 10)]
    [0.49, 0.943]
    """
    if not count:
        return 0.0, 1.0
    p = right / count
    centre = (p + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z / (1 + Z * Z / count) * math.sqrt(p * (1 - p) / count + Z * Z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def repetition(tokens: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that occurred before in the same text: 0 for a text without repeats.

    >>> repetition([1, 2, 3, 4, 1, 2, 3, 4])
    0.2
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct(texts: Sequence[Sequence[int]], n: int = 2) -> float:
    """Diversity of several texts (distinct-n): different n-grams as a share of all of them."""
    grams = [tuple(t[i : i + n]) for t in texts for i in range(len(t) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0
