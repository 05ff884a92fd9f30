"""The pipeline: order of stages, rows of a step, log-probabilities, and rows without a
candidate."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sampling_rows import bits, make_row, processed, sample, softmax
from verbatim.base.errors import BackendError
from verbatim.base.params import FIELDS, FILTERS, SamplingParams
from verbatim.base.records import BROKEN, NOTHING, DrawSpec, SeqStep
from verbatim.sampling.logprobs import as_row, score_targets
from verbatim.sampling.pipeline import rows_of, sample_rows
from verbatim.sampling.processors import AFTER, STAGES

RNG = np.random.default_rng(21)


def test_stages_run_in_the_order_of_the_parameter_table() -> None:
    """base/params.py lists the distribution's parameters "in the order in which it is applied"."""
    listed = [name for name in FIELDS if name in {s.name for s in STAGES}]
    ours = [s.name for s in STAGES if s.name in listed and s.name != "min_tokens"]
    assert ours == [name for name in listed if name != "min_tokens"]
    assert [s.name for s in STAGES] == [
        "logit_bias", "structure", "allowed_token_ids", "banned_token_ids", "min_tokens",
        "repetition_penalty", "frequency_penalty", "presence_penalty", "dry_multiplier",
        "no_repeat_ngram",
        "temperature", *FILTERS,
    ]  # fmt: skip
    text = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text(encoding="utf-8")
    order = text.partition("## The order")[2].partition("The order is fixed")[0]
    after = re.findall(r"\w+", order.partition(" temperature\n")[2])
    assert [s.name for s in AFTER[1:]] == [
        "xtc_probability" if name == "XTC" else name for name in after[:-1]
    ]
    assert after[-1] == "sample"


def test_each_stage_acts_on_the_result_of_the_one_before() -> None:
    row = np.array([2.0, 1.9, 1.0, -5.0], np.float32)
    # top-p acts after the temperature: two ids stay at 1.0, three at 3.0
    assert len(processed(row, SamplingParams(top_p=0.75)).ids) == 2
    assert len(processed(row, SamplingParams(top_p=0.75, temperature=3.0)).ids) == 3
    # top-p acts on the ids that top-k left, renormalised
    assert processed(row, SamplingParams(top_k=2, top_p=0.53)).ids.tolist() == [0, 1]
    assert processed(row, SamplingParams(top_k=2, top_p=0.52)).ids.tolist() == [0]
    # the bias is applied before the penalty
    state = processed(
        row, SamplingParams(logit_bias={3: 6.0}, repetition_penalty=2.0), history=(3,)
    )
    assert state.logits[3] == 0.5


def test_rows_of_a_step_have_position_history_and_mask() -> None:
    plain = SamplingParams()
    assert rows_of(SeqStep(0, (1, 2, 3), 0, ())) == []
    spec = DrawSpec(plain, 9, 2)
    (row,) = rows_of(SeqStep(0, (11, 12, 13), 5, (), draws=1, draw=spec))
    assert (row.position, row.history, row.mask) == (8, (), None)
    spec = DrawSpec(
        plain.with_(repetition_penalty=1.1), 9, 2, history=(5, 6), masks=(b"a", b"b", None)
    )
    rows = rows_of(SeqStep(0, (6, 8, 9), 1, (), draws=3, draw=spec))
    assert [(r.position, r.history, r.mask) for r in rows] == [
        (2, (5, 6), b"a"),
        (3, (5, 6, 8), b"b"),
        (4, (5, 6, 8, 9), None),
    ]


ALL: list[dict[str, Any]] = [
    {"logit_bias": {3: 2.0}},
    {"allowed_token_ids": [1, 2, 3, 4, 5, 6]},
    {"banned_token_ids": [0, 1]},
    {"min_tokens": 8},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7},
    {"presence_penalty": 0.7},
    {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    {"no_repeat_ngram": 2},
    {"temperature": 0.0},
    {"temperature": 1.7},
    *({name: value} for name in FILTERS for value in FIELDS[name].trials),
    {"explain": 3},
    {"logprobs": 4, "logprobs_mode": "processed"},
]


