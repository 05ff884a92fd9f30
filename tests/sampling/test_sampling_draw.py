"""The draw follows the filtered distribution: goodness of fit, support, tails,
independence.

Keys are fixed, so each test always passes or always fails. The probabilities stated are those of a
false alarm: a correct generator failing for one arbitrary choice of keys.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from sampling_rows import draw_many, make_row, processed, sample, softmax
from verbatim.base.params import FIELDS, FILTERS, SamplingParams
from verbatim.sampling import draw
from verbatim.sampling.pipeline import sample_rows

# Draws per setting. The larger count finds an error of half the size.
DRAWS = [200_000, pytest.param(1_000_000, marks=pytest.mark.soak)]
# Twelve ids from likely to rare, two of them equal.
LOGITS = np.array([3.0, 2.5, 2.5, 2.0, 1.2, 0.4, 0.0, -0.5, -1.0, -2.0, -3.0, -4.5], np.float32)
HISTORY = (0, 3, 3, 5, 0, 3, 3)

SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"temperature": 30.0},
    *({name: value} for name in FILTERS for value in FIELDS[name].trials),
    {"top_k": 1},
    {"top_k": 7, "temperature": 1.3},
    {"top_p": 0.9, "temperature": 0.8},
    {"min_p": 0.02, "top_p": 0.95, "top_k": 8},
    {"typical_p": 0.9, "temperature": 1.5},
    {"xtc_probability": 0.5, "xtc_threshold": 0.12},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05, "temperature": 1.2},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"dry_multiplier": 1.0, "dry_allowed_length": 1},
    {"logit_bias": {11: 6.0, 0: -4.0}, "banned_token_ids": [1]},
    {"allowed_token_ids": [2, 4, 10], "temperature": 0.9, "no_repeat_ngram": 2},
]


def chi_square_deviate(observed: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square as a normal deviate (Wilson, Hilferty 1931); 4.75 has a probability of 1e-6."""
    df = len(expected) - 1
    if df == 0:
        return 0.0
    chi2 = float(((observed - expected) ** 2 / expected).sum())
    return ((chi2 / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


def exact(params: SamplingParams) -> np.ndarray:
    """The exact distribution, averaged over XTC's random decision."""
    out = np.zeros(len(LOGITS))
    sides = [(1.0, params)]
    if params.xtc_probability:
        q = params.xtc_probability
        sides = [(q, params.with_(xtc_probability=1.0)), (1 - q, params.with_(xtc_probability=0.0))]
    for weight, side in sides:
        state = processed(LOGITS, side, history=HISTORY)
        out[state.ids] += weight * softmax(state.d)
    return out


def drawn(params: SamplingParams, key: int, positions: np.ndarray) -> np.ndarray:
    """Many draws at once; the next test compares some with sample_rows."""
    if not params.xtc_probability:
        state = processed(LOGITS, params, history=HISTORY)
        return draw_many(state.ids, state.d, key, positions)
    coin = (
        draw.uniform(key, positions, np.zeros(1, np.int64), draw.DOMAIN_XTC)
        < params.xtc_probability
    )
    out = np.empty(len(positions), np.int64)
    for acts in (True, False):
        side = processed(LOGITS, params.with_(xtc_probability=float(acts)), history=HISTORY)
        out[coin == acts] = draw_many(side.ids, side.d, key, positions[coin == acts])
    return out


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_draws_fit_the_exact_distribution(setting: dict[str, object], draws: int) -> None:
    """Chi-square at 1e-6 per setting: false-alarm probability 2e-5 for all 20."""
    params = SamplingParams.from_mapping(setting)
    key = draw.noise_key(2024, SETTINGS.index(setting))
    tokens = drawn(params, key, np.arange(5, 5 + draws))
    p = exact(params)
    counts = np.bincount(tokens, minlength=len(LOGITS))
    assert counts[p == 0].sum() == 0, "a removed token was drawn"
    live = p > 0
    assert chi_square_deviate(counts[live], p[live] * draws) < 4.75
    # draw_many equals the sampler
    rows = [make_row(params, key=key, position=t, history=HISTORY) for t in range(5, 105)]
    assert [d.token for d in sample_rows(np.tile(LOGITS, (100, 1)), rows)] == tokens[:100].tolist()


def test_neighbouring_positions_are_independent() -> None:
    """Pairs (token at t, token at t + 1) of 300,000 draws: chi-square, false alarm 1e-6."""
    state = processed(LOGITS, SamplingParams())
    tokens = draw_many(state.ids, state.d, draw.noise_key(5), np.arange(300_000))
    p = softmax(state.d)
    pairs = np.bincount(tokens[:-1:2] * 12 + tokens[1::2], minlength=144)
    assert chi_square_deviate(pairs, np.outer(p, p).ravel() * 150_000) < 4.75


def test_choices_and_seeds_are_independent() -> None:
    """The same positions under choice 0 and 1, seed s and s + 1. False alarm 2e-6 for both."""
    state = processed(LOGITS, SamplingParams())
    p = softmax(state.d)
    at = np.arange(150_000)
    first = draw_many(state.ids, state.d, draw.noise_key(9, 0), at)
    for key in (draw.noise_key(9, 1), draw.noise_key(10, 0)):
        other = draw_many(state.ids, state.d, key, at)
        pairs = np.bincount(first * 12 + other, minlength=144)
        assert chi_square_deviate(pairs, np.outer(p, p).ravel() * 150_000) < 4.75


def test_noise_of_neighbouring_ids_is_independent() -> None:
    """Even and odd ids share a Philox block: their correlation is below 5 / sqrt(n) (false alarm
    6e-7)."""
    u = draw.uniform(draw.noise_key(3), np.arange(1000)[:, None], np.arange(2000)[None, :]) - 0.5
    for lag in (1, 2):
        a, b = u[:, :-lag].ravel(), u[:, lag:].ravel()
        assert abs(float((a * b).mean()) * 12) < 5 / math.sqrt(len(a))
    assert abs(float(u.mean())) * math.sqrt(12 * u.size) < 5


def test_the_uniforms_are_uniform() -> None:
    """Four million in 1,000 bins, by high bits and by low bits. False alarm 2e-6 for both."""
    u = draw.uniform(draw.noise_key(4), np.arange(1000)[:, None], np.arange(4000)[None, :]).ravel()
    for part in (u, u * 2.0**32 % 1.0):
        counts = np.bincount((part * 1000).astype(np.int64), minlength=1000)
        assert chi_square_deviate(counts, np.full(1000, len(u) / 1000)) < 4.75


# (position, id) with u > 1 - 2^-25: all of them in a search of 240 million
TAIL = [(319, 7340), (1635, 18051), (5267, 10321)]


@pytest.mark.parametrize(("position", "token"), TAIL)
def test_events_rarer_than_2_to_the_minus_24_occur(position: int, token: int) -> None:
    """Float32 uniforms (24 bits) can never draw a token this rare; 52 bits can."""
    logits = np.full(50_000, -np.inf, np.float32)
    logits[[0, token]] = [0.0, -17.0]
    rare = 1 / (1 + math.exp(17.0))
    assert rare < 2**-24
    key = draw.noise_key(1234)
    assert sample(logits, SamplingParams(), key=key, position=position).token == token


def test_the_tail_of_the_noise_has_the_right_weight() -> None:
    """P(g > x) = 1 - exp(-e^-x): counts of 4 million at x = 8, 10, 12 are within 5 standard
    deviations (false alarm 2e-6)."""
    g = draw.gumbel(draw.noise_key(6), np.arange(1000)[:, None], np.arange(4000)[None, :]).ravel()
    for x in (8.0, 10.0, 12.0):
        want = -math.expm1(-math.exp(-x)) * len(g)
        assert abs(int((g > x).sum()) - want) < 5 * math.sqrt(want)


def test_ties_go_to_the_lower_id() -> None:
    assert sample(np.zeros(100), SamplingParams(temperature=0)).token == 0
    ids = np.arange(4)
    assert int(np.argmax(np.zeros(4))) == 0  # draw() relies on it
    winner, _, scores = draw.draw(ids, np.zeros(4), 1, 1)
    assert scores[winner] == scores.max()


def test_a_draw_depends_on_key_and_position_not_on_the_batch() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(20, 50)).astype(np.float32)
    rows = [make_row(SamplingParams(), key=draw.noise_key(i), position=i) for i in range(20)]
    together = sample_rows(logits, rows)
    alone = [sample_rows(logits[i : i + 1], [rows[i]])[0] for i in range(20)]
    backwards = sample_rows(logits[::-1], rows[::-1])[::-1]
    assert together == alone == backwards


def tied_row(lower: int, higher: int, first: int, vocab: int = 400) -> tuple[np.ndarray, int]:
    """(logits, position) where two ids, far above all others, have bit-equal scores. `first` has
    the greater logit and the other id the greater noise. The search tries positions until the sums
    are equal; the difference is split over two float32 logits (48 bits)."""
    other = lower + higher - first
    for position in range(20_000):
        noise = draw.gumbel(7, position, np.array([first, other]))
        gap = float(noise[0] - noise[1])
        row = np.full(vocab, -1000.0, np.float32)
        row[other] = gap
        row[first] = float(row[other]) - gap
        down = float(row[other]) - float(row[first])
        if down < 0 and down + noise[1] == noise[0]:
            return row, position
    raise AssertionError("no tie was found")


TIES = [
    (lower, higher, first)
    for lower, higher in ((3, 5), (3, 70), (64, 399), (130, 131))
    for first in (lower, higher)
]


@pytest.mark.parametrize(("lower", "higher", "first"), TIES)
def test_the_lower_of_two_ids_with_equal_scores_is_drawn(
    lower: int, higher: int, first: int
) -> None:
    row, position = tied_row(lower, higher, first)
    params = SamplingParams(explain=2)
    drawn = sample(row, params, position=position)
    assert drawn.explain is not None
    scores = {entry["id"]: entry["score"] for entry in drawn.explain["top"]}
    assert scores[lower] == scores[higher]
    assert drawn.token == lower


@pytest.mark.native
@pytest.mark.parametrize(("lower", "higher", "first"), TIES)
@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 2}, {"top_p": 0.999}, {"logit_bias": {0: -1.0}}], ids=str
)
def test_the_kernel_draws_the_lower_of_two_ids_with_equal_scores(
    lower: int, higher: int, first: int, settings: dict[str, Any]
) -> None:
    """Independent of which of the two the kernel visits first."""
    native = pytest.importorskip("verbatim.backend.cpu._native")
    from verbatim.backend.cpu.sampler import NativeSampler

    row, position = tied_row(lower, higher, first)
    native_row = NativeSampler(native, None).native_row(
        make_row(SamplingParams(**settings), position=position)
    )
    for isa in native.isas():
        ((token, _, _),) = native.RowSampler(isa, 1).draw(row[None, :], [native_row])
        assert token == lower
