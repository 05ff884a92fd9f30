"""A draft head guesses from the target's own final state. In: the rows of the last step. Out: a few tokens, each with its odds.

The state knows the whole text, so a net of a hundredth of its weights guesses nearly every second token of plain prose, where looking back finds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from verbatim.base.records import SeqStep, StepPlan
from verbatim.speculate.protocol import Draft, SeqView

if TYPE_CHECKING:
    from verbatim.model.draft_head import DraftHead

DEEPEST = 5  # odds multiply: what is further away hardly ever pays
PATIENCE = 0.1


@runtime_checkable
class Guesser(Protocol):
    """A backend that can run a draft head over the states of its last step."""

    def load_head(self, head: DraftHead) -> None: ...

    def guess(
        self, asks: Sequence[tuple[int, int, int, float]], floor: float
    ) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        """For each (row of the last step's final states, token drawn from it, most tokens, temperature): tokens and odds,
        as long as the next one may have odds of `floor`."""


class HeadProposer:
    name = "head"
    states_odds = True

    def __init__(self, backend: Guesser, head: DraftHead) -> None:
        self.token_cost = 1e-6  # replaced by what is measured
        self._backend = backend
        self._head: DraftHead | None = head  # until it is loaded
        self._last: tuple[SeqStep, ...] = ()  # the last step, until it was asked about
        self._rows: dict[int, tuple[int, int, int]] = {}  # by sequence: row of its first draw, index of that token, draws

    def observe(self, plan: StepPlan) -> None:
        self._last = plan.sequences
        self._rows.clear()

    def _locate(self) -> None:
        """Which row each token of the last step was drawn from."""
        row = 0
        for s in self._last:
            rows, first = len(s.tokens), len(s.tokens) - s.draws
            outputs = rows if s.hidden else min(len(s.targets), first) + s.draws
            self._rows[s.seq_id] = (row + outputs - s.draws, s.start + first + 1, s.draws)
            row += outputs
        self._last = ()

    def propose(self, views: Sequence[SeqView], limit: int, floor: float = 0.0) -> dict[int, Draft]:
        if self._last:
            self._locate()
        asking, asks = [], []
        for view in views:
            row, index, draws = self._rows.get(view.seq_id, (0, 0, 0))
            at = len(view.tokens) - 1 - index
            if 0 <= at < draws:
                asking.append(view.seq_id)
                asks.append((row + at, view.tokens[-1], min(limit, view.room, DEEPEST), float(view.params.temperature)))
        if not asks:
            return {}
        if self._head is not None:
            self._backend.load_head(self._head)
            self._head = None
        began = time.perf_counter()
        found = self._backend.guess(asks, floor)
        spent = time.perf_counter() - began
        out, made = {}, 0
        for seq_id, (tokens, odds) in zip(asking, found, strict=True):
            if tokens:
                out[seq_id] = Draft(tokens, self.name, 0, odds)
                made += len(tokens)
        spent /= max(made, 1)
        self.token_cost += PATIENCE * (min(spent, 4 * self.token_cost) - self.token_cost) if self.token_cost > 1e-6 else spent
        return out

    def finish(self, view: SeqView) -> None:
        self._rows.pop(view.seq_id, None)

    def close(self) -> None:
        self._rows.clear()
