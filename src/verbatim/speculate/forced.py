"""What a grammar leaves no choice about: `{"name": "` is written by the schema, not by the model. In: a view's forced tokens. Out: those.

Still only a guess: the model may cut the same characters into other tokens, and what it draws is what counts."""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.speculate.protocol import Draft, SeqView


class ForcedProposer:
    name = "forced"
    token_cost = 0.0
    states_odds = False

    def propose(self, views: Sequence[SeqView], limit: int, floor: float = 0.0) -> dict[int, Draft]:
        return {v.seq_id: Draft(v.forced[: min(limit, v.room)], self.name, 0) for v in views if v.forced and v.room > 0}

    def finish(self, view: SeqView) -> None:
        pass

    def close(self) -> None:
        pass
