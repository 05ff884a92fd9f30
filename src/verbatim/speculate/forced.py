"""Draft the tokens that a grammar fully determines, such as `{"name": "` under a JSON schema.

In: the forced tokens of a view. Out: the same as a draft. It may still be rejected: the model may
split the same characters into other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.speculate.proposer import Draft, SeqView


class ForcedProposer:
    name = "forced"
    token_cost = 0.0
    states_probs = False

    def propose(self, views: Sequence[SeqView], limit: int, floor: float = 0.0) -> dict[int, Draft]:
        out = {}
        for view in views:
            if view.forced and view.max_drafts > 0:
                out[view.seq_id] = Draft(view.forced[: min(limit, view.max_drafts)], self.name, 0)
        return out

    def finish(self, view: SeqView) -> None:
        pass

    def close(self) -> None:
        pass
