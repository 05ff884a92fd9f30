"""How likely guesses are to come true. In: guesses, and what the target wrote instead. Out: the chance of each token of the next guess."""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.speculate.proposer import Draft

PATIENCE = 0.12  # weight of the newest observation in an acceptance rate
PRIOR = 0.35  # acceptance before anything is known; long matches earn more
ALIKE = 16  # matches of this length and longer are one kind of evidence
NEUTRAL = (3.0, 3.0)  # stated odds are believed until they are known to be wrong
LONG, SHORT = (
    0.995,
    0.95,
)  # memory of how stated odds came true: of all sequences, of one. What is forgotten turns
LONG_NEUTRAL, SHORT_NEUTRAL = (
    (1 - LONG) * NEUTRAL[0],
    (1 - SHORT) * NEUTRAL[0],
)  # neutral, for both numbers alike
DOUBTED = 0.5  # a source whose odds came true less often is hardly asked any more: its record cannot heal by itself
# Acceptance by evidence, 0 to ALIKE, before anything is known. Behind each token of a guess stands the match that the tokens before it made longer;
# 0 is no match, and stays so.
PRIORS = tuple(PRIOR + 0.07 * min(kind, 6) for kind in range(ALIKE + 1))


class Acceptance:
    """How often guesses come true: the geometric mean of what this sequence shows, for any evidence, and of what all sequences showed for
    this kind of evidence. The first changes fast, so that a text which only seems to repeat itself stops costing after a few misses; the
    second tells a match of two tokens from one of ten. Each token that comes true makes the match longer, so the next has better evidence.
    Worked: own 0.1 after some misses, shared 0.6: 0.24, too little to draft."""

    def __init__(self) -> None:
        self._shared: dict[str, list[float]] = {}  # by source, then by evidence
        self._own: dict[tuple[int, str], float] = {}
        self._trust: dict[
            tuple[int, str], tuple[float, float]
        ] = {}  # of stated odds: what came true, what was stated; -1: all sequences

    def chances(self, seq_id: int, draft: Draft, limit: int) -> list[float]:
        """That the first token comes true, the first two, and so on."""
        own = self._own.get((seq_id, draft.source))
        rates = self._shared.get(draft.source, PRIORS)
        kind = min(draft.evidence, ALIKE)
        out, chance = [], 1.0
        for _ in range(limit):
            chance *= rates[kind] if own is None else (rates[kind] * own) ** 0.5
            out.append(chance)
            if 0 < kind < ALIKE:
                kind += 1
        return out

    def learn(self, seq_id: int, draft: Draft, written: Sequence[int]) -> None:
        """`written` are the tokens the target wrote where the draft guessed, as many as it wrote in the step."""
        if not written:
            return
        rates = self._shared.get(draft.source)
        if rates is None:
            rates = self._shared[draft.source] = list(PRIORS)
        kind = min(draft.evidence, ALIKE)
        own = self._own.get((seq_id, draft.source), rates[kind])
        for guess, token in zip(draft.tokens, written, strict=False):
            hit = 1.0 if guess == token else 0.0
            own += 2 * PATIENCE * (hit - own)
            rates[kind] += PATIENCE / 4 * (hit - rates[kind])
            if not hit:
                break
            if 0 < kind < ALIKE:
                kind += 1
        self._own[(seq_id, draft.source)] = own

    def trust(self, seq_id: int, source: str) -> float:
        """What the stated odds of this source are worth: came true / stated, of all sequences and of this one."""
        true, stated = self._trust.get((-1, source), NEUTRAL)
        own_true, own_stated = self._trust.get((seq_id, source), NEUTRAL)
        worth: float = (true / stated * own_true / own_stated) ** 0.5
        return 0.2 if worth < 0.2 else 1.2 if worth > 1.2 else worth

    def learn_odds(self, seq_id: int, draft: Draft, written: Sequence[int]) -> None:
        everybody, mine = (-1, draft.source), (seq_id, draft.source)
        true, stated = self._trust.get(everybody, NEUTRAL)
        own_true, own_stated = self._trust.get(mine, NEUTRAL)
        before = 1.0
        for guess, token, odds in zip(draft.tokens, written, draft.odds, strict=False):
            hit, odd = (
                guess == token,
                odds / before if odds < before else 1.0,
            )  # whatever is stated, no token is more than sure
            true, stated = LONG * true + LONG_NEUTRAL + hit, LONG * stated + LONG_NEUTRAL + odd
            own_true, own_stated = (
                SHORT * own_true + SHORT_NEUTRAL + hit,
                SHORT * own_stated + SHORT_NEUTRAL + odd,
            )
            before = odds
            if not hit:
                break
        self._trust[everybody], self._trust[mine] = (true, stated), (own_true, own_stated)

    def relax(self, seq_id: int, source: str) -> None:
        """Forget a little of a bad record, so that a guess which is only learnt from by making it gets another chance in time."""
        own = self._own.get((seq_id, source), PRIOR)
        self._own[(seq_id, source)] = own + PATIENCE * (PRIOR - own)
        true, stated = self._trust.get((-1, source), NEUTRAL)
        if true < DOUBTED * stated:
            self._trust[(-1, source)] = (
                SHORT * true + SHORT_NEUTRAL,
                SHORT * stated + SHORT_NEUTRAL,
            )

    def forget(self, seq_id: int) -> None:
        for key in [k for k in self._own if k[0] == seq_id]:
            del self._own[key]
        for key in [k for k in self._trust if k[0] == seq_id]:
            del self._trust[key]
