"""Log-probabilities: a row of logits in, the log-probability of an id and of the best few out.

    logprob_i = (l_i - max l) - log(sum_j floor(e^(l_j - max l) * 2^42) / 2^42)

The sum adds integers, so it does not depend on the order of additions (numerics.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from verbatim.base.errors import NOT_FINITE, BackendError
from verbatim.base.records import BROKEN, TokenLogprob
from verbatim.sampling.numerics import F64, MAX_VOCAB, best, log_mass, masses


def as_row(logits: NDArray[np.float32]) -> F64:
    """One row as float64. NaN or infinity raises BackendError: the model or a kernel is broken."""
    row = finite_row(logits)
    if row is None:
        raise BackendError(f"{NOT_FINITE}; its file or a kernel is broken")
    return row


def finite_row(logits: NDArray[np.float32]) -> F64 | None:
    """One row as float64; None if it holds NaN or infinity. -inf is an id that cannot come."""
    row = logits.astype(np.float64)
    assert 0 < len(row) <= MAX_VOCAB, "a row holds 1 to 2^20 logits"
    return row if np.isfinite(row.max()) else None


def log_normaliser(row: F64) -> float:
    """log sum e^(l - max l); a log-probability is l - max l - this. -inf entries have no mass."""
    return log_mass(int(masses(row - row.max()).sum()))


def token_logprobs(
    row: F64, token: int, top: int = 0, *, norm: float | None = None
) -> TokenLogprob:
    """The log-probability of one id and of the `top` best. Removed ids (-inf) are never listed."""
    norm = log_normaliser(row) if norm is None else norm
    peak = float(row.max())
    first = best(row, top) if top else np.zeros(0, np.int64)
    listed = tuple((int(i), (float(row[i]) - peak) - norm) for i in first if row[i] > -np.inf)
    return TokenLogprob(token, (float(row[token]) - peak) - norm, listed)


def score_targets(
    logits: NDArray[np.float32], targets: Sequence[int], top: int = 0
) -> tuple[TokenLogprob, ...]:
    """Prompt log-probabilities: row i scores targets[i]. Always of the model's own distribution,
    since a prompt is not drawn. Token BROKEN: the row is not finite."""
    rows = [finite_row(logits[i]) for i in range(len(targets))]
    return tuple(
        TokenLogprob(BROKEN, 0.0) if row is None else token_logprobs(row, target, top)
        for row, target in zip(rows, targets, strict=True)
    )
