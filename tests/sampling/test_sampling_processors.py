"""Each stage against its definition: transformers' processor where there is one (1,000 random rows
each), else a second implementation of the published rule. Differences from transformers are stated
in the tests."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sampling_rows import bits, processed, softmax
from verbatim.base.params import FIELDS, FILTERS, SamplingParams
from verbatim.sampling.dry_breakers import breakers_of
from verbatim.sampling.penalties import breaker_flags, repeat_lengths

ROWS, VOCAB = 350, 120


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    """Rows with distinct values; ties have their own tests."""
    rng = np.random.default_rng(11)
    out = (rng.normal(size=(ROWS, VOCAB)) * rng.uniform(0.5, 5, size=(ROWS, 1))).astype(np.float32)
    assert all(len(set(row.tolist())) == VOCAB for row in out)
    return out


@pytest.fixture(scope="module")
def histories() -> list[tuple[int, ...]]:
    """Twelve prompt and up to forty output tokens over nine ids, so that they repeat."""
    rng = np.random.default_rng(12)
    return [
        tuple(int(t) for t in rng.integers(0, 9, int(rng.integers(13, 52)))) for _ in range(ROWS)
    ]


def theirs(processor: Any, logits: np.ndarray, history: tuple[int, ...] = (0,)) -> np.ndarray:
    import torch

    scores = torch.tensor(logits, dtype=torch.float64)[None]
    return np.asarray(processor(torch.tensor([history]), scores)[0])


def kept(scores: np.ndarray) -> list[int]:
    return np.flatnonzero(scores > -np.inf).tolist()


# ----------------------------------------------------------------------------- against transformers


@pytest.mark.torch
@pytest.mark.parametrize(
    ("field", "values", "name"),
    [
        ("top_k", [1, 2, 7, 50, 500], "TopKLogitsWarper"),
        ("top_p", [0.01, 0.3, 0.5, 0.9, 0.999], "TopPLogitsWarper"),
        ("min_p", [0.001, 0.05, 0.2, 0.9, 1.0], "MinPLogitsWarper"),
        ("typical_p", [0.05, 0.2, 0.5, 0.9, 0.99], "TypicalLogitsWarper"),
    ],
)
def test_filters_keep_what_transformers_keeps(
    rows: np.ndarray, field: str, values: list[Any], name: str
) -> None:
    from transformers.generation import logits_process

    for i, row in enumerate(rows):
        value = values[i % len(values)]
        want = theirs(getattr(logits_process, name)(value), row)
        state = processed(row, SamplingParams(**{field: value}))
        assert state.ids.tolist() == kept(want), (i, value)
        np.testing.assert_allclose(
            state.d - state.d.max(), want[state.ids] - want.max(), atol=1e-12
        )


@pytest.mark.torch
def test_temperature_equals_transformers(rows: np.ndarray) -> None:
    from transformers.generation.logits_process import TemperatureLogitsWarper

    for i, row in enumerate(rows):
        t = [0.1, 0.7, 1.0, 1.5, 10.0][i % 5]
        want = theirs(TemperatureLogitsWarper(t), row)
        np.testing.assert_allclose(
            processed(row, SamplingParams(temperature=t)).d,
            want - want.max(),
            rtol=1e-12,
            atol=1e-12,
        )


@pytest.mark.torch
def test_repetition_penalty_covers_prompt_and_output(
    rows: np.ndarray, histories: list[tuple[int, ...]]
) -> None:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    for i, row in enumerate(rows):
        r = [0.8, 1.1, 1.3, 2.0][i % 4]
        want = theirs(RepetitionPenaltyLogitsProcessor(r), row, histories[i])
        state = processed(
            row, SamplingParams(repetition_penalty=r), history=histories[i], prompt_len=12
        )
        np.testing.assert_allclose(state.logits, want, rtol=1e-12)


@pytest.mark.torch
def test_no_repeat_ngram_equals_transformers(
    rows: np.ndarray, histories: list[tuple[int, ...]]
) -> None:
    from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

    removed = 0
    for i, row in enumerate(rows):
        n = [1, 2, 3, 4, 60][i % 5]
        want = theirs(NoRepeatNGramLogitsProcessor(n), row, histories[i])
        state = processed(
            row, SamplingParams(no_repeat_ngram=n), history=histories[i], prompt_len=12
        )
        assert state.ids.tolist() == kept(want)
        removed += VOCAB - len(state.ids)
    assert removed > 2 * ROWS  # the histories contain repeats


@pytest.mark.torch
def test_bias_and_bans_equal_transformers(rows: np.ndarray) -> None:
    from transformers.generation.logits_process import (
        MinNewTokensLengthLogitsProcessor,
        PrefixConstrainedLogitsProcessor,
        SequenceBiasLogitsProcessor,
        SuppressTokensLogitsProcessor,
    )

    rng = np.random.default_rng(13)
    for i, row in enumerate(rows):
        some = [int(t) for t in rng.choice(VOCAB, 5, replace=False)]
        bias = {t: float(b) for t, b in zip(some, rng.normal(size=5) * 5, strict=True)}
        want = theirs(SequenceBiasLogitsProcessor({(t,): b for t, b in bias.items()}), row)
        # transformers adds in float32
        np.testing.assert_allclose(
            processed(row, SamplingParams(logit_bias=bias)).logits, want, atol=1e-6
        )
        want = theirs(SuppressTokensLogitsProcessor(some), row)
        assert processed(row, SamplingParams(banned_token_ids=some)).ids.tolist() == kept(want)
        want = theirs(PrefixConstrainedLogitsProcessor(lambda *_, some=some: some, 1), row)
        assert processed(row, SamplingParams(allowed_token_ids=some)).ids.tolist() == kept(want)
        assert processed(row, SamplingParams(), mask=bits(some, VOCAB)).ids.tolist() == kept(want)
        prompt, written = 4, i % 6
        want = theirs(
            MinNewTokensLengthLogitsProcessor(prompt, 3, some), row, (0,) * (prompt + written)
        )
        state = processed(
            row,
            SamplingParams(min_tokens=3),
            withheld=tuple(some),
            prompt_len=prompt,
            position=prompt + written,
        )
        assert state.ids.tolist() == kept(want)


@pytest.mark.torch
def test_at_ties_top_k_keeps_exactly_k_and_transformers_more() -> None:
    """Documented difference: exactly k ids stay, a tie goes to the lower id."""
    from transformers.generation.logits_process import TopKLogitsWarper

    row = np.array([1.0, 3.0, 2.0, 2.0, 2.0, 0.0], np.float32)
    assert kept(theirs(TopKLogitsWarper(2), row)) == [1, 2, 3, 4]
    assert processed(row, SamplingParams(top_k=2)).ids.tolist() == [1, 2]
    assert processed(row, SamplingParams(top_k=4)).ids.tolist() == [1, 2, 3, 4]


def test_at_ties_top_p_and_typical_p_keep_the_smallest_set() -> None:
    row = np.zeros(10, np.float32)
    assert processed(row, SamplingParams(top_p=0.3)).ids.tolist() == [0, 1, 2]
    assert processed(row, SamplingParams(top_p=0.30001)).ids.tolist() == [0, 1, 2, 3]
    assert processed(row, SamplingParams(typical_p=0.5)).ids.tolist() == [0, 1, 2, 3, 4]
    # Long enough that an unstable sort would fail.
    many = np.tile(np.array([1.0, 0.0, 1.0, -1.0], np.float32), 300)
    likely = [i for i in range(1200) if i % 2 == 0]
    assert (
        processed(many, SamplingParams(top_p=0.4)).ids.tolist()
        == likely[: len(processed(many, SamplingParams(top_p=0.4)).ids)]
    )
    assert (
        processed(many, SamplingParams(typical_p=0.3)).ids.tolist()
        == likely[: len(processed(many, SamplingParams(typical_p=0.3)).ids)]
    )
    removed_ids = set(range(1200)) - set(
        processed(many, SamplingParams(xtc_probability=1.0, xtc_threshold=0.001)).ids.tolist()
    )
    assert removed_ids == set(likely[:-1])


# ----------------------------------------------------------------------- against published formulas


def test_frequency_and_presence_follow_openais_formula(
    rows: np.ndarray, histories: list[tuple[int, ...]]
) -> None:
    """mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence; c counts the
    output only."""
    rng = np.random.default_rng(14)
    for row, history in zip(rows, histories, strict=True):
        frequency, presence = (float(v) for v in rng.uniform(-2, 2, 2))
        c = Counter(history[12:])
        want = np.array(
            [float(v) - c[j] * frequency - float(c[j] > 0) * presence for j, v in enumerate(row)]
        )
        params = SamplingParams(frequency_penalty=frequency, presence_penalty=presence)
        np.testing.assert_allclose(
            processed(row, params, history=history, prompt_len=12).logits, want, atol=1e-12
        )


def test_the_penalties_look_back_as_far_as_penalty_range(
    rows: np.ndarray, histories: list[tuple[int, ...]]
) -> None:
    """A window equals a history that begins with it: of the prompt, the part in the window."""
    for i, (row, history) in enumerate(zip(rows, histories, strict=True)):
        window = (1, 5, len(history) - 12, len(history) - 4, 10_000)[i % 5]
        start = max(0, len(history) - window)
        for name, value in (
            ("repetition_penalty", 1.7),
            ("frequency_penalty", 0.7),
            ("presence_penalty", -1.5),
        ):
            params = SamplingParams(**{name: value})
            short, prompt = history[start:], max(0, 12 - start)
            want = processed(row, params, history=short, prompt_len=prompt).logits
            params = params.with_(penalty_range=window)
            found = processed(row, params, history=history, prompt_len=12).logits
            assert (found == want).all(), (name, window)


def naive_dry(text: list[int], breakers: set[int], p: SamplingParams) -> dict[int, float]:
    """The published rule: per id, the longest suffix of the tokens that also precedes an earlier
    occurrence of the id."""
    text = text[-p.dry_range :] if p.dry_range else text
    out: dict[int, float] = {}
    for at in range(1, len(text)):
        n = 0
        while n < at and text[at - 1 - n] == text[-1 - n] and text[-1 - n] not in breakers:
            n += 1
        if n >= p.dry_allowed_length and text[at] not in breakers:
            loss = p.dry_multiplier * p.dry_base ** (n - p.dry_allowed_length)
            out[text[at]] = max(out.get(text[at], 0.0), loss)
    return out


def test_dry_equals_the_published_rule(rows: np.ndarray) -> None:
    rng = np.random.default_rng(15)
    penalised = 0
    for row in rows:
        text = [int(t) for t in rng.integers(0, 3, int(rng.integers(1, 60)))]
        params = SamplingParams(
            dry_multiplier=float(rng.uniform(0.1, 3)),
            dry_base=float(rng.uniform(1, 3)),
            dry_allowed_length=int(rng.integers(1, 5)),
            dry_range=int(rng.choice([0, 0, 10, 25])),
        )
        breakers = {2} if rng.random() < 0.3 else set()
        state = processed(row, params, history=tuple(text), breakers=tuple((b,) for b in breakers))
        loss = naive_dry(text, breakers, params)
        want = np.array([float(v) - loss.get(j, 0.0) for j, v in enumerate(row)])
        np.testing.assert_allclose(state.logits, want, rtol=1e-9)
        penalised += len(loss)
    assert penalised > ROWS // 2


def test_dry_growth_is_bounded() -> None:
    """A repeat counts up to allowed_length + 63: the penalty is always finite."""
    row = np.zeros(10, np.float32)
    state = processed(
        row,
        SamplingParams(dry_multiplier=1.0, dry_base=8.0, dry_allowed_length=2),
        history=(5,) * 3000,
    )
    assert state.logits[5] == -(8.0**63)
    assert len(state.ids) == 10


@given(
    st.lists(st.integers(0, 2), min_size=0, max_size=40),
    st.sets(st.integers(0, 2), max_size=1),
    st.integers(1, 50),
)
def test_repeat_lengths_finds_the_ids_of_the_published_rule(
    text: list[int], breakers: set[int], limit: int
) -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_base=1.0, dry_allowed_length=1)
    array = np.array(text, np.int64)
    found = repeat_lengths(array, breaker_flags(array, tuple((b,) for b in breakers)), limit)
    assert set(found) == set(naive_dry(text, breakers, params))
    assert all(1 <= n <= limit for n in found.values())


def test_breakers_are_tokens_that_contain_the_string_or_runs() -> None:
    class Words:
        words = ("a", "b\n", "\n", '"', "x", "y")
        vocab_size = 6

        def token_bytes(self, token: int) -> bytes:
            return self.words[token].encode()

        def encode(self, text: str, *, special: bool = False) -> list[int]:
            return [self.words.index(c) for c in text]

    assert breakers_of(["\n", "xy"], Words()) == ((1,), (2,), (4, 5))
    text = np.array([0, 4, 5, 0, 4, 0, 2, 5])
    flags = breaker_flags(text, ((1,), (2,), (4, 5)))
    assert flags.tolist() == [False, True, True, False, False, False, True, False]


def test_top_n_sigma_equals_the_papers_rule(rows: np.ndarray) -> None:
    """Kept: logit >= max - n * sigma, sigma over the whole row (Tang et al.); an earlier top-k does
    not change sigma."""
    for i, row in enumerate(rows):
        n = [0.3, 1.0, 2.0, 5.0][i % 4]
        x = row.astype(np.float64)
        want = np.flatnonzero(x >= x.max() - n * x.std()).tolist()
        assert (
            processed(
                row, SamplingParams(top_n_sigma=n, temperature=[0.5, 1.0, 3.0][i % 3])
            ).ids.tolist()
            == want
        )
        few = np.argsort(-x, kind="stable")[:5]
        narrow = processed(row, SamplingParams(top_n_sigma=n, top_k=5)).ids.tolist()
        assert narrow == sorted(set(want) & set(few.tolist()))


def test_top_n_sigma_ignores_banned_ids() -> None:
    row = np.array([3, 1, 0, 0, -1000], np.float32)
    assert processed(row, SamplingParams(top_n_sigma=1.0, banned_token_ids=[4])).ids.tolist() == [0]
    assert processed(row, SamplingParams(top_n_sigma=1.0)).ids.tolist() == [0, 1, 2, 3]


def test_top_n_sigma_keeps_the_best_of_ids_that_are_all_too_far() -> None:
    """typical_p removes the best id here and leaves two others."""
    row = np.log(np.array([0.4, 0.13, 0.12, 0.1, 0.09, 0.08, 0.08], np.float32))
    assert processed(row, SamplingParams(typical_p=0.2)).ids.tolist() == [1, 2]
    both = SamplingParams(typical_p=0.2, top_n_sigma=0.01)
    assert processed(row, both).ids.tolist() == [1]


def test_xtc_removes_all_top_choices_but_the_least(rows: np.ndarray) -> None:
    acted = 0
    for i, row in enumerate(rows):
        threshold = [0.01, 0.05, 0.1, 0.3, 0.6][i % 5]
        p = softmax(row)
        top = sorted(np.flatnonzero(p >= threshold).tolist(), key=lambda j: (-p[j], j))
        removed_ids = top[:-1]
        state = processed(row, SamplingParams(xtc_probability=1.0, xtc_threshold=threshold))
        assert state.ids.tolist() == [j for j in range(VOCAB) if j not in removed_ids]
        acted += bool(removed_ids)
        off = processed(row, SamplingParams(xtc_probability=1e-12, xtc_threshold=threshold))
        assert len(off.ids) == VOCAB
    assert acted > 3 * ROWS // 10


def test_xtc_acts_with_the_given_probability() -> None:
    """4,000 positions at 0.3: the count is within 5 standard deviations (false alarm below
    1e-6)."""
    row = np.array([2.0, 2.0, -3.0], np.float32)
    params = SamplingParams(xtc_probability=0.3)
    acted = sum(len(processed(row, params, position=t).ids) == 2 for t in range(4000))
    assert abs(acted - 1200) < 5 * math.sqrt(4000 * 0.3 * 0.7)


# ------------------------------------------------------------------------------------- all together


@given(st.data())
def test_filters_always_leave_one_id_and_never_restore_a_removed_one(data: st.DataObject) -> None:
    draw = data.draw
    row = np.array(
        draw(st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=30)), np.float32
    )
    filters: dict[str, Any] = {"top_k": draw(st.integers(0, 5))}
    for name in FILTERS[1:]:
        rule = FIELDS[name]
        known = st.sampled_from([*rule.trials, rule.default])
        filters[name] = draw(known | st.floats(rule.low or 1e-9, rule.high))
    params = SamplingParams(
        **filters,
        temperature=draw(st.sampled_from([1e-300, 1e-6, 0.5, 1.0, 3.0, 100.0])),
        xtc_threshold=draw(st.floats(0.0, 1.0)),
        banned_token_ids=[0],
    )
    state = processed(row, params)
    assert 1 <= len(state.ids) < len(row)
    assert 0 not in state.ids
    assert not np.isnan(state.d).any()
    assert (np.diff(state.ids) > 0).all()
