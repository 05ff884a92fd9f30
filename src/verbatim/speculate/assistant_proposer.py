"""Speculative decoding with a Gemma 4 assistant, which reads the KV cache of its target.

In: the target's final state of the last computed position, and the blocks that the scheduler gave
the sequence. Out: chains of drafts. All drafts of a chain are computed at the position of the last
known token, over the keys before it; each further one reads the draft before it and the assistant's
own state. No step writes a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verbatim.backend.protocol import DraftLayer
from verbatim.base.records import SeqStep
from verbatim.speculate.layer_proposer import LayerProposer
from verbatim.speculate.proposer import SeqView


class AssistantProposer(LayerProposer):
    what = "assistant"
    window = 1

    def __init__(
        self, backend: DraftLayer, tables: Callable[[int], Sequence[Sequence[int]]]
    ) -> None:
        """`tables`: the target's block tables of a sequence."""
        super().__init__("head", backend, 0)
        self.tables = tables

    def _catch_up(self, views: Sequence[SeqView]) -> None:
        for view in views:
            self._positions[view.seq_id].keep_last(1)

    def _step_of(self, view: SeqView, so_far: Sequence[int], count: int = 1) -> SeqStep:
        held = self._positions[view.seq_id]
        token = so_far[-1] if so_far else view.tokens[-1]
        tables = tuple(tuple(table) for table in self.tables(view.seq_id))
        step = SeqStep(view.seq_id, (token,), len(view.tokens) - 1, tables, draws=1)
        return step._replace(
            draw=self._spec(view, so_far),
            hidden=True,
            states=held.last if so_far else held.waiting,
            shift=len(so_far),
            block=0,
        )
