"""The scheduler's rules one by one: prefix cache, sliding windows, order of service, preemption,
drafts, capacity errors, finish conditions."""

from __future__ import annotations

import pytest
from schedule_rig import EOS, VOCAB, Rig

from verbatim.base.errors import CapacityError
from verbatim.base.params import SamplingParams
from verbatim.schedule import shares
from verbatim.schedule.prefix import PrefixChain, prefix_salt
from verbatim.schedule.sequence import Sequence
from verbatim.schedule.token_cost import ATTENTION_WEIGHT, TokenCost


def computed(rig: Rig, seq: Sequence) -> int:
    """Run until the sequence ends; the number of its tokens that were computed."""
    rows = 0
    while seq.id in rig.scheduler.sequences:
        rig.step()
        rows += sum(len(s.tokens) for s in rig.plan.sequences if s.seq_id == seq.id)
    return rows


# ------------------------------------------------------------------------------------- prefix cache


def test_a_prompt_sharing_900_of_1000_tokens_computes_at_most_116() -> None:
    rig = Rig(blocks=256, block_size=16, step_tokens=512)
    first = [3 + i % 30 for i in range(1000)]
    other = first[:900] + [2] * 100
    rig.add(first, 1)
    rig.run()
    (seq,) = rig.add(other, 1)
    assert computed(rig, seq) == 1000 - 896
    assert seq.cached_tokens == 896
    rig.at_rest()


def test_the_last_prompt_token_is_always_computed() -> None:
    rig = Rig()
    prompt = [1, 2, 3, 4] * 4
    rig.add(prompt, 4)
    rig.run()
    (seq,) = rig.add(prompt, 4)
    rig.step()
    assert seq.cached_tokens == 12
    rig.run()
    rig.at_rest()


def test_the_next_chat_turn_hits_the_previous_output() -> None:
    rig = Rig(blocks=64)
    (turn,) = rig.add([1] * 10, 30, min_tokens=29)
    rig.run()
    (following,) = rig.add([*turn.tokens, 5, 6], 4)
    rig.step()
    assert following.cached_tokens == (len(turn.tokens) - 1) // 4 * 4
    rig.run()
    rig.at_rest()


def test_tenants_do_not_share() -> None:
    rig = Rig()
    rig.add([1] * 20, 2, salt="one")
    rig.run()
    (other,) = rig.add([1] * 20, 2, salt="two")
    (same,) = rig.add([1] * 20, 2, salt="one")
    rig.run()
    assert (other.cached_tokens, same.cached_tokens) == (0, 16)


def test_the_salt_of_a_request_depends_on_tenant_cache_salt_and_adapter() -> None:
    salts = {
        prefix_salt(tenant, cache_salt, adapter)
        for tenant in ("", "a", "b")
        for cache_salt in ("", "a", "b")
        for adapter in ("", "a", "b")
    }
    assert len(salts) == 27


def test_block_hashes_depend_on_key_salt_and_all_earlier_tokens() -> None:
    chain, other_key = PrefixChain(4, b"a"), PrefixChain(4, b"b")
    tokens = list(range(12))
    hashes: list[bytes] = []
    chain.extend(hashes, chain.root(""), tokens, 3)
    for root, other, text in (
        (chain.root("x"), chain, tokens),
        (other_key.root(""), other_key, tokens),
        (chain.root(""), chain, [99, *tokens[1:]]),
    ):
        changed: list[bytes] = []
        other.extend(changed, root, text, 3)
        assert not set(hashes) & set(changed)


def test_prompt_logprobs_compute_every_position() -> None:
    rig = Rig()
    rig.add([1] * 20, 2)
    rig.run()
    (seq,) = rig.add([1] * 20, 2, prompt_logprobs=0)
    scored = []
    while seq.id in rig.scheduler.sequences:
        rig.step()
        scored += [
            (s.start + i, t)
            for s in rig.plan.sequences
            if s.seq_id == seq.id
            for i, t in enumerate(s.targets)
        ]
    assert seq.cached_tokens == 0
    assert scored == [(i, 1) for i in range(19)]


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    rig = Rig(blocks=12)
    for token in (1, 2):
        rig.add([token] * 17, 1)
        rig.run()
    rig.add([1] * 17, 1)  # used again: 2 is now the older one
    rig.run()
    rig.add([4] * 17, 1)
    rig.run()
    hits = []
    for token in (1, 2):
        (seq,) = rig.add([token] * 17, 1)
        rig.step()
        hits.append(seq.cached_tokens)
    assert hits[0] == 16
    assert hits[1] < 16


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    rig = Rig(blocks=12)
    rig.add([1] * 40, 1)
    rig.run()
    rig.add([4] * 20, 1)  # needs 5 blocks: 2 are free, 3 must be taken from the cached prefix
    rig.run()
    (seq,) = rig.add([1] * 40, 1)
    rig.step()
    assert seq.cached_tokens == 4 * (10 - 3)


