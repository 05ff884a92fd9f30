"""What a grammar leaves no choice about: `{"name": "` is written by the schema, not by the model. In: a view's forced tokens. Out: those.

Still only a guess: the model may cut the same characters into other tokens, and what it draws is what counts."""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.speculate.proposer import Draft, SeqView


class ForcedProposer:
    name = "forced"
    token_cost = 0.0
    states_odds = False

    def propose(self, views: Sequence[SeqView], limit: int, floor: float = 0.0) -> dict[int, Draft]:
        out = {}
        for view in views:
            if view.forced and view.room > 0:
                out[view.seq_id] = Draft(view.forced[: min(limit, view.room)], self.name, 0)
        return out

    def finish(self, view: SeqView) -> None:
        pass

    def close(self) -> None:
        pass
