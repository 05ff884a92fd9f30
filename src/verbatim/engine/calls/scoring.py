"""Scoring a text: token ids come in; per-token log-probabilities and the perplexity go out. A text
longer than the window is scored in overlapping windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from verbatim.base.errors import ParameterError
from verbatim.base.records import TokenLogprob


@dataclass(frozen=True, slots=True)
class Score:
    """Result of `LLM.score`: the teacher-forced log-probability of every token.

    >>> score = llm.score("The sky is blue.")
    >>> score.perplexity > 1
    True
    """

    token_ids: tuple[int, ...]
    # Per token. None for a token without context: the first of the text, or of a window.
    logprobs: tuple[TokenLogprob | None, ...]
    total: float  # sum of the log-probabilities, in nats
    perplexity: float  # exp(-mean); nan for a text of one token, which nothing predicts
    warnings: tuple[str, ...] = ()  # as in Completion


@dataclass(frozen=True, slots=True)
class Window:
    """Computes tokens [start, end) and scores those from `first` on; the others are context."""

    start: int
    end: int
    first: int


def windows(length: int, window: int, stride: int | None = None) -> list[Window]:
    """Windows that score each token once, in the first window that holds it. After the first window
    every scored token has at least window - stride tokens of context.

    >>> [(w.start, w.end, w.first) for w in windows(10, 4, 3)]
    [(0, 4, 0), (3, 7, 4), (6, 10, 7)]
    """
    if window < 2:
        raise ParameterError("window", f"{window} is below 2: a scored token needs one before it")
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
