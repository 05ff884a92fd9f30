"""When a draft with stated probabilities pays (speculate/draft_policy.py)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from verbatim.base.params import SamplingParams
from verbatim.speculate.draft_policy import MARGIN, Speculator
from verbatim.speculate.proposer import Draft, SeqView
from verbatim.speculate.step_cost import StepCost


def view(
    tokens: Sequence[int], *, room: int = 100, seq_id: int = 0, temperature: float = 0.0
) -> SeqView:
    return SeqView(seq_id, tokens, 0, SamplingParams(temperature=temperature), 0, room)


class Stated:
    """A proposer that states probabilities. Its drafts are token 1; the output decides whether
    they are accepted."""

    name = "head"

    def __init__(self, odds: Sequence[float], cost: float = 1e-6) -> None:
        self.odds = tuple(odds)
        self.token_cost = cost
        self.states_probs = True
        self.asked = 0

    def propose(self, views: Sequence[SeqView], limit: int, floor: float = 0.0) -> dict[int, Draft]:
        self.asked += len(views)
        self.floor = floor
        return {v.seq_id: Draft((1,) * len(self.odds), "head", 0, self.odds) for v in views}

    def finish(self, view: SeqView) -> None: ...

    def close(self) -> None: ...


def speculator(proposer: Stated, row: float = 0.2) -> Speculator:
    """Steps of one row take 4 ms, and each further row `row` of that."""
    found = Speculator([proposer])
    for _ in range(300):
        for rows in (1, 2, 5):
            found.cost.learn(rows, 0.004 * (1 + row * (rows - 1)))
    return found


def test_only_drafts_whose_stated_probability_pays_are_submitted() -> None:
    for odds, count in (
        ((0.9, 0.5, 0.4, 0.1), 3),
        ((0.9, 0.2, 0.1), 1),
        ((0.2,), 0),
        ((0.99,) * 4, 4),
    ):
        proposer = Stated(odds)
        assert len(speculator(proposer).drafts([view([5])]).get(0, ())) == count, odds
        assert proposer.floor == pytest.approx(MARGIN * 0.2, rel=0.05), (
            "the proposer gets the lowest probability that pays"
        )
    dear = Stated((0.5, 0.5), cost=0.004 * 0.3)  # drafting costs 0.3 of a step, besides its row
    assert speculator(dear).drafts([view([5])]) == {}
    busy = Stated((0.9,) * 2)
    assert speculator(busy, row=0.9).drafts([view([5], seq_id=i) for i in range(2)]) == {}, (
        "compute-bound"
    )
    assert busy.asked == 0, "nothing is drafted where even a certain draft could not pay"


def test_a_draft_that_ends_overlapped_decoding_is_no_price_of_further_ones() -> None:
    """On a GPU: 0.5 ms per step, 0.8 with a draft, and next to nothing per further draft."""
    for odds, count in (
        ((0.9,), 0),
        ((0.9, 0.8), 2),
        ((0.95, 0.9, 0.8, 0.5), 4),
        ((0.3, 0.1, 0.03), 0),
    ):
        proposer = Stated(odds)
        found = Speculator([proposer])
        found.cost = StepCost(overlaps=True)
        for _ in range(100):
            found.cost.learn(1, 0.0005)
            for rows in (2, 5):
                found.cost.drafts.learn(rows, 0.0008)
        assert len(found.drafts([view([5])]).get(0, ())) == count, odds
        assert proposer.floor < 0.1


def test_unlikely_drafts_do_not_stop_the_proposer() -> None:
    """Probabilities change with every token: a draft that does not pay says nothing about the
    next."""
    proposer = Stated((0.1,))
    found = speculator(proposer)
    text = [5]
    for step in range(10):
        proposer.odds = (0.9,) if step % 2 else (0.1,)
        assert len(found.drafts([view(text)]).get(0, ())) == step % 2, step
        text = [*text, *((1, 5) if step % 2 else (5,))]
    assert proposer.asked == 10


def test_a_proposer_that_overstates_is_soon_not_trusted() -> None:
    """It states 0.6 and is never accepted; another states the same and is accepted six times in
    ten."""
    submitted = {}
    for honest in (True, False):
        found = speculator(Stated((0.6,)))
        r, text, counts = random.Random(1), [5], []
        for _ in range(200):
            counts.append(len(found.drafts([view(text)]).get(0, ())))
            text = [*text, 1 if honest and r.random() < 0.6 else 5]
        submitted[honest] = counts
    assert sum(submitted[True]) > 190
    assert sum(submitted[False][:40]) < 30
    assert sum(submitted[False][100:]) <= 5, "from time to time it gets another chance"


@pytest.mark.parametrize("stated", [1e38, float("inf"), float("nan"), 1.0])
def test_a_proposer_that_was_wrong_for_long_is_retried(stated: float) -> None:
    """The stated probabilities of one request, however absurd, must not end drafting for all."""
    proposer = Stated((stated,))
    found = speculator(proposer)
    for seq_id in range(20):
        for n in range(1, 60):
            found.drafts([view([5] * n, seq_id=seq_id)])
        found.finish(view([5] * 60, seq_id=seq_id))
    proposer.odds, submitted = (0.9,), 0
    for seq_id in range(20, 60):
        text = [5]
        for _ in range(60):
            submitted += len(found.drafts([view(text, seq_id=seq_id)]).get(seq_id, ()))
            text = [*text, 1]
        found.finish(view(text, seq_id=seq_id))
    assert submitted > 1000


def test_overstated_probabilities_cost_a_sequence_little() -> None:
    """Probabilities of 0.9 that are never accepted: the rate falls, and then only a probe in every
    MAX_BACKOFF steps is drafted."""
    proposer = Stated((0.9, 0.9, 0.9))
    found = speculator(proposer)
    text, drafted = [5], 0
    for _ in range(1000):
        drafted += len(found.drafts([view(text)._replace(drafted=drafted)]).get(0, ()))
        text = [*text, 5]
    assert 1 < 0.2 * drafted < 8, "tokens, of 1,000"
    assert proposer.asked < 100
    assert found.finish(view(text)._replace(drafted=drafted)) < 0
    assert not found.rates._own, "the record of the sequence is dropped"


def test_without_adaptation_every_draft_is_submitted() -> None:
    found = speculator(Stated((0.9, 0.9)))
    found.adaptive = False
    assert all(found.drafts([view([5] * n)]) for n in range(1, 200))
