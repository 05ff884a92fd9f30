"""Speculative decoding with a Gemma 4 assistant, which reads the KV cache of its target.

In: the target's final state of the last computed position, and the blocks that the scheduler gave
the sequence. Out: chains of drafts, drawn with the target's parameters and noise key. All drafts of
a chain are computed at the position of the last known token, over the keys before it; each further
one reads the draft before it and the assistant's own state. It writes no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from verbatim.backend.protocol import Backend
from verbatim.base.records import Drawn, SeqStep, StepPlan, StepResult
from verbatim.speculate.cached_proposer import CachedProposer
from verbatim.speculate.proposer import SeqView


class _States(NamedTuple):
    first: int  # position of the first row
    rows: np.ndarray  # [positions, hidden]: states of the target's latest step


class AssistantProposer(CachedProposer):
    name = "head"
    what = "assistant"
    states_probs = True
    window = 1

    def __init__(self, backend: Backend, tables: Callable[[int], Sequence[Sequence[int]]]) -> None:
        """`tables`: the target's block table of a sequence, per cache group."""
        super().__init__(backend, 0)
        self._target_tables = tables
        self._states: dict[int, _States] = {}
        self._last: dict[int, np.ndarray] = {}  # its own state, of the latest draft

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        for step, done in zip(plan.sequences, result.sequences, strict=True):
            self._states.pop(step.seq_id, None)
            if done.states is not None:
                self._states[step.seq_id] = _States(step.start, done.states)

    def _reserve_for(self, view: SeqView, limit: int, in_use: set[int]) -> int:
        held = self._states.get(view.seq_id)
        row = -1 if held is None else len(view.tokens) - 2 - held.first
        if held is None or not 0 <= row < len(held.rows):
            return 0
        self._last[view.seq_id] = held.rows[row : row + 1]
        return limit

    def _draw(self, views: Sequence[SeqView], drafts: dict[int, list[int]]) -> list[Drawn]:
        steps = []
        for view in views:
            so_far = drafts.get(view.seq_id, [])
            steps.append(
                SeqStep(
                    view.seq_id,
                    (so_far[-1] if so_far else view.tokens[-1],),
                    len(view.tokens) - 1,
                    tuple(tuple(table) for table in self._target_tables(view.seq_id)),
                    draws=1,
                    draw=self._spec(view, so_far),
                    hidden=True,
                    states=self._last[view.seq_id],
                    shift=len(so_far),
                    block=0,
                )
            )
        results = self._execute(steps)
        for result in results:
            assert result.states is not None, "the step asked for it"
            self._last[result.seq_id] = result.states
        return [result.drawn[0] for result in results]

    def finish(self, view: SeqView) -> None:
        self._states.pop(view.seq_id, None)
        self._last.pop(view.seq_id, None)
