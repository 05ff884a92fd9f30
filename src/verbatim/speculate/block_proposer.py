"""Speculative decoding with a DFlash head, which fills a block of masks in one pass.

In: the target's states of computed positions. Out: drafts, drawn at the masks with the target's
parameters and noise key. The head's KV cache holds what it reads of those states (as that of
layer_proposer.py, it may begin later than the text); the block is computed behind it, with
attention in both directions, and overwritten by the states of the tokens that are accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from verbatim.backend.protocol import Backend
from verbatim.base.records import SeqStep
from verbatim.speculate.layer_proposer import LayerProposer
from verbatim.speculate.proposer import Draft, SeqView


class BlockProposer(LayerProposer):
    what = "draft head"

    def __init__(self, name: str, backend: Backend, blocks: int) -> None:
        super().__init__(name, backend, blocks)
        assert backend.spec.dflash is not None
        self._dflash = backend.spec.dflash

    def _reserve_for(self, view: SeqView, limit: int, in_use: set[int]) -> int:
        count = min(limit, self._dflash.block - 1)
        # + 2: the last known token is in the block, and every draft has a position.
        return min(super()._reserve_for(view, count + 2, in_use), count)

    def _catch_up(self, views: Sequence[SeqView]) -> None:
        steps = []
        for view in views:
            held = self._positions[view.seq_id]
            self._shorten(view, held)
            tokens = tuple(view.tokens[-1 - len(held.waiting) : -1])
            step = self._sequence(view, tokens, held.cached)
            steps.append(step._replace(states=np.stack(held.waiting)))
        if steps:
            self._execute(steps)
        for view in views:
            held = self._positions[view.seq_id]
            held.cached, held.waiting = held.cached + len(held.waiting), []

    def _chains(self, live: list[SeqView], limit: int, floor: float) -> dict[int, Draft]:
        if not live:
            return {}
        found = {}
        for view, result in zip(
            live, self._execute([self._masked(view) for view in live]), strict=True
        ):
            drawn = [draw for draw in result.drawn if draw.token >= 0]
            if len(drawn) < len(result.drawn):  # bans left nothing to draw, or NaN
                drawn = drawn[: [draw.token < 0 for draw in result.drawn].index(True)]
            probs = accumulate((math.exp(draw.logprob) for draw in drawn), float.__mul__)
            if drawn:
                tokens = tuple(draw.token for draw in drawn)
                found[view.seq_id] = Draft(tokens, self.name, 0, tuple(probs))
        return found

    def _masked(self, view: SeqView) -> SeqStep:
        """The last known token and one mask per draft."""
        held = self._positions[view.seq_id]
        count = view.max_drafts
        tokens = (view.tokens[-1], *[self._dflash.mask] * count)
        step = self._sequence(view, tokens, held.cached, self._spec(view, ()))
        return step._replace(
            draws=count, picks=tuple(range(1, count + 1)), shift=held.first - 1, block=step.end
        )
