"""The seam of the proposers. In: the tokens of a sequence. Out: a guess at what comes next, with the kind of evidence behind it.

A proposer may guess anything: the target draws its own token at every drafted position and commit() keeps a guess only where it
*is* that token. So a wrong proposer costs time, and no proposer can change an answer. What is no token at all is left out by the Speculator.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from verbatim.base.params import SamplingParams


class SeqView(NamedTuple):
    """What a proposer may see of one sequence. `tokens` is the live list of known tokens: read, never changed, never kept."""

    seq_id: int
    tokens: Sequence[int]
    prompt_len: int
    params: SamplingParams
    key: int  # the noise key: a draft model that draws with it agrees as often as it can
    room: int  # most drafts that could still be used (limits of length and cache)
    tenant: str = ""
    forced: tuple[int, ...] = ()  # what the request's grammar leaves no choice about
    ends: Collection[int] = ()  # tokens after which nothing is written
    drafted: int = 0  # drafts that the scheduler has put into steps so far,
    accepted: int = 0  # and those of them that gained a token


class Draft(NamedTuple):
    """A guess. `evidence` groups guesses of like reliability (the length of the match): acceptance is learnt for each group.
    `odds`, where the proposer can tell: the chance that each token and all before it come true."""

    tokens: tuple[int, ...]
    source: str
    evidence: int
    odds: tuple[float, ...] = ()

    def until(self, ends: Collection[int], vocab: int) -> Draft:
        """Without what follows the first of `ends`: what was said before often stands at the end of a message, and the copy goes no further either.
        Without the first id that is no token of the model, and what follows it."""
        for token in self.tokens:
            if token in ends or not 0 <= token < vocab:
                kept = self.tokens.index(token) + (token in ends)
                return self._replace(tokens=self.tokens[:kept], odds=self.odds[:kept])
        return self

    def gaining(self, count: int, ends: Collection[int]) -> tuple[int, ...]:
        """Of the first `count` those whose rows gain a token if they come true. Not an end: the target draws it from the token before it."""
        tokens = self.tokens[:count]
        return tokens[:-1] if tokens and tokens[-1] in ends else tokens


class Proposer(Protocol):
    name: str
    token_cost: float  # seconds that one guessed token costs to make, 0 where it is next to nothing
    states_odds: bool  # its drafts carry odds

    def propose(self, views: Sequence[SeqView], limit: int, floor: float = 0.0) -> dict[int, Draft]:
        """Guesses by sequence id; a sequence without a good guess is left out. Guesses with odds below `floor` are not worth making."""

    def finish(self, view: SeqView) -> None:
        """The sequence ended or was dropped: release what was kept for it."""

    def close(self) -> None: ...
