"""Acceptance rates. In: drafts and the tokens the target drew. Out: acceptance probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.speculate.proposer import Draft

PRIOR = 0.7  # acceptance rate of a drafted token before any observation
OWN_WEIGHT = 0.2  # weight of the newest token in the rate of one sequence
SHARED_WEIGHT = 0.03  # weight of the newest token in the rate of all sequences
MIN_RATE = 0.02  # lower bound, so that a rate recovers within some tokens
# Fewer accepted drafts than one in 20, of the first 128 or more: no draft layer that fits its model
# is that poor, and each probe of one that does not costs time.
POOR_RATE, POOR_COUNT = 0.05, 128


class AcceptanceRates:
    """Moving averages per proposer: of one sequence, and of all sequences, where a new sequence
    starts. The rate in use is their geometric mean. The first adapts fast, so that a sequence which
    only seems to repeat stops drafting after a few misses.

    For a proposer that states probabilities, the rate is accepted / stated: a factor on them that
    starts at 1. Example: own rate 0.1 after some misses, shared rate 0.6: 0.24, too low."""

    def __init__(self) -> None:
        self._shared: dict[str, float] = {}  # by source
        self._own: dict[tuple[int, str], float] = {}  # by (sequence, source)
        self._counts: dict[str, tuple[int, int]] = {}  # accepted and compared drafts, by source

    def is_poor(self, source: str) -> bool:
        accepted, compared = self._counts.get(source, (0, 0))
        return compared >= POOR_COUNT and accepted < POOR_RATE * compared

    def rate(self, seq_id: int, source: str, stated: bool) -> float:
        shared = self._shared.get(source, 1.0 if stated else PRIOR)
        mean: float = (shared * self._own.get((seq_id, source), shared)) ** 0.5
        return mean

    def probs(self, seq_id: int, draft: Draft, limit: int) -> list[float]:
        """The probability that the first token is accepted, the first two, and so on."""
        rate = self.rate(seq_id, draft.source, bool(draft.probs))
        if draft.probs:
            return [rate * prob for prob in draft.probs[:limit]]
        return [rate**j for j in range(1, min(len(draft.tokens), limit) + 1)]

    def learn(self, seq_id: int, draft: Draft, written: Sequence[int]) -> None:
        """`written`: the tokens that the target model drew in this step, from the first draft
        token's position on."""
        shared = self._shared.get(draft.source, 1.0 if draft.probs else PRIOR)
        own = self._own.get((seq_id, draft.source), shared)
        before = 1.0  # stated probs are cumulative
        for j, (drafted, token) in enumerate(zip(draft.tokens, written, strict=False)):
            stated = 1.0
            if draft.probs and 0.0 < draft.probs[j] < before:
                stated, before = draft.probs[j] / before, draft.probs[j]
            hit = float(drafted == token)
            accepted, compared = self._counts.get(draft.source, (0, 0))
            self._counts[draft.source] = accepted + int(hit), compared + 1
            own = max(own + OWN_WEIGHT * (hit - own * stated), MIN_RATE)
            shared = max(shared + SHARED_WEIGHT * (hit - shared * stated), MIN_RATE)
            if not hit:
                break
        self._shared[draft.source] = shared
        self._own[(seq_id, draft.source)] = own

    def forget(self, seq_id: int) -> None:
        for key in [k for k in self._own if k[0] == seq_id]:
            del self._own[key]