# ---------------------------------------------------------------------------------- sliding windows


def test_a_windowed_group_holds_only_the_blocks_of_its_window() -> None:
    rig = Rig(windows=(9,), blocks=16, step_tokens=8)
    (seq,) = rig.add([1] * 20, 40, min_tokens=40)
    max_used = 0
    while seq.id in rig.scheduler.sequences:
        rig.step()
        max_used = max(max_used, rig.scheduler.cache.pools[0].used)
    # the window touches 3 blocks of 4, and a chunk of 8 tokens 2 or 3 more
    assert max_used <= 6
    assert len(seq.tokens) == 60
    rig.at_rest()


def test_full_attention_keeps_blocks_that_windowed_layers_release() -> None:
    rig = Rig(windows=(None, 9), blocks=16)
    (seq,) = rig.add([1] * 20, 20, min_tokens=20)
    while len(seq.tokens) < 39:
        rig.step()
    full, window = (sum(b >= 0 for b in table) for table in seq.blocks)
    assert full == 10
    assert window <= 4
    assert rig.plan.sequences[0].blocks[1][:6] == (-1,) * 6
    rig.run()
    rig.at_rest()


def test_a_prefix_hit_needs_only_the_window_of_a_windowed_group() -> None:
    rig = Rig(windows=(None, 9), blocks=64)
    rig.add([1] * 40, 1)
    rig.run()
    window = rig.scheduler.cache.pools[1]
    for block in [b for b, n in enumerate(window.hashes) if n is not None][:5]:
        del window.cached[block]  # the early blocks were evicted
        window._drop_hash(block)
        window.free.append(block)
    (seq,) = rig.add([1] * 40, 1)
    rig.step()
    assert seq.cached_tokens == 36
    rig.run()
    rig.at_rest()


# --------------------------------------------------------------------------------- order of service