def test_drafts_draw_what_single_steps_draw() -> None:
    """A step with k drafts draws at every position the token of a plain step: promise 1."""
    for setting in ALL:
        params = SamplingParams.from_mapping(setting)
        known = (4, 7, 2, 7, 2)
        logits = RNG.normal(size=(4, 40)).astype(np.float32) * 3
        drafts = (7, 2, 9)
        spec = DrawSpec(
            params, 77, 3, history=known, withheld=(2,), masks=(bits(list(range(30)), 40),) * 4
        )
        many = sample_rows(
            logits, rows_of(SeqStep(0, (known[-1], *drafts), 4, (), draws=4, draw=spec))
        )
        for i in range(4):
            tokens = known + drafts[:i]
            one = DrawSpec(params, 77, 3, history=tokens, withheld=(2,), masks=(spec.masks[0],))
            single = sample_rows(
                logits[i : i + 1],
                rows_of(SeqStep(0, tokens[-1:], len(tokens) - 1, (), draws=1, draw=one)),
            )
            assert single[0] == many[i], setting


def test_a_row_does_not_depend_on_the_batch() -> None:
    """Every setting alone and in one mixed batch: the whole Drawn is equal to the bit."""
    logits = RNG.normal(size=(len(ALL), 60)).astype(np.float32) * 4
    rows = [
        make_row(SamplingParams.from_mapping(s), history=(4, 7, 2, 7), withheld=(3,), key=i)
        for i, s in enumerate(ALL)
    ]
    together = sample_rows(logits, rows)
    for i in range(len(ALL)):
        assert sample_rows(logits[i : i + 1], [rows[i]])[0] == together[i], ALL[i]


def test_log_probabilities_equal_a_softmax() -> None:
    for _ in range(50):
        row = (RNG.normal(size=300) * 4).astype(np.float32)
        drawn = sample(row, SamplingParams(logprobs=7))
        p = np.log(softmax(row))
        assert drawn.logprob == pytest.approx(p[drawn.token], abs=1e-9)
        assert [i for i, _ in drawn.top] == np.argsort(-row, kind="stable")[:7].tolist()
        assert [v for _, v in drawn.top] == pytest.approx([p[i] for i, _ in drawn.top], abs=1e-9)


def test_processed_log_probabilities_are_of_the_filtered_distribution() -> None:
    for _ in range(50):
        row = (RNG.normal(size=300) * 4).astype(np.float32)
        params = SamplingParams(
            top_p=0.8, temperature=1.4, logprobs=500, logprobs_mode="processed", xtc_probability=1.0
        )
        drawn = sample(row, params)
        state = processed(row, params)
        p = dict(zip(state.ids.tolist(), np.log(softmax(state.d)).tolist(), strict=True))
        assert dict(drawn.top) == pytest.approx(p, abs=1e-9)
        assert drawn.logprob == pytest.approx(p[drawn.token], abs=1e-9)
        assert sum(math.exp(v) for _, v in drawn.top) == pytest.approx(1.0, abs=1e-9)


def test_temperature_zero_is_the_argmax_after_the_penalties() -> None:
    row = np.array([1.0, 5.0, 4.9, 5.0], np.float32)
    assert sample(row, SamplingParams(temperature=0)).token == 1
    assert (
        sample(
            row, SamplingParams(temperature=0, frequency_penalty=0.5), history=(0, 0, 0, 1)
        ).token
        == 3
    )
    # no filter runs at temperature 0
    params = SamplingParams(temperature=0, xtc_probability=1.0, typical_p=0.01)
    assert sample(row, params).token == 1
    drawn = sample(
        row,
        SamplingParams(temperature=0, logprobs=2, logprobs_mode="processed", banned_token_ids=[1]),
    )
    assert drawn.token == 3
    assert drawn.logprob == pytest.approx(float(np.log(softmax(row[[0, 2, 3]]))[2]), abs=1e-9)


