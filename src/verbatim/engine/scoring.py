"""Scoring a text: token ids in, the log-probability of every token and the perplexity out. What is longer than a window is read in several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from verbatim.base.errors import ParameterError
from verbatim.base.records import TokenLogprob


@dataclass(frozen=True, slots=True)
class Score:
    """What `LLM.score` returns: the teacher-forced log-probability of every token, from one pass."""

    token_ids: tuple[int, ...]
    logprobs: tuple[
        TokenLogprob | None, ...
    ]  # one a token; None where nothing is before it: the first, or a window's first
    total: float  # sum of the log-probabilities, in nats
    perplexity: float  # exp(-mean)
    warnings: tuple[str, ...] = ()  # as a Completion's


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens start to end are read; those from `first` on are scored, the others are what comes before them."""

    start: int
    end: int
    first: int


def windows(length: int, window: int, stride: int | None = None) -> list[Window]:
    """Each token is scored once, in the first window that has it: behind the first window it sees at least window - stride tokens.

    >>> [(w.start, w.end, w.first) for w in windows(10, 4, 3)]
    [(0, 4, 0), (3, 7, 4), (6, 10, 7)]
    """
    if window < 2:
        raise ParameterError("window", f"{window} is below 2: a token must have one before it")
    stride = window // 2 if stride is None else stride
    if not 1 <= stride <= window:
        raise ParameterError("stride", f"{stride} is not between 1 and the window ({window})")
    found = [Window(0, min(window, length), 0)]
    while (last := found[-1]).end < length:
        start = last.start + stride
        found.append(Window(start, min(start + window, length), last.end))
    return found


def score_of(
    ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], warnings: Sequence[str] = ()
) -> Score:
    scored = [entry.logprob for entry in logprobs if entry is not None]
    total = math.fsum(scored)
    return Score(
        tuple(ids),
        tuple(logprobs),
        total,
        math.exp(-total / len(scored)) if scored else math.nan,
        tuple(warnings),
    )
