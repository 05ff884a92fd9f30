"""Stages that penalise repetition: repetition, frequency and presence penalty, DRY, n-gram ban.

They read the tokens so far (`RowState.history`) and change logits before the temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from verbatim.sampling.numerics import I64
from verbatim.sampling.row_state import RowState

# Tokens. DRY counts a repeat up to allowed_length + 63: base^63 exceeds any logit, and the search
# is bounded.
DRY_GROWTH = 63


def _recent(row: RowState, first: int) -> Sequence[int]:
    """The tokens from `first` on that are among the last penalty_range ones."""
    window = row.params.penalty_range
    return row.history[max(first, len(row.history) - window) if window else first :]


class Repetition:
    """Ids in prompt or output: divide a positive logit, multiply a negative one (Keskar et al.,
    "CTRL", 2019, with the later sign rule). With 1.3, 2.6 becomes 2.0 and -1.0 becomes -1.3."""

    name = "repetition_penalty"

    def active(self, row: RowState) -> bool:
        return row.params.repetition_penalty != 1.0 and len(row.history) > 0

    def apply(self, row: RowState) -> None:
        r = row.params.repetition_penalty
        seen = np.unique(np.asarray(_recent(row, 0), np.int64))
        x = row.logits[seen]
        row.logits[seen] = np.where(x > 0.0, x / r, x * r)


class Frequency:
    """logit[id] -= penalty * (count of the id in the output) (OpenAI). A count of 3 at 0.5:
    -1.5."""

    name = "frequency_penalty"

    def active(self, row: RowState) -> bool:
        return row.params.frequency_penalty != 0.0 and len(row.history) > row.prompt_len

    def apply(self, row: RowState) -> None:
        written, count = np.unique(
            np.asarray(_recent(row, row.prompt_len), np.int64), return_counts=True
        )
        row.logits[written] -= row.params.frequency_penalty * count.astype(np.float64)


class Presence:
    """logit[id] -= penalty if the id is in the output (OpenAI). A count of 3 at 0.5: -0.5."""

    name = "presence_penalty"

    def active(self, row: RowState) -> bool:
        return row.params.presence_penalty != 0.0 and len(row.history) > row.prompt_len

    def apply(self, row: RowState) -> None:
        written = np.unique(np.asarray(_recent(row, row.prompt_len), np.int64))
        row.logits[written] -= row.params.presence_penalty


class Dry:
    """ "Don't repeat yourself" (p-e-w, 2024): an id that would continue a repeat of length
    n >= allowed_length loses multiplier * base^(n - allowed_length). n is the length of the longest
    run that ends the tokens so far and also occurs earlier, right before that id. Runs do not cross
    breakers; a breaker id is not penalised.

    Tokens a b c d a b c, allowed_length 2, multiplier 0.8, base 1.75: "a b c" preceded d, so n = 3
    and d loses 0.8 * 1.75 = 1.4.
    """

    name = "dry_multiplier"

    def active(self, row: RowState) -> bool:
        return row.params.dry_multiplier != 0.0 and len(row.history) > 1

    def apply(self, row: RowState) -> None:
        p = row.params
        tokens = np.asarray(row.history[-p.dry_range :] if p.dry_range else row.history, np.int64)
        lengths = repeat_lengths(
            tokens, breaker_flags(tokens, row.breakers), p.dry_allowed_length + DRY_GROWTH
        )
        for token, n in sorted(lengths.items()):
            if n >= p.dry_allowed_length:
                growth = 1.0
                for _ in range(n - p.dry_allowed_length):
                    growth *= p.dry_base
                row.logits[token] -= p.dry_multiplier * growth


class NoRepeatNgram:
    """Remove ids that would complete an n-gram already in prompt or output (Paulus et al., 2017; as
    in transformers). Tokens a b c a b with n = 3: c is removed."""

    name = "no_repeat_ngram"

    def active(self, row: RowState) -> bool:
        return 0 < row.params.no_repeat_ngram <= len(row.history)

    def apply(self, row: RowState) -> None:
        n = row.params.no_repeat_ngram
        tokens = np.asarray(row.history, np.int64)
        starts = np.arange(len(tokens) - n + 1)  # complete n-grams
        for i in range(n - 1):
            starts = starts[tokens[starts + i] == tokens[len(tokens) - n + 1 + i]]
        row.remove(tokens[starts + n - 1])


def breaker_flags(tokens: I64, breakers: tuple[tuple[int, ...], ...]) -> NDArray[np.bool_]:
    """True where a token belongs to a breaker (an id, or a run of ids)."""
    singles, runs = _split(breakers)
    flags = np.isin(tokens, singles)
    for run in runs:
        starts = np.arange(len(tokens) - len(run) + 1)
        for i, token in enumerate(run):
            starts = starts[tokens[starts + i] == token]
        for i in range(len(run)):
            flags[starts + i] = True
    return flags


@lru_cache(maxsize=64)
def _split(breakers: tuple[tuple[int, ...], ...]) -> tuple[I64, tuple[tuple[int, ...], ...]]:
    singles = np.array(sorted({run[0] for run in breakers if len(run) == 1}), np.int64)
    return singles, tuple(run for run in breakers if len(run) > 1)


def repeat_lengths(tokens: I64, breaker: NDArray[np.bool_], limit: int) -> dict[int, int]:
    """Per id that followed an earlier copy of the end of `tokens`: the length of the longest such
    copy, up to `limit`.

    >>> repeat_lengths(np.array([1, 2, 3, 4, 1, 2, 3]), np.zeros(7, bool), 50)
    {4: 3}
    """
    last = len(tokens) - 1
    if last < 1 or breaker[last]:
        return {}
    ends = np.flatnonzero((tokens[:-1] == tokens[last]) & ~breaker[1:])
    out: dict[int, int] = {}
    length = 1
    while len(ends):
        # Longer runs come later and overwrite shorter ones.
        out.update(dict.fromkeys(tokens[ends + 1].tolist(), length))
        if length >= limit or last - length < 0 or breaker[last - length]:
            break
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[last - length]]
        length += 1
    return out