def test_tiny_temperatures_do_not_overflow() -> None:
    row = np.array([1.0, 5.0, 4.9], np.float32)
    for t in (5e-324, 1e-308, 1e-30, 1e-5):
        assert (
            sample(
                row,
                SamplingParams(temperature=t, logprobs=3, logprobs_mode="processed", typical_p=0.9),
            ).token
            == 1
        )


def test_a_row_without_a_candidate_returns_no_token() -> None:
    row = np.zeros(4, np.float32)
    for setting, extra in (
        ({"allowed_token_ids": [2], "min_tokens": 9}, {"withheld": (2,)}),
        ({"banned_token_ids": [0, 1]}, {"mask": bits([0, 1], 4)}),
        ({"no_repeat_ngram": 1}, {"history": (0, 1, 2, 3)}),
        ({"logprobs": 2, "explain": 1}, {"mask": bits([], 4)}),
    ):
        assert sample(row, SamplingParams.from_mapping(setting), **extra).token == NOTHING


def test_a_mask_shorter_than_the_row_removes_the_rest() -> None:
    row = np.arange(64, dtype=np.float32)
    assert processed(row, SamplingParams(), mask=bits([1, 30], 32)).ids.tolist() == [1, 30]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_give_no_token_and_no_score(bad: float) -> None:
    row = np.zeros(8, np.float32)
    row[3] = bad
    assert sample(row, SamplingParams()).token == BROKEN
    assert sample(row, SamplingParams(banned_token_ids=[3])).token == BROKEN
    assert sample(np.full(8, -np.inf, np.float32), SamplingParams()).token == BROKEN
    scored = score_targets(np.stack([row, np.zeros(8, np.float32)]), [3, 3])
    assert [one.token for one in scored] == [BROKEN, 3]
    with pytest.raises(BackendError, match="not finite"):
        as_row(row)


def test_minus_infinity_is_a_token_that_cannot_come() -> None:
    row = np.array([0.0, -np.inf, 0.0], np.float32)
    assert {sample(row, SamplingParams(), position=t).token for t in range(50)} == {0, 2}
    drawn = sample(row, SamplingParams(logprobs=3))
    assert len(drawn.top) == 2


def test_score_targets() -> None:
    logits = RNG.normal(size=(3, 20)).astype(np.float32)
    scored = score_targets(logits, [4, 5, 19], top=2)
    for row, one, target in zip(logits, scored, (4, 5, 19), strict=True):
        p = np.log(softmax(row))
        assert one.token == target
        assert one.logprob == pytest.approx(p[target], abs=1e-9)
        assert [i for i, _ in one.top] == np.argsort(-row, kind="stable")[:2].tolist()


def test_beam_rows_list_candidates_after_the_penalties() -> None:
    row = (RNG.normal(size=50) * 2).astype(np.float32)
    params = SamplingParams(
        num_beams=3, repetition_penalty=1.5, banned_token_ids=[int(row.argmax())], logprobs=2
    )
    drawn = sample(row, params, beam=6, history=(1, 2, 3))
    state = processed(row, params, history=(1, 2, 3))
    p = np.log(softmax(state.logits[state.ids]))
    want = sorted(zip(state.ids.tolist(), p.tolist(), strict=True), key=lambda c: -c[1])[:6]
    assert [i for i, _ in drawn.candidates] == [i for i, _ in want]
    assert [v for _, v in drawn.candidates] == pytest.approx([v for _, v in want], abs=1e-9)
    raw = np.log(softmax(row))
    assert list(drawn.reported) == pytest.approx([raw[i] for i, _ in drawn.candidates], abs=1e-9)


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=50),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**40),
)
def test_any_row_key_and_position_draw_a_token(
    values: list[float], key: int, position: int
) -> None:
    drawn = sample(
        np.array(values, np.float32), SamplingParams(), key=key, position=position, prompt_len=0
    )
    assert 0 <= drawn.token < len(values)
    assert drawn.logprob <= 1e-9
