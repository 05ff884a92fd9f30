"""The proposers against brute force, and the policy that decides how many drafts pay."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verbatim.backend.protocol import Backend
from verbatim.base.errors import ParameterError
from verbatim.base.params import SamplingParams
from verbatim.base.records import NOTHING, Drawn, SeqResult, StepPlan, StepResult
from verbatim.speculate.acceptance import AcceptanceRates
from verbatim.speculate.draft_model import DraftProposer
from verbatim.speculate.draft_policy import MAX_BACKOFF, Speculator, draft_length
from verbatim.speculate.ngram import MAX_NGRAM, MIN_NGRAM, NgramProposer, unroll
from verbatim.speculate.proposer import Draft, SeqView
from verbatim.speculate.step_cost import StepCost
from verbatim.speculate.suffix import CHUNK, MAX_TENANTS, SuffixAutomaton, SuffixProposer
from verbatim.testing.fakes import fake_spec

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def view(
    tokens: list[int], *, room: int = 100, seq_id: int = 0, tenant: str = "", prompt_len: int = 0
) -> SeqView:
    return SeqView(seq_id, tokens, prompt_len, SamplingParams(), 0, room, tenant)


def longest_earlier(tokens: list[int]) -> int:
    for length in range(len(tokens) - 1, 0, -1):
        if any(
            tokens[end - length : end] == tokens[-length:] for end in range(length, len(tokens))
        ):
            return length
    return 0


@given(texts)
def test_automaton_finds_the_longest_earlier_suffix(tokens: list[int]) -> None:
    automaton = SuffixAutomaton()
    for count, token in enumerate(tokens, 1):
        automaton.add(token)
        end, length = automaton.match()
        text = tokens[:count]
        assert length == longest_earlier(text)
        if length:
            assert length <= end < count
            assert text[end - length : end] == text[-length:]


@given(texts)
def test_an_ngram_draft_is_what_followed_the_latest_match(tokens: list[int]) -> None:
    draft = NgramProposer().propose([view(tokens)], 4).get(0)
    best = min(longest_earlier(tokens), MAX_NGRAM)
    if best < MIN_NGRAM:
        assert draft is None
        return
    assert draft is not None
    assert draft.match_length == best
    at = max(e for e in range(best, len(tokens)) if tokens[e - best : e] == tokens[-best:])
    assert draft.tokens == unroll(tokens, at, 4)


@given(texts, st.integers(1, 59))
def test_drafts_do_not_depend_on_how_the_sequence_was_read(tokens: list[int], cut: int) -> None:
    """Growing token by token, in one go, or after a rejected draft: the same index."""
    for make in (NgramProposer, SuffixProposer):
        whole = make().propose([view(tokens)], 6)
        grown = make()
        grown.propose([view(tokens[:cut])], 6)
        assert grown.propose([view(tokens)], 6) == whole


def test_a_long_prompt_is_read_in_chunks() -> None:
    """The other sequences of the step wait for it; the final draft is the same."""
    text, proposer = [*range(5, 3 * CHUNK), 5, 6, 7], SuffixProposer()
    assert [proposer.propose([view(text)], 3) for _ in range(2)] == [{}, {}]
    assert proposer.propose([view(text)], 3)[0] == Draft((8, 9, 10), "suffix", 3)
    assert proposer.propose([view([*text, 8])], 3)[0] == Draft((9, 10, 11), "suffix", 4)


def test_max_drafts_and_limit_are_respected() -> None:
    tokens = [1, 2, 3, 1, 2]
    for make in (NgramProposer, SuffixProposer):
        assert make().propose([view(tokens, room=2)], 10)[0].tokens == (3, 1)
        assert make().propose([view(tokens)], 5)[0].tokens == (3, 1, 2, 3, 1)
        assert make().propose([view(tokens, room=0)], 5) == {}


def test_nothing_is_drafted_after_an_end_token() -> None:
    """A passage copied from a message ends where the message did; the tokens after it are no
    draft."""
    text = [5, 6, 7, 8, 99, 3, 4, 5, 6]
    speculator = Speculator([SuffixProposer()], adaptive=False)
    assert speculator.drafts([view(text)]) == {0: (7, 8, 99, 3, 4, 5, 6, 7, 8, 99, 3, 4, 5, 6, 7)}
    assert speculator.drafts([view(text, seq_id=1)._replace(end_ids={99: "eos"})]) == {1: (7, 8)}, (
        "the target ends it by itself"
    )
    assert Draft((7, 99, 8), "head", 0, (0.9, 0.8, 0.7)).truncated((99,), 100) == Draft(
        (7, 99), "head", 0, (0.9, 0.8)
    )
    ended = view([*text, 7, 8], seq_id=2)._replace(end_ids={99: "eos"})
    assert (
        Speculator([SuffixProposer(), FixedProposer(5, 6)], adaptive=False).drafts([ended]) == {}
    ), "a good draft whose rows do not pay"


class Counting:
    """A model that writes 11, 12, 13 and so on: each token is one more than the one before."""

    block_size = 16
    launcher = None
    spec = fake_spec(context=40)

    def available_memory(self) -> None:
        return None

    def block_bytes(self) -> tuple[int, ...]:
        return (1,)

    def allocate(self, blocks: tuple[int, ...]) -> None: ...

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(
            plan.step,
            tuple(SeqResult(s.seq_id, (Drawn(s.tokens[-1] + 1, 0.0),)) for s in plan.sequences),
        )


def test_a_draft_model_stops_where_it_ends_the_text() -> None:
    proposer = DraftProposer(cast("Backend", Counting()), blocks=8)
    found = proposer.propose([view([10]), view([10], seq_id=1)._replace(end_ids={12: "eos"})], 5)
    assert [found[i].tokens for i in (0, 1)] == [(11, 12, 13, 14, 15), (11, 12)]


def test_a_draft_model_stops_where_bans_leave_it_nothing_to_draw() -> None:
    class Exhausted(Counting):
        def execute(self, plan: StepPlan) -> StepResult:
            done = super().execute(plan)
            return done._replace(
                sequences=tuple(
                    r if r.drawn[0].token < 13 else r._replace(drawn=(Drawn(NOTHING, 0.0),))
                    for r in done.sequences
                )
            )

    proposer = DraftProposer(cast("Backend", Exhausted()), blocks=8)
    found = proposer.propose([view([10]), view([12], seq_id=1), view([5], seq_id=2)], 5)
    assert {i: draft.tokens for i, draft in found.items()} == {0: (11, 12), 2: (6, 7, 8, 9, 10)}


def test_a_draft_model_drafts_nothing_beyond_its_context() -> None:
    positions: list[int] = []

    class Watched(Counting):
        def execute(self, plan: StepPlan) -> StepResult:
            positions.extend(s.start + len(s.tokens) - 1 for s in plan.sequences)
            return super().execute(plan)

    proposer = DraftProposer(cast("Backend", Watched()), blocks=8)
    found = proposer.propose([view([10] * n, seq_id=n) for n in (10, 36, 40, 41, 60)], 8)
    assert {i: len(draft.tokens) for i, draft in found.items()} == {10: 8, 36: 5, 40: 1}
    assert max(positions) == 39
    assert proposer.propose([view([10] * 41, seq_id=40)], 8) == {}, "a text that grew beyond it"
    assert set(proposer._cached) == {10, 36}, "and gives its blocks back"


def test_a_draft_kv_cache_that_does_not_fit_is_a_clear_error() -> None:
    class Full(Counting):
        def allocate(self, blocks: tuple[int, ...]) -> None:
            raise MemoryError

    with pytest.raises(
        ParameterError,
        match="speculate: the draft model's KV cache of 8 MiB does not fit into memory",
    ):
        DraftProposer(cast("Backend", Full()), blocks=8 << 20)


class FixedProposer:
    """A proposer that returns the given drafts."""

    name, token_cost, states_probs = "saying", 0.0, False

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def propose(self, views: Sequence[SeqView], limit: int, floor: float = 0.0) -> dict[int, Draft]:
        return {v.seq_id: Draft(self.tokens, self.name, 0) for v in views}

    def finish(self, view: SeqView) -> None: ...

    def close(self) -> None: ...


def test_ids_outside_the_vocabulary_are_never_submitted() -> None:
    for said, submitted in (((5, -1, 6), (5,)), ((5, 6, 260), (5, 6)), ((259, 0), (259, 0))):
        assert Speculator([FixedProposer(*said)], adaptive=False, vocab=260).drafts(
            [view([1])]
        ) == {0: submitted}
    for said in ((-1,), (260, 5), ()):
        assert (
            Speculator([FixedProposer(*said)], adaptive=False, vocab=260).drafts([view([1])]) == {}
        )


def test_recent_answers_serve_only_their_own_tenant_and_only_when_asked() -> None:
    proposer = SuffixProposer(remember=frozenset({"a"}))
    answer = [9, 9, 5, 6, 7, 8, 4]
    for seq_id, tenant in ((1, "a"), (2, "b")):
        done = view(answer, seq_id=seq_id, tenant=tenant, prompt_len=2)
        proposer.propose([done], 4)
        proposer.finish(done)
    assert proposer.propose([view([1, 5, 6], seq_id=3, tenant="a")], 3)[3].tokens == (7, 8, 4)
    assert proposer.propose([view([1, 5, 6], seq_id=6, tenant="a")], 9)[6].tokens == (7, 8, 4), (
        "a draft ends with the completion it is copied from"
    )
    assert proposer.propose([view([8, 4], seq_id=7, tenant="a")], 9) == {}
    assert proposer.propose([view([1, 5, 6], seq_id=4, tenant="b")], 3) == {}
    assert proposer.propose([view([1, 9, 9], seq_id=5, tenant="a")], 3) == {}, (
        "prompts are not remembered"
    )


def test_the_least_recent_tenants_are_forgotten() -> None:
    proposer = SuffixProposer(remember=frozenset("*"))

    def draft_for(seq_id: int, tenant: str) -> dict[int, Draft]:
        return proposer.propose([view([1, 5, 6], seq_id=seq_id, tenant=tenant)], 3)

    for i in range(3 * MAX_TENANTS):
        proposer.finish(view([5, 6, 7, 8], seq_id=i, tenant=f"tenant {i}"))
        assert draft_for(-1 - i, "tenant 0"), "an active tenant is kept"
    assert len(proposer._recent) == MAX_TENANTS
    assert draft_for(1, f"tenant {2 * MAX_TENANTS}") == {}
    assert draft_for(2, f"tenant {3 * MAX_TENANTS - 1}")[2].tokens == (7, 8)
    named = SuffixProposer(remember=frozenset(f"tenant {i}" for i in range(2 * MAX_TENANTS)))
    for i in range(2 * MAX_TENANTS):
        named.finish(view([5, 6, 7, 8], seq_id=i, tenant=f"tenant {i}"))
    assert len(named._recent) == 2 * MAX_TENANTS, "named tenants are kept"


def test_step_cost_recovers_the_line() -> None:
    cost = StepCost()
    assert cost.seconds(1) == 0, "nothing is measured"
    for _ in range(300):
        for rows in (9, 1, 300, 5, 2):  # the order in which sizes are first seen says nothing
            cost.learn(rows, 0.004 + 0.0005 * rows)
    assert abs(cost.seconds(1) - 0.0045) < 1e-5
    assert abs(cost.price(1) * cost.seconds(1) - 0.0005) < 1e-5
    assert abs(cost.seconds(7) - 0.0075) < 2e-5, "between two sizes that were seen"


def test_step_cost_keeps_jumps_in_the_curve() -> None:
    """A kernel tile of 8 rows, which the ninth row exceeds: the eighth draft costs more than the
    seventh."""
    cost = StepCost()
    for _ in range(100):
        for rows in (1, 2, 4, 8, 9, 16):
            cost.learn(rows, 0.003 if rows <= 8 else 0.006)
    assert cost.seconds(9) - cost.seconds(8) > 0.002


@given(st.lists(st.tuples(st.integers(1, 80), st.floats(0.001, 0.1)), min_size=2))
def test_more_rows_never_take_less(steps: list[tuple[int, float]]) -> None:
    cost = StepCost()
    for rows, seconds in steps:
        cost.learn(rows, seconds)
    times = [cost.seconds(rows) for rows in range(1, 100)]
    assert all(more >= less * (1 - 1e-12) for less, more in itertools.pairwise(times))
    assert cost.price(1) == (times[1] - times[0]) / times[0]


def test_a_slow_second_does_not_make_drafts_look_free() -> None:
    """Steps of one row are measured all the time, of four seldom. When everything takes twice as
    long, a row still costs its share."""
    cost = StepCost()
    for _ in range(50):
        cost.learn(1, 0.004)
        cost.learn(4, 0.004 + 3 * 0.0008)
    for _ in range(200):
        cost.learn(1, 0.008)
    assert abs(cost.seconds(1) - 0.008) < 1e-3
    assert 0.7 < cost.price(1) / 0.2 < 1.3


def test_draft_length_by_the_rule() -> None:
    rows = range(1, 17)
    chances = {rate: [rate**j for j in rows] for rate in (0.0, 0.8, 1.0)}
    cheap = [0.3 * j for j in rows]
    assert draft_length(chances[0.8], 4.0, cheap) == 9
    assert draft_length(chances[0.8], 4.0, [4.0 * j for j in rows]) == 0, (
        "a compute-bound batch drafts nothing"
    )
    assert draft_length(chances[1.0], 4.0, cheap) == 16
    assert draft_length(chances[0.0], 4.0, cheap) == 0
    stepped = [0.3 * j + 9 * (j > 7) for j in rows]
    assert draft_length(chances[0.8], 4.0, stepped) == 7, (
        "a step in the cost is not climbed for little"
    )


def test_acceptance_is_learnt_from_drafts_that_were_not_submitted() -> None:
    speculator = Speculator([NgramProposer()])
    for _ in range(40):
        speculator.cost.learn(1, 0.004)
        speculator.cost.learn(8, 0.016)  # rows are expensive: only good drafts pay
    repeating = [1, 2, 3, 4] * 4
    lengths = []
    for _ in range(60):
        lengths.append(len(speculator.drafts([view(repeating)]).get(0, ())))
        for _ in range(1 + lengths[-1]):  # what came true, and one token more
            repeating = [*repeating, repeating[-4]]
    assert lengths[-1] >= 2, "a text that keeps repeating itself earns drafts"
    surprising, lengths = [1, 2, 9, 1, 2], []
    for step in range(200):
        lengths.append(len(speculator.drafts([view(surprising, seq_id=1)]).get(1, ())))
        surprising = [*surprising, 100 + step, 1, 2]
    assert sum(lengths[100:]) == 0, "drafts that are never accepted are no longer submitted"


def test_a_sequence_whose_drafts_are_never_accepted_loses_little() -> None:
    """Every draft of other sequences is accepted, none of this one: its own rate and the back-off
    end drafting."""
    speculator = Speculator([NgramProposer()])
    for _ in range(40):
        speculator.cost.learn(1, 0.0040)
        speculator.cost.learn(2, 0.0048)
    speculator.rates._shared["ngram"] = 1.0
    text, lost, drafted = [1, 2, 9, 1, 2], 0.0, 0
    for step in range(400):
        rows = len(speculator.drafts([view(text)._replace(drafted=drafted)]).get(0, ()))
        drafted += rows
        lost += speculator.cost.seconds(1 + rows) / speculator.cost.seconds(1) - 1
        text = [*text, 100 + step, 1, 2]
    assert 1 < lost < 8, "tokens, of 1,200"


def test_the_time_saved_by_drafts_is_reported_at_the_end() -> None:
    """Three accepted drafts save the time of three tokens less the cost of their rows; a
    rejected one costs its row. The scheduler's counts decide what was submitted and accepted."""
    for text, came in (([1, 2, 3, 4] * 4, 1.0), ([1, 2, 3, 4] * 4, 0.5), ([1, 2, 9, 1, 2], 0.0)):
        speculator = Speculator([NgramProposer()])
        for _ in range(300):
            for rows in (1, 2, 16):
                speculator.cost.learn(rows, 0.0040 + 0.0008 * (rows - 1))
        drafts = speculator.drafts([view(text)])[0]
        rows, won = len(drafts), int(came * len(drafts))
        saved = speculator.finish(
            view([*text, *(drafts or (77,))])._replace(drafted=rows, accepted=won)
        )
        assert abs(saved - (won * 0.004 - rows * 0.0008)) < 1e-4
        assert (saved > 0) == (won > 0)


