"""Draft budget: bounds what a sequence may lose by drafting.

In: tokens gained and time spent. Out: how many more drafts the sequence can afford. The unit is the
time per token. Accepted drafts add the time they saved, rejected ones subtract the time they cost.
A sequence that has lost INITIAL plus ALLOWANCE per output token drafts no more until it has
written on. Invariant: however wrong the estimates are, the loss stays within that bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

INITIAL = 1.2  # tokens that a sequence may lose from the start
ALLOWANCE = 0.015  # further loss per output token
# A draft expected to gain MIN_RETURN times its cost may overdraw the budget by OVERDRAFT tokens.
MIN_RETURN, OVERDRAFT = 3.0, 0.8
MAX_LOOKUP_CHARGE = 0.15  # tokens; upper bound of the charge for one lookup


@dataclass(slots=True)
class DraftBudget:
    gained: float = 0.0  # net gain, in tokens
    saved: float = 0.0  # net gain, in seconds
    start_length: int | None = None  # sequence length at the first lookup

    def remaining(self, length: int) -> float:
        """What a sequence of this length may still lose."""
        if self.start_length is None:
            self.start_length = length
        return self.gained + INITIAL + ALLOWANCE * (length - self.start_length)

    def affordable(self, length: int, probs: Sequence[float], price: float) -> int:
        """As many drafts as the budget can lose, or on credit as many as are expected to gain much
        more than they cost. So a sequence that starts to copy need not earn budget first."""
        remaining = self.remaining(length)
        count = int(max(remaining, 0.0) / price)
        if count >= len(probs):
            return len(probs)
        credit, expected = int(max(remaining + OVERDRAFT, 0.0) / price), 0.0
        for rows, prob in enumerate(probs[:credit], 1):
            expected += prob
            if rows > count and expected > MIN_RETURN * price * rows:
                count = rows
        return count

    def charge_lookup(self, seconds: float, token_seconds: float) -> None:
        """Charge the time of a lookup, whether or not it found a draft. More than MAX_LOOKUP_CHARGE
        is caused by other programs and is not charged."""
        limit = MAX_LOOKUP_CHARGE * token_seconds
        cost = seconds if seconds < limit else limit
        self.gained -= cost / token_seconds
        self.saved -= cost

    def settle(self, won: int, row_seconds: float, token_seconds: float) -> None:
        """`won` drafts were accepted, of drafts whose rows took `row_seconds`."""
        gain = won - row_seconds / token_seconds if token_seconds else 0.0
        self.gained += gain
        self.saved += gain * token_seconds