def test_decoding_sequences_get_a_token_in_every_step_beside_a_long_prefill() -> None:
    rig = Rig(blocks=400, step_tokens=32)
    decodes = [rig.add([i] * 4, 200, min_tokens=200)[0] for i in range(8)]
    for _ in range(3):
        rig.step()
    (long,) = rig.add([9] * 900, 4)
    lengths = [len(w.tokens) for w in decodes]
    steps = 0
    while long.computed < 900:
        rig.step()
        steps += 1
        assert [len(w.tokens) for w in decodes] == [n + steps for n in lengths]
    assert steps == -(-900 // (32 - 8))


def test_sequences_behind_a_long_prefill_start_and_decode() -> None:
    """The long prompt is first in rank; later arrivals still start within three steps and then
    decode a token in every step."""
    rig = Rig(blocks=400, step_tokens=32)
    (long,) = rig.add([9] * 900, 4)
    rig.step()
    assert long.computed == 32  # alone: the whole step budget
    late = [rig.add([i] * 6, 200, min_tokens=200)[0] for i in range(4)]
    for _ in range(3):
        rig.step()
    assert all(len(seq.tokens) > 6 for seq in late)
    assert long.computed < 200
    lengths = [len(seq.tokens) for seq in late]
    for step in range(1, 11):
        rig.step()
        assert rig.plan.rows == 32
        assert [len(seq.tokens) for seq in late] == [n + step for n in lengths]
    assert long.computed < 900


def test_two_long_prefills_share_each_step() -> None:
    rig = Rig(blocks=800, step_tokens=32)
    first, second = rig.add([1] * 600, 1)[0], rig.add([2] * 600, 1)[0]
    for _ in range(10):
        rig.step()
    assert first.computed == second.computed == 160
    rig.run()
    rig.at_rest()


def chunks_beside_a_decode(
    windows: tuple[int | None, ...], cost: TokenCost, depth: int = 900
) -> list[tuple[int, int]]:
    """(start, tokens) of a long prefill's chunks beside a sequence that decodes in every step."""
    rig = Rig(blocks=400, step_tokens=33, windows=windows, cost=cost)
    (decode,) = rig.add([1] * 4, 900, min_tokens=900)
    rig.step()
    (long,) = rig.add([9] * depth, 4)
    chunks = []
    while long.computed < depth:
        known = len(decode.tokens)
        rig.step()
        assert len(decode.tokens) == known + 1
        chunks += [(s.start, len(s.tokens)) for s in rig.plan.sequences if s.seq_id == long.id]
    rig.abort(decode.id)
    rig.run()
    rig.at_rest()
    return chunks


def test_a_chunk_costs_the_same_at_every_depth_beside_a_decoding_sequence() -> None:
    """At depth 100 attention costs as much as the matrices: the 32 tokens beside the decoded one
    become 16 there, 8 at depth 300 and 4 at 700."""
    chunks = chunks_beside_a_decode((None,), TokenCost(100 * ATTENTION_WEIGHT, 1))
    assert chunks[0] == (0, 32)
    assert all(n == max(1, 3200 // (100 + start)) for start, n in chunks[:-1])
    assert {n for start, n in chunks if 690 < start <= 700} == {4}


def test_depth_beyond_a_window_costs_nothing() -> None:
    """One layer attends to 50 positions at most, the other to all: at depth 400 a token costs
    100 + 50 + 400."""
    chunks = chunks_beside_a_decode((None, 50), TokenCost(100 * ATTENTION_WEIGHT, 1))
    assert all(n == max(1, 3200 // (100 + min(start, 50) + start)) for start, n in chunks[:-1])
    windowed = chunks_beside_a_decode((50,), TokenCost(100 * ATTENTION_WEIGHT, 1))
    assert {n for start, n in windowed[:-1] if start >= 50} == {3200 // 150}


def test_a_lone_prefill_uses_the_whole_step_budget() -> None:
    rig = Rig(blocks=400, step_tokens=32, cost=TokenCost(1, 100))
    (long,) = rig.add([9] * 900, 1)
    assert computed(rig, long) == 900
    assert rig.steps == -(-900 // 32)


def test_every_running_sequence_gets_a_token_at_any_depth() -> None:
    """Expensive tokens neither push a running sequence out of a step nor exceed step_tokens."""
    rig = Rig(blocks=400, step_tokens=8, cost=TokenCost(1, 100))
    prefills = [rig.add([i] * 60, 4, priority=-i)[0] for i in range(4)]
    decodes = [rig.add([20 + i] * 2, 300, min_tokens=300, priority=-9)[0] for i in range(4)]
    while len(rig.scheduler.running) < 8:
        rig.step()
    while any(r.computed < 60 for r in prefills):
        rig.step()
        assert {s.seq_id for s in rig.plan.sequences} >= {w.id for w in decodes}
    for decode in decodes:
        rig.abort(decode.id)
    rig.run()
    rig.at_rest()


def test_sequences_run_by_priority_then_by_arrival() -> None:
    rig = Rig(max_running=1)
    names = {rig.add([1] * 4, 2)[0].id: "plain 1", rig.add([2] * 4, 2)[0].id: "plain 2"}
    names[rig.add([3] * 4, 2, priority=1)[0].id] = "late"
    names[rig.add([4] * 4, 2, priority=-1)[0].id] = "urgent"
    rig.run()
    assert [names[seq_id] for seq_id in rig.ended] == ["urgent", "plain 1", "plain 2", "late"]


def test_low_priority_does_not_starve_under_endless_urgent_traffic() -> None:
    rig = Rig(max_running=1, blocks=64)
    (patient,) = rig.add([1] * 4, 2, priority=3)
    for i in range(400):
        rig.add([i % 30] * 3, 1)
        rig.step()
        if patient.id in rig.ended:
            break
    assert patient.id in rig.ended
    assert i <= 3 * 64 + 8


def test_preemption_does_not_change_the_output() -> None:
    rig = Rig(blocks=12, step_tokens=64)
    for i in range(6):
        rig.add([i] * 5, 30, min_tokens=30)
    rig.run()
    assert rig.scheduler.preemptions > 0
    assert len(rig.ended) == 6
    rig.at_rest()


def test_admission_leaves_one_block_per_running_sequence() -> None:
    rig = Rig(blocks=10, prefix_cache=False)
    decodes = [rig.add([i] * 4, 8, min_tokens=8)[0] for i in (1, 2)]
    for _ in range(2):
        rig.step()  # two blocks each
    # Needs five blocks; six are free, but two of them are kept for the running sequences.
    (late,) = rig.add([3] * 17, 4, min_tokens=4)
    rig.step()
    assert late.computed == 0
    while late.computed == 0:
        rig.step()
    assert any(w.id in rig.ended for w in decodes)
    rig.run()
    assert rig.scheduler.preemptions == 0


def test_the_last_in_rank_is_preempted_and_the_first_never() -> None:
    rig = Rig(blocks=12, step_tokens=64, prefix_cache=False)
    rows = [rig.add([i] * 5, 40, min_tokens=40)[0] for i in range(6)]
    while not any(row.preemptions for row in rows):
        rig.step()
    assert [row.preemptions for row in rows] == [0, 0, 0, 1, 0, 0]  # four of them ran
    rig.run()
    assert rows[0].preemptions == 0


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    rig = Rig(blocks=10)
    # Positions 0 … 39 fill exactly ten blocks; the last token is drawn and never computed.
    rig.add([1] * 20, 21)
    with pytest.raises(CapacityError) as caught:
        rig.add([1] * 20, 22)
    for number in ("20 prompt tokens", "22 more", "11 cache blocks", "has 10"):
        assert number in str(caught.value)
    assert caught.value.status == 400
    rig.run()
    rig.at_rest()


def test_a_sliding_window_lets_a_long_sequence_fit_a_small_cache() -> None:
    rig = Rig(windows=(9,), blocks=4, step_tokens=64)
    rig.add([1] * 50, 60, min_tokens=60)
    rig.run()
    rig.at_rest()
    with pytest.raises(CapacityError, match="sliding window"):
        Rig(windows=(9,), blocks=2).add([1] * 50, 60)


@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("window_blocks", [60, 24, 12])
def test_a_long_prompt_is_not_preempted_for_tokens_of_decoding_sequences(
    window_blocks: int, logprobs: int | None
) -> None:
    """A chunk that takes every block of a windowed group would be preempted in the next step, by
    the first decoding sequence that needs one; with prompt_logprobs it starts again at 0."""
    rig = Rig(windows=(None, 9), blocks=(400, window_blocks), step_tokens=256)
    decodes = 6 if window_blocks > 12 else 1
    for i in range(decodes):
        rig.add([i] * 4, 200, min_tokens=200)
    for _ in range(3):
        rig.step()
    more = {} if logprobs is None else {"prompt_logprobs": logprobs}
    (late,) = rig.add(list(range(30)) * 20, 4, min_tokens=4, **more)
    steps = 0
    while late.id not in rig.ended:
        rig.step()
        steps += 1
        assert steps < 150
    assert rig.scheduler.preemptions == 0


def test_a_preempted_prompt_is_admitted_with_the_window_that_it_hits() -> None:
    """The window that a prefix hit holds counts as a part of the window that admission needs."""
    rig = Rig(windows=(None, 41), blocks=(400, 24), step_tokens=64)
    rig.add([1] * 50, 300, min_tokens=300)
    prompt = [i % 30 for i in range(400)]
    (first,) = rig.add(prompt, 1)
    while first.id not in rig.ended:
        rig.step()
    (late,) = rig.add([*prompt, 3, 4, 5], 4, min_tokens=4)
    for _ in range(20):
        rig.step()
    assert late.id in rig.ended


def test_a_step_scores_few_positions_however_large_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of logits for each of 8,192 positions would not fit beside the cache of a GPU."""
    monkeypatch.setattr(shares, "MAX_SCORES", 10)
    rig = Rig(step_tokens=200, blocks=200)
    scored = [rig.add([i] * 25, 4, min_tokens=4, prompt_logprobs=0)[0] for i in range(3)]
    (plain,) = rig.add([9] * 100, 4, min_tokens=4)
    most = 0
    while rig.step() is not None:
        assert rig.plan is not None
        most = max(most, sum(len(step.targets) for step in rig.plan.sequences))
    assert most == 10
    assert {seq.id for seq in (*scored, plain)} <= rig.ended.keys()
    assert all(seq.scored == 24 for seq in scored)


def test_more_choices_than_max_running_all_finish() -> None:
    rig = Rig(max_running=3, blocks=30)
    family = rig.add([1] * 10, 6, n=12)
    rig.run()
    assert len({tuple(s.tokens) for s in family}) > 6
    rig.at_rest()


def test_a_prompt_is_computed_once_for_all_its_choices() -> None:
    rig = Rig(blocks=60, prefix_cache=False)
    rig.add([1] * 21, 4, n=5)
    rows = 0
    while rig.backend.steps < 2:
        rig.step()
        rows += sum(len(s.tokens) for s in rig.plan.sequences)
    assert rows == 20 + 5  # the shared prompt once, its last token once per choice
    rig.run()
    rig.at_rest()


def test_aborting_the_first_choice_does_not_end_its_siblings() -> None:
    rig = Rig(step_tokens=4)
    family = rig.add([1] * 20, 4, n=3)
    rig.step()
    rig.abort(family[0].id)
    rig.abort(family[2].id)
    rig.run()
    assert family[1].id in rig.ended
    rig.at_rest()


# ------------------------------------------------------------------------------------------- drafts


def correct_drafts(rig: Rig, seq: Sequence, count: int) -> list[int]:
    return rig.oracle(seq)[len(seq.tokens) :][:count]


def test_correct_drafts_are_all_accepted_plus_one_token() -> None:
    rig = Rig()
    (seq,) = rig.add([1] * 6, 20, min_tokens=20)
    rig.step()
    rig.scheduler.set_drafts(seq.id, correct_drafts(rig, seq, 4))
    events = rig.step()
    assert len(events) == 5
    assert (seq.drafted, seq.accepted) == (4, 4)
    rig.run()
    rig.at_rest()


def test_rejected_drafts_leave_no_trace() -> None:
    rig, plain = Rig(prefix_cache=False), Rig(prefix_cache=False)
    (seq,), (twin,) = rig.add([1] * 6, 20, min_tokens=20), plain.add([1] * 6, 20, min_tokens=20)
    for _ in range(6):
        rig.scheduler.set_drafts(seq.id, [0] * 9)
        rig.step()
        plain.step()
        assert seq.tokens == twin.tokens
        assert seq.computed == twin.computed
        assert len(seq.blocks[0]) <= len(twin.blocks[0]) + 1
        assert rig.scheduler.cache.pools[0].used <= plain.scheduler.cache.pools[0].used + 1
    assert seq.accepted == 0
    rig.run()
    rig.at_rest()


@pytest.mark.parametrize("wrong", range(5))
def test_the_first_wrong_draft_ends_the_acceptance(wrong: int) -> None:
    rig = Rig()
    (seq,) = rig.add([1] * 6, 20, min_tokens=20)
    rig.step()
    drafts = correct_drafts(rig, seq, 5)
    drafts[wrong] = (drafts[wrong] + 1) % VOCAB
    truth = [*seq.tokens, *correct_drafts(rig, seq, wrong + 1)]
    rig.scheduler.set_drafts(seq.id, drafts)
    rig.step()
    assert seq.tokens == truth, "the drafts before it, and the token drawn in its place"
    assert (seq.drafted, seq.accepted) == (5, wrong)
    rig.run()
    rig.at_rest()


def test_an_end_token_among_accepted_drafts_ends_the_sequence_there() -> None:
    for prompt in range(200):
        rig = Rig()
        (seq,) = rig.add([prompt % 40, prompt // 40, 5], 24)
        truth = rig.oracle(seq)
        if truth[-1] == EOS and 4 <= len(truth) - 3 <= 8:
            break
    rig.step()
    rig.scheduler.set_drafts(seq.id, [*truth[4:], 1, 2, 3])
    events = rig.step()
    assert seq.tokens == truth
    assert events[-1].finish.reason == "stop"
    assert events[-1].finish.detail == "eos"
    rig.at_rest()


def test_drafts_use_only_the_budget_that_the_step_has_left() -> None:
    rig = Rig(step_tokens=8)
    first, second = rig.add([1] * 4, 30, min_tokens=30)[0], rig.add([2] * 4, 30, min_tokens=30)[0]
    rig.step()
    for seq in (first, second):
        rig.scheduler.set_drafts(seq.id, correct_drafts(rig, seq, 20))
    rig.step()
    # One token of the step is kept for the second sequence.
    assert [len(s.tokens) for s in rig.plan.sequences] == [7, 1]


def test_drafts_never_pass_the_limit() -> None:
    rig = Rig()
    (seq,) = rig.add([1] * 6, 5, min_tokens=5)
    rig.step()
    rig.scheduler.set_drafts(seq.id, correct_drafts(rig, seq, 20) + [1] * 20)
    rig.step()
    assert max(s.end for s in rig.plan.sequences) <= 10
    rig.run()
    assert len(seq.tokens) == 11
    rig.at_rest()


def test_the_drafts_of_one_step_do_not_cross_min_tokens() -> None:
    """All draws of a step withhold the same ids, so no step draws on both sides of min_tokens."""
    rig = Rig()
    (seq,) = rig.add([1] * 6, 30, min_tokens=7)
    while seq.id in rig.scheduler.sequences:
        rig.scheduler.set_drafts(seq.id, correct_drafts(rig, seq, 5))
        rig.step()
        (step,) = rig.plan.sequences
        if step.draws:
            # output tokens before each draw
            positions = range(step.end - step.draws + 1 - 6, step.end + 1 - 6)
            assert all(p < 7 for p in positions) == bool(step.draw.withheld)
            assert all(p >= 7 for p in positions) == (not step.draw.withheld)
    assert seq.accepted > 0
    rig.at_rest()


# -------------------------------------------------------------------------------- finish conditions


def test_end_ids_are_withheld_until_min_tokens() -> None:
    rig = Rig()
    (seq,) = rig.add([1] * 4, 30, min_tokens=10)
    rig.step()
    assert rig.plan.sequences[0].draw.withheld == (EOS,)
    while len(seq.tokens) < 14:
        rig.step()
    rig.step()
    assert rig.plan.sequences[0].draw.withheld == ()


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_max_tokens_zero_draws_no_token_and_one_draws_one(max_tokens: int) -> None:
    rig = Rig(step_tokens=3)
    (seq,) = rig.add([1] * 7, max_tokens)
    rig.run()
    event = rig.ended[seq.id]
    assert event.finish.reason in ("length", "stop")
    assert (event.drawn is None) == (max_tokens == 0)
    assert len(seq.tokens) == 7 + max_tokens
    rig.at_rest()


def test_only_sequences_with_penalties_carry_their_history() -> None:
    rig = Rig()
    rig.add([1] * 4, 3, min_tokens=3)
    rig.scheduler.add(Sequence(99, [1, 2, 3], SamplingParams(frequency_penalty=0.5), limit=8))
    rig.step()
    plain, penalised = rig.plan.sequences
    assert plain.draw.history == ()
    assert penalised.draw.history == (1, 2, 3)


def test_without_a_cache_every_step_computes_all_tokens() -> None:
    rig = Rig(use_cache=False, step_tokens=64)
    (seq,) = rig.add([1] * 10, 8, min_tokens=8)
    assert computed(rig, seq) == sum(range(10, 18))
    rig.at_rest()


def test_overlap_allocates_the_next_block_one_step_early() -> None:
    """A backend that launches the next step early finds the next position's block in every plan but
    the last."""
    for windows in ((None,), (None, 9)):
        rig = Rig(overlap=True, windows=windows)
        assert not Rig(overlap=True, use_cache=False).scheduler.overlap
        (seq,) = rig.add([1, 2, 3], 20, min_tokens=20)
        while rig.step() is not None:
            assert rig.plan is not None
            (step,) = rig.plan.sequences
            held = min(map(len, step.blocks)) * rig.scheduler.block_size
            assert (step.end < held) == (
                step.end + 1 < seq.limit or step.end % rig.scheduler.block_size != 0
            )
        rig.at_rest()


@pytest.mark.parametrize("more", [1, 3, 6])
def test_allocating_the_next_block_early_never_preempts(more: int) -> None:
    """With a cache that is almost full, early allocation causes no further preemption."""
    for first in range(12):
        found = []
        for overlap in (False, True):
            rig = Rig(blocks=3, overlap=overlap)
            rig.add([first, 2, 3], more)
            rig.add([1, 2, 3, 4], 3, min_tokens=3)
            rig.run()
            rig.at_rest()
            found.append(rig.scheduler.preemptions)
        assert found[1] <= found[0]
