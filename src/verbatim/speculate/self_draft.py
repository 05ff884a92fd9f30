"""Self-speculation: the target's own weights draft a block of masks with attention in both
directions, and verify it causally like any other draft (docs/adr/0034).

In: the tokens of sequences whose keys and values are in the target's cache. Out: the tokens drawn
at the masks, with the target's parameters and noise. The pass reads the sequence's blocks and
writes only blocks that it borrows for its length, so it changes nothing of the sequence.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from verbatim.backend.protocol import Backend
from verbatim.base.records import DrawSpec, SeqStep, StepPlan
from verbatim.speculate.proposer import Draft, SeqView

COST_WEIGHT = 0.2  # weight of the newest measurement in token_cost


class TargetBlocks(Protocol):
    """The target's KV blocks. A model that drafts for itself has one cache group."""

    def table(self, seq_id: int) -> Sequence[int]: ...
    def borrow(self, count: int) -> list[int]:
        """So many blocks, or none."""

    def give_back(self, blocks: Sequence[int]) -> None: ...


class SelfProposer:
    name = "self"
    states_probs = False

    def __init__(self, backend: Backend, blocks: TargetBlocks, mask: int, length: int) -> None:
        """`length`: positions of a block, the last known token included."""
        self.token_cost = 1e-6  # seconds; replaced by measurements
        self._backend, self._blocks = backend, blocks
        self._mask, self._length = mask, length
        self._step = self._passes = 0

    def propose(self, views: Sequence[SeqView], limit: int, floor: float = 0.0) -> dict[int, Draft]:
        steps: dict[int, SeqStep] = {}  # by id of the sequence
        copies: list[tuple[int, int, int]] = []
        borrowed: list[int] = []
        for view in views:
            count = min(limit, view.max_drafts, self._length - 1)
            own = self._borrow(view, count)
            if count < 1 or not own:
                continue
            borrowed += own
            steps[view.seq_id] = self._masked(view, count, own, copies)
        if not steps:
            return {}
        began = time.perf_counter()
        self._step += 1
        try:
            plan = StepPlan(self._step, tuple(steps.values()), tuple(copies))
            done = self._backend.execute(plan).sequences
        finally:
            self._blocks.give_back(borrowed)
        spent = (time.perf_counter() - began) / sum(step.draws for step in plan.sequences)
        first = self.token_cost == 1e-6
        self.token_cost = (
            spent if first else self.token_cost + COST_WEIGHT * (spent - self.token_cost)
        )
        found = {}
        for seq_id, result in zip(steps, done, strict=True):
            tokens = [drawn.token for drawn in result.drawn]
            end = next((i for i, token in enumerate(tokens) if token < 0), len(tokens))
            if end:
                found[seq_id] = Draft(tuple(tokens[:end]), self.name, 0)
        return found

    def _borrow(self, view: SeqView, count: int) -> list[int]:
        """Blocks for the last known token and `count` masks."""
        size, start = self._backend.block_size, len(view.tokens) - 1
        return self._blocks.borrow((start + count) // size - start // size + 1)

    def _masked(
        self, view: SeqView, count: int, own: list[int], copies: list[tuple[int, int, int]]
    ) -> SeqStep:
        self._passes += 1
        start = len(view.tokens) - 1
        table, first = self._blocks.table(view.seq_id), start // self._backend.block_size
        if start % self._backend.block_size:  # positions of this block that are computed already
            copies.append((0, table[first], own[0]))
        params = view.params.with_origins({}, {"logprobs": None, "explain": 0})
        history = tuple(view.tokens) if view.params.needs_history else ()
        return SeqStep(
            -1 - self._passes,  # an id of no sequence: the pass is not a step of it
            (view.tokens[-1], *[self._mask] * count),
            start,
            ((*table[:first], *own),),
            draws=count,
            draw=DrawSpec(params, view.key, view.prompt_len, history),
            shift=-1,
            block=start + count + 1,
            picks=tuple(range(1, count + 1)),
        )

    def finish(self, view: SeqView) -> None:
        pass

    def close(self) -> None:
        pass
