"""Speculative decoding with a DFlash head, which fills a block of masks in one pass.

In: the target's states of computed positions. Out: drafts, drawn at the masks with the target's
parameters and noise key. The head's KV cache (layer_proposer.py) holds what it reads of the states;
the block behind it sees itself in both directions, and is overwritten by later states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, takewhile

from verbatim.backend.protocol import DraftLayer
from verbatim.base.records import SeqStep
from verbatim.model.spec import DFlashSpec
from verbatim.speculate.layer_proposer import LayerProposer
from verbatim.speculate.proposer import Draft, SeqView


class BlockProposer(LayerProposer):
    what = "draft head"

    def __init__(self, backend: DraftLayer, blocks: int, dflash: DFlashSpec) -> None:
        super().__init__("head", backend, blocks)
        self._dflash = dflash

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
            steps.append(step._replace(states=held.waiting))
            held.computed()
        self._execute(steps)

    def _chains(self, live: list[SeqView], limit: int, floor: float) -> dict[int, Draft]:
        found = {}
        for result in self._execute([self._masked(view) for view in live]):
            drawn = list(takewhile(lambda one: one.token >= 0, result.drawn))
            if drawn:
                probs = accumulate((math.exp(one.logprob) for one in drawn), float.__mul__)
                tokens = tuple(one.token for one in drawn)
                found[result.seq_id] = Draft(tokens, self.name, 0, tuple(probs))
        return found

    def _masked(self, view: SeqView) -> SeqStep:
        """The last known token and one mask per draft."""
        held, count = self._positions[view.seq_id], view.max_drafts
        tokens = (view.tokens[-1], *[self._dflash.mask] * count)
        step = self._sequence(view, tokens, held.cached, self._spec(view, ()))
        picks = tuple(range(1, count + 1))
        return step._replace(draws=count, picks=picks, shift=held.first - 1, block=step.end)
