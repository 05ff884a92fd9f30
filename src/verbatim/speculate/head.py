"""A draft head guesses from the target's own final state. In: the rows of the last step. Out: a few tokens, each with its odds.

The state knows the whole text, so a net of a hundredth of its weights guesses nearly every second token of plain prose, where looking back finds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from verbatim.base.records import SeqStep, StepPlan, StepResult
from verbatim.speculate.proposer import Draft, SeqView

if TYPE_CHECKING:
    from verbatim.model.draft_head import DraftHead

DEEPEST = 5  # odds multiply: what is further away hardly ever pays
PATIENCE = 0.1
WORTH_LOADING = 16  # tokens that a text must have before a head is loaded for it: loading takes as long as they did


@runtime_checkable
class DraftBackend(Protocol):
    """A backend that can run a draft head over the states of its last step."""

    def load_head(self, head: DraftHead) -> None: ...

    def start_draft(self, asks: Sequence[tuple[int, int, int, float]]) -> None:
        """The first guess of each, begun beside what the caller does next. draft() with the same rows, tokens and temperatures takes it;
        whatever else the backend does drops it."""

    def draft(
        self, asks: Sequence[tuple[int, int, int, float]], floor: float
    ) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        """For each (row of the last step's final states, token drawn from it, most tokens, temperature): tokens and odds,
        as long as the next one may have odds of `floor`."""


class HeadProposer:
    name = "head"
    states_odds = True

    def __init__(self, backend: DraftBackend, head: DraftHead) -> None:
        self.token_cost = 1e-6  # replaced by what is measured
        self._backend = backend
        self._head: DraftHead | None = head  # until it is loaded
        self._last: tuple[SeqStep, ...] = ()  # the last step, until it was asked about
        self._asked: dict[
            int, float
        ] = {}  # the sequences asked about before that step, and their temperatures
        self._rows: dict[
            int, tuple[int, int, int]
        ] = {}  # by sequence: row of its first draw, index of that token, draws

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """A step is done. Who was guessed for before it will be guessed for again: that is begun now, while the step's tokens are read."""
        self._last, asked, self._asked = plan.sequences, self._asked, {}
        self._rows.clear()
        if not asked:
            return
        self._locate(plan.sequences)
        asks = []
        for step, done in zip(plan.sequences, result.sequences, strict=True):
            if step.seq_id in asked and done.drawn:
                drawn = [d.token for d in done.drawn]
                right = agreeing(step.tokens[len(step.tokens) - step.draws + 1 :], drawn)
                if drawn[right] >= 0:  # below: bans left nothing to draw, and the text ends
                    asks.append(
                        (self._rows[step.seq_id][0] + right, drawn[right], 1, asked[step.seq_id])
                    )
        if asks:
            self._backend.start_draft(asks)

    def _locate(self, steps: Sequence[SeqStep]) -> None:
        """Which row each token of a step was drawn from."""
        row = 0
        for s in steps:
            rows, first = len(s.tokens), len(s.tokens) - s.draws
            outputs = rows if s.hidden else min(len(s.targets), first) + s.draws
            self._rows[s.seq_id] = (row + outputs - s.draws, s.start + first + 1, s.draws)
            row += outputs
        self._last = ()

    def propose(self, views: Sequence[SeqView], limit: int, floor: float = 0.0) -> dict[int, Draft]:
        if self._head is not None:
            if all(len(view.tokens) - view.prompt_len < WORTH_LOADING for view in views):
                return {}
            self._backend.load_head(self._head)
            self._head = None
        if self._last:
            self._locate(self._last)
        asking, asks = [], []
        for view in views:
            row, index, draws = self._rows.get(view.seq_id, (0, 0, 0))
            at = len(view.tokens) - 1 - index
            if 0 <= at < draws:
                asking.append(view.seq_id)
                asks.append(
                    (
                        row + at,
                        view.tokens[-1],
                        min(limit, view.room, DEEPEST),
                        float(view.params.temperature),
                    )
                )
                self._asked[view.seq_id] = asks[-1][3]
        if not asks:
            return {}
        began = time.perf_counter()
        found = self._backend.draft(asks, floor)
        spent = time.perf_counter() - began
        out, made = {}, 0
        for seq_id, (tokens, odds) in zip(asking, found, strict=True):
            if tokens:
                out[seq_id] = Draft(tokens, self.name, 0, odds)
                made += len(tokens)
        spent /= max(made, 1)
        self.token_cost += (
            PATIENCE * (min(spent, 4 * self.token_cost) - self.token_cost)
            if self.token_cost > 1e-6
            else spent
        )
        return out

    def finish(self, view: SeqView) -> None:
        self._rows.pop(view.seq_id, None)

    def close(self) -> None:
        self._rows.clear()


def agreeing(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """How many drafts are what was drawn, up to the first that is not."""
    right = 0
    while right < len(drafts) and drafts[right] == drawn[right]:
        right += 1
    return right