def _four_decoding(dear: bool) -> Speculator:
    speculator = Speculator([NgramProposer()])
    for _ in range(100):
        for rows in (1, 4, 5, 8, 16):
            speculator.cost.learn(rows, 0.004 + (0.0005 if dear else 0.00002) * rows)
    return speculator


def test_drafts_of_one_sequence_do_not_slow_the_others() -> None:
    """Four sequences decode and one repeats itself: its drafts would gain it much and cost the
    others time. All four may draft together."""
    repeating, other = [1, 2, 3, 4] * 4, [5, 6, 7, 8, 9]
    speculator = _four_decoding(dear=True)
    speculator.rates.probs = lambda seq_id, draft, limit: [  # type: ignore[method-assign]
        0.9**j for j in range(1, limit + 1)
    ]
    assert speculator.drafts([view(repeating), *(view(other, seq_id=i) for i in (1, 2, 3))]) == {}
    assert set(speculator.drafts([view(repeating, seq_id=i) for i in range(4)])) == {0, 1, 2, 3}
    assert speculator.drafts([view(repeating)]) != {}, "alone it drafts"


def test_lookups_without_a_result_back_off_exponentially() -> None:
    speculator, asked = _four_decoding(dear=True), []
    proposer = speculator.proposers[0]
    propose = proposer.propose
    proposer.propose = lambda views, limit, floor=0.0: (
        asked.append(1) or propose(views, limit, floor)
    )  # type: ignore[method-assign,func-returns-value]
    for step in range(400):
        if speculator.should_draft(4):
            speculator.drafts([view([step, i, 7], seq_id=i) for i in range(4)])
    assert 8 <= len(asked) < 24
    assert 0 < speculator._skip <= MAX_BACKOFF, "years of steps later it still looks now and then"
    before = len(asked)
    for step in range(20):
        assert speculator.should_draft(1)
        speculator.drafts([view([step, 7], seq_id=9)])
    assert len(asked) == before + 20, "one that writes alone is looked at in every step"


