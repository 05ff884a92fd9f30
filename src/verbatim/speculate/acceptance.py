"""Acceptance model. In: drafts and the tokens the target drew. Out: acceptance probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.speculate.proposer import Draft

RATE_WEIGHT = 0.12  # weight of the newest observation in an acceptance rate
PRIOR = 0.35  # acceptance rate before any observation; longer matches start higher
MAX_MATCH = 16  # tokens; matches of this length and longer share one rate
NEUTRAL_COUNTS = (3.0, 3.0)  # (accepted, stated) before any observation: stated probs are trusted
# Decay per observation of the calibration counts: of all sequences, of one. What decays is replaced
# by neutral counts.
SHARED_DECAY, SEQUENCE_DECAY = 0.995, 0.95
SHARED_NEUTRAL = (1 - SHARED_DECAY) * NEUTRAL_COUNTS[0]
SEQUENCE_NEUTRAL = (1 - SEQUENCE_DECAY) * NEUTRAL_COUNTS[0]
# Accepted / stated. A source below it hardly drafts any more; relax() restores its record.
MIN_TRUST = 0.5
# Initial rates by match length. Each accepted token lengthens the match by one; 0 (no match) stays.
PRIORS = tuple(PRIOR + 0.07 * min(kind, 6) for kind in range(MAX_MATCH + 1))


class Acceptance:
    """The geometric mean of two acceptance rates: of this sequence over all match lengths, and of
    all sequences for this match length. The first adapts fast, so that a sequence which only seems
    to repeat stops drafting after a few misses. The second tells a match of two tokens from one of
    ten. Each accepted token lengthens the match, so the next token uses the rate of a longer match.
    Example: own rate 0.1 after some misses, shared rate 0.6: 0.24, too low to draft."""

    def __init__(self) -> None:
        self._shared: dict[str, list[float]] = {}  # by source, then by match_length
        self._own: dict[tuple[int, str], float] = {}
        # Calibration of stated probabilities by (sequence or -1 for all, source): (sum of accepted
        # drafts, sum of their stated probabilities).
        self._calibration: dict[tuple[int, str], tuple[float, float]] = {}

    def acceptance_probs(self, seq_id: int, draft: Draft, limit: int) -> list[float]:
        """The probability that the first token is accepted, the first two, and so on."""
        own = self._own.get((seq_id, draft.source))
        rates = self._shared.get(draft.source, PRIORS)
        kind = min(draft.match_length, MAX_MATCH)
        out, prob = [], 1.0
        for _ in range(limit):
            prob *= rates[kind] if own is None else (rates[kind] * own) ** 0.5
            out.append(prob)
            if 0 < kind < MAX_MATCH:
                kind += 1
        return out

    def learn(self, seq_id: int, draft: Draft, written: Sequence[int]) -> None:
        """`written`: the tokens that the target drew where the draft stood, as many as it drew in
        the step."""
        if not written:
            return
        rates = self._shared.get(draft.source)
        if rates is None:
            rates = self._shared[draft.source] = list(PRIORS)
        kind = min(draft.match_length, MAX_MATCH)
        own = self._own.get((seq_id, draft.source), rates[kind])
        for drafted, token in zip(draft.tokens, written, strict=False):
            hit = 1.0 if drafted == token else 0.0
            own += 2 * RATE_WEIGHT * (hit - own)
            rates[kind] += RATE_WEIGHT / 4 * (hit - rates[kind])
            if not hit:
                break
            if 0 < kind < MAX_MATCH:
                kind += 1
        self._own[(seq_id, draft.source)] = own

    def calibration(self, seq_id: int, source: str) -> float:
        """Factor on the stated probs of this source: accepted / stated, over all sequences and this
        one."""
        accepted, stated = self._calibration.get((-1, source), NEUTRAL_COUNTS)
        own_accepted, own_stated = self._calibration.get((seq_id, source), NEUTRAL_COUNTS)
        factor: float = (accepted / stated * own_accepted / own_stated) ** 0.5
        return 0.2 if factor < 0.2 else 1.2 if factor > 1.2 else factor

    def learn_stated(self, seq_id: int, draft: Draft, written: Sequence[int]) -> None:
        """As learn(), for a source that states probs."""
        shared, own = (-1, draft.source), (seq_id, draft.source)
        accepted, stated = self._calibration.get(shared, NEUTRAL_COUNTS)
        own_accepted, own_stated = self._calibration.get(own, NEUTRAL_COUNTS)
        before = 1.0
        for drafted, token, prob in zip(draft.tokens, written, draft.probs, strict=False):
            hit = drafted == token
            conditional = prob / before if prob < before else 1.0  # stated probs are cumulative
            accepted, stated = (
                SHARED_DECAY * accepted + SHARED_NEUTRAL + hit,
                SHARED_DECAY * stated + SHARED_NEUTRAL + conditional,
            )
            own_accepted, own_stated = (
                SEQUENCE_DECAY * own_accepted + SEQUENCE_NEUTRAL + hit,
                SEQUENCE_DECAY * own_stated + SEQUENCE_NEUTRAL + conditional,
            )
            before = prob
            if not hit:
                break
        self._calibration[shared], self._calibration[own] = (
            (accepted, stated),
            (own_accepted, own_stated),
        )

    def relax(self, seq_id: int, source: str) -> None:
        """Forget part of a bad record. A draft that is not made teaches nothing, so without this a
        source would never draft again."""
        own = self._own.get((seq_id, source), PRIOR)
        self._own[(seq_id, source)] = own + RATE_WEIGHT * (PRIOR - own)
        accepted, stated = self._calibration.get((-1, source), NEUTRAL_COUNTS)
        if accepted < MIN_TRUST * stated:
            self._calibration[(-1, source)] = (
                SEQUENCE_DECAY * accepted + SEQUENCE_NEUTRAL,
                SEQUENCE_DECAY * stated + SEQUENCE_NEUTRAL,
            )

    def forget(self, seq_id: int) -> None:
        for key in [k for k in self._own if k[0] == seq_id]:
            del self._own[key]
        for key in [k for k in self._calibration if k[0] == seq_id]:
            del self._calibration[key]
