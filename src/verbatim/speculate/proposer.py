"""The interface of the proposers. In: the tokens of sequences. Out: drafts of the next tokens.

A proposer may draft anything: the target model draws its own token at every drafted position, and
commit() accepts a draft only where it equals that token. So a wrong draft costs time, and no
proposer can change the output. The Speculator removes ids that are not in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from verbatim.base.params import SamplingParams
from verbatim.base.records import StepPlan, StepResult


class SeqView(NamedTuple):
    """What a proposer may read of one sequence. `tokens` is the live list: never modify or keep
    it."""

    seq_id: int
    tokens: Sequence[int]
    prompt_len: int
    params: SamplingParams
    key: int  # the noise key; a draft model that draws with it agrees most often
    max_drafts: int  # by the limits of length and cache
    tenant: str = ""
    forced: tuple[int, ...] = ()  # tokens that the request's grammar fully determines
    end_ids: Collection[int] = ()  # tokens that end the completion
    drafted: int = 0  # tokens that the scheduler has submitted as drafts so far
    accepted: int = 0  # accepted drafts that gained a token
    probe: bool = False  # drafts do not pay by the rate so far: one is made, to learn the rate


class Draft(NamedTuple):
    """Drafted tokens. `match_length`: tokens of the earlier match that is copied; 0 without one.
    `probs`, where the proposer states them: the probability that each token and all before it are
    accepted."""

    tokens: tuple[int, ...]
    source: str
    match_length: int
    probs: tuple[float, ...] = ()

    def truncated(self, ends: Collection[int], vocab: int) -> Draft:
        """Cut after the first of `ends`, because the completion stops there, and before the first
        id that is not in the vocabulary."""
        for token in self.tokens:
            if token in ends or not 0 <= token < vocab:
                kept = self.tokens.index(token) + (token in ends)
                return self._replace(tokens=self.tokens[:kept], probs=self.probs[:kept])
        return self

    def useful(self, count: int, ends: Collection[int]) -> tuple[int, ...]:
        """The first `count` tokens without a final end token: accepting that one gains nothing,
        because the target draws it in the same step anyway."""
        tokens = self.tokens[:count]
        return tokens[:-1] if tokens and tokens[-1] in ends else tokens


class Proposer(Protocol):
    name: str
    token_cost: float  # seconds per drafted token; 0 if negligible
    states_probs: bool  # its drafts carry probs

    def propose(self, views: Sequence[SeqView], limit: int, floor: float = 0.0) -> dict[int, Draft]:
        """Drafts by sequence id; a sequence without a draft is left out. `floor`: tokens with an
        acceptance probability below it are not worth drafting."""

    def finish(self, view: SeqView) -> None:
        """The sequence ended: release its state."""

    def close(self) -> None: ...


@runtime_checkable
class Observer(Protocol):
    """A proposer that reads the target's final states, or those of captured layers."""

    name: str
    window: int  # the last so many positions of a prompt

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """A step is executed. Where a result has states that its step did not ask for, they are
        those of all its positions."""
