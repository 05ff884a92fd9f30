"""What a sequence may lose by drafts. In: what they won and cost. Out: how many more it can afford.

An estimate can be wrong, so there is a purse as well: drafts that came true fill it by the time they saved, the others empty it by the time they cost,
and a sequence that has lost what it may lose (START, and SHARE of what it wrote since; DEBT more where much was promised) drafts no more
until it has written on. However badly the guesses turn out, the loss stays within that. The unit is the time of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

START, SHARE = 1.2, 0.015  # what may be lost: at first, and for each token written
CREDIT, DEBT = (
    3.0,
    0.8,
)  # a draft that promises so many times its cost may lose a little more than that
LOOK = 0.15  # the most that one look for guesses is charged


@dataclass(slots=True)
class Purse:
    gained: float = 0.0  # by drafts, less what they cost
    saved: float = 0.0  # the same in seconds, for people
    begun: int | None = None  # length of the text when it was first looked at

    def left(self, length: int) -> float:
        """What a text of this length may still lose."""
        if self.begun is None:
            self.begun = length
        return self.gained + START + SHARE * (length - self.begun)

    def affordable(self, length: int, chances: Sequence[float], price: float) -> int:
        """As many as the purse can lose, and on credit as many as promise much more than they cost: a text that is being copied need not save for it,
        and one that turns into a copy after some bad guesses gets another chance."""
        left = self.left(length)
        count = int(max(left, 0.0) / price)
        if count >= len(chances):
            return len(chances)
        credit, promised = int(max(left + DEBT, 0.0) / price), 0.0
        for rows, chance in enumerate(chances[:credit], 1):
            promised += chance
            if rows > count and promised > CREDIT * price * rows:
                count = rows
        return count

    def pay_for_looking(self, seconds: float, token_seconds: float) -> None:
        """Whether or not anything came of it; more than LOOK is another program's doing."""
        most = LOOK * token_seconds
        cost = seconds if seconds < most else most
        self.gained -= cost / token_seconds
        self.saved -= cost

    def settle(self, won: int, row_seconds: float, token_seconds: float) -> None:
        """`won` tokens came true of drafts whose rows took `row_seconds`."""
        gain = won - row_seconds / token_seconds if token_seconds else 0.0
        self.gained += gain
        self.saved += gain * token_seconds