def test_nothing_is_drafted_before_a_step_is_measured() -> None:
    speculator, text = Speculator([NgramProposer()]), [1, 2, 3, 4] * 4
    assert speculator.drafts([view(text)]) == {}
    speculator.cost.learn(1, 0.004)
    assert speculator.drafts([view(text)]) != {}, "one size, and a default for the cost of a row"


def test_no_lookup_where_not_even_a_certain_draft_would_pay() -> None:
    speculator = Speculator([NgramProposer()])
    assert speculator.should_draft(16), "nothing is known yet"
    for _ in range(100):
        for rows in (1, 4, 16, 20):
            speculator.cost.learn(rows, 0.004 + 0.0005 * rows)
    assert speculator.should_draft(4)  # a row costs a third of a token
    assert not speculator.should_draft(16)  # 16 x 0.5 ms, where a step takes 12
    speculator.adaptive = False
    assert speculator.should_draft(16)


def test_finished_sequences_leave_no_state() -> None:
    speculator = Speculator([NgramProposer(), SuffixProposer()])
    done = view([1, 2, 3, 1, 2])
    speculator.drafts([done])
    speculator.finish(done)
    assert not speculator._records
    assert not speculator.rates._own
    assert all(
        not getattr(p, "_index", None) and not getattr(p, "_texts", None)
        for p in speculator.proposers
    )


def test_a_new_sequence_starts_with_the_rate_of_all() -> None:
    rates = AcceptanceRates()
    draft = Draft((5,), "ngram", 3)
    for seq_id in range(200):
        rates.learn(seq_id, draft, (6,))
    assert rates.probs(999, draft, 1)[0] < 0.1


def test_stated_probabilities_are_multiplied_by_accepted_per_stated() -> None:
    """It states 0.8 per token; half of that is accepted."""
    rates, draft = AcceptanceRates(), Draft((5, 6), "head", 0, (0.8, 0.64))
    assert rates.probs(0, draft, 2) == [0.8, 0.64]
    for seq_id in range(500):
        rates.learn(seq_id, draft, (5, 9) if seq_id % 5 < 2 else (9,))
    first, second = rates.probs(999, draft, 2)
    assert 0.25 < first < 0.55
    assert second == pytest.approx(0.8 * first)
