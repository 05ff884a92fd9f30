"""Draft head: a small network drafts from the target's final hidden state (compare EAGLE, Medusa).

In: the final hidden states of the last step. Out: a few tokens per sequence, each with its
acceptance probability. The hidden state encodes the whole sequence, so a network of a hundredth of
the weights predicts nearly every second token of prose, where lookup finds no match.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from verbatim.backend.protocol import DraftBackend
from verbatim.base.records import SeqStep, StepPlan, StepResult
from verbatim.speculate.proposer import Draft, SeqView

if TYPE_CHECKING:
    from verbatim.model.loading.draft_head import DraftHead

MAX_DEPTH = 5  # drafts per sequence; the probabilities multiply, so more hardly ever pay
COST_WEIGHT = 0.1  # weight of the newest measurement in token_cost
# Output tokens of a sequence before the head is loaded for it; loading takes as long as these took.
MIN_OUTPUT_TOKENS = 16


class HeadProposer:
    name = "head"
    states_probs = True

    def __init__(self, backend: DraftBackend, head: DraftHead) -> None:
        self.token_cost = 1e-6  # seconds; replaced by measurements
        self._backend = backend
        self._head: DraftHead | None = head  # until it is loaded
        self._last: tuple[SeqStep, ...] = ()  # the last step, until _locate() has read it
        # Sequences drafted for before the last step -> temperature.
        self._drafted: dict[int, float] = {}
        # seq_id -> (row of its first draw, index of that token, number of draws)
        self._rows: dict[int, tuple[int, int, int]] = {}

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """A step is done. Launch the drafts of the sequences that were drafted for before it, so
        that they overlap with the host's work on the step's tokens."""
        self._last, drafted, self._drafted = plan.sequences, self._drafted, {}
        self._rows.clear()
        if not drafted:
            return
        self._locate(plan.sequences)
        queries = []
        for step, done in zip(plan.sequences, result.sequences, strict=True):
            if step.seq_id in drafted and done.drawn:
                drawn = [d.token for d in done.drawn]
                accepted = matching_prefix(step.tokens[len(step.tokens) - step.draws + 1 :], drawn)
                if drawn[accepted] >= 0:  # NOTHING or BROKEN: the sequence ends
                    queries.append(
                        (
                            self._rows[step.seq_id][0] + accepted,
                            drawn[accepted],
                            1,
                            drafted[step.seq_id],
                        )
                    )
        if queries:
            self._backend.start_draft(queries)

    def _locate(self, steps: Sequence[SeqStep]) -> None:
        """Record which row of the final states each sequence's tokens were drawn from."""
        row = 0
        for s in steps:
            rows, first = len(s.tokens), len(s.tokens) - s.draws
            outputs = rows if s.hidden else min(len(s.targets), first) + s.draws
            self._rows[s.seq_id] = (row + outputs - s.draws, s.start + first + 1, s.draws)
            row += outputs
        self._last = ()

    def propose(self, views: Sequence[SeqView], limit: int, floor: float = 0.0) -> dict[int, Draft]:
        if self._head is not None:
            if all(len(view.tokens) - view.prompt_len < MIN_OUTPUT_TOKENS for view in views):
                return {}
            self._backend.load_head(self._head)
            self._head = None
        if self._last:
            self._locate(self._last)
        seq_ids, queries = [], []
        for view in views:
            row, index, draws = self._rows.get(view.seq_id, (0, 0, 0))
            at = len(view.tokens) - 1 - index
            if 0 <= at < draws:
                seq_ids.append(view.seq_id)
                queries.append(
                    (
                        row + at,
                        view.tokens[-1],
                        min(limit, view.max_drafts, MAX_DEPTH),
                        float(view.params.temperature),
                    )
                )
                self._drafted[view.seq_id] = queries[-1][3]
        if not queries:
            return {}
        began = time.perf_counter()
        found = self._backend.draft(queries, floor)
        spent = time.perf_counter() - began
        out, made = {}, 0
        for seq_id, (tokens, probs) in zip(seq_ids, found, strict=True):
            if tokens:
                out[seq_id] = Draft(tokens, self.name, 0, probs)
                made += len(tokens)
        spent /= max(made, 1)
        self.token_cost += (
            COST_WEIGHT * (min(spent, 4 * self.token_cost) - self.token_cost)
            if self.token_cost > 1e-6
            else spent
        )
        return out

    def finish(self, view: SeqView) -> None:
        self._rows.pop(view.seq_id, None)

    def close(self) -> None:
        self._rows.clear()


def matching_prefix(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """Number of leading drafts that equal the drawn tokens."""
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == drawn[accepted]:
        accepted += 1
    return accepted
