"""Explain: every number recomputed from the raw logits by other means; what-if refuses what it
cannot compute."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from filter_values import STRONG
from sampling_rows import bits, make_row, sample, softmax
from verbatim.base.errors import ParameterError, RequestError
from verbatim.base.params import SamplingParams
from verbatim.explain import explanation
from verbatim.sampling.draw import gumbel, noise_key
from verbatim.sampling.pipeline import sample_rows

RNG = np.random.default_rng(31)
PROMPT = (4, 7, 2, 7)


def recorded(
    params: SamplingParams, count: int = 12, vocab: int = 200, **extra: Any
) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Records of `count` draws from random rows, each with the earlier tokens as history."""
    logits = (np.random.default_rng(32).normal(size=(count, vocab)) * 3).astype(np.float32)
    tokens, out = PROMPT, []
    for row in logits:
        drawn = sample_rows(
            row[None],
            [
                make_row(
                    params,
                    key=noise_key(5),
                    position=len(tokens),
                    prompt_len=4,
                    history=tokens,
                    **extra,
                )
            ],
        )[0]
        assert drawn.explain is not None
        out.append(drawn.explain)
        tokens = (*tokens, drawn.token)
    return out, logits


def test_every_number_equals_a_recomputation_from_the_raw_row() -> None:
    params = SamplingParams(
        temperature=0.8,
        top_k=30,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        banned_token_ids=[3],
        explain=8,
    )
    records, logits = recorded(params)
    for at, (record, row) in enumerate(zip(records, logits, strict=True)):
        raw = row.astype(np.float64)
        p = softmax(raw)
        token = record["token"]
        assert record["entropy"] == pytest.approx(float(-(p * np.log(p)).sum()), abs=1e-9)
        assert record["logit"] == raw[token]
        assert record["logprob"] == pytest.approx(math.log(p[token]), abs=1e-9)
        assert record["rank"] == 1 + int((raw > raw[token]).sum())
        assert record["margin"] == pytest.approx(raw[token] - np.delete(raw, token).max())
        assert record["best"] == int(raw.argmax())
        assert [c["id"] for c in record["top"]] == np.argsort(-raw)[:8].tolist()
        # the stages, recomputed
        x = raw.copy()
        x[3] = -np.inf
        for seen in {*PROMPT, *(r["token"] for r in records[:at])}:
            x[seen] = x[seen] / 1.2 if x[seen] > 0 else x[seen] * 1.2
        d = (x - x.max()) / 0.8
        order = np.argsort(-d, kind="stable")
        by_k = order[:30]
        q = softmax(d[by_k])
        by_p = by_k[: int(np.searchsorted(np.cumsum(q), 0.9)) + 1]
        left = by_p[softmax(d[by_p]) >= 0.01 * softmax(d[by_p]).max()]
        want = [
            ("banned_token_ids", 1, 199),
            ("repetition_penalty", 0, 199),
            ("temperature", 0, 199),
            ("top_k", 169, 30),
        ]
        want += [("top_p", 30 - len(by_p), len(by_p)), ("min_p", len(by_p) - len(left), len(left))]
        assert [(s["name"], s["removed"], s["left"]) for s in record["stages"]] == want
        final = dict(zip(left.tolist(), softmax(d[left]).tolist(), strict=True))
        assert record["final_prob"] == pytest.approx(final[token], abs=1e-9)
        noise = gumbel(noise_key(5), record["position"], np.arange(200))
        scores = {i: d[i] + noise[i] for i in left.tolist()}
        ranked = sorted(scores, key=lambda i: -scores[i])
        assert token == ranked[0]
        assert record["score"] == pytest.approx(scores[token], abs=1e-9)
        if len(ranked) > 1:
            assert record["runner_up"] == ranked[1]
            assert record["lead"] == pytest.approx(scores[ranked[0]] - scores[ranked[1]], abs=1e-9)
        for c in record["top"]:
            i = c["id"]
            assert c["logprob"] == pytest.approx(math.log(p[i]), abs=1e-9)
            assert (c["processed"] is None) == (i == 3)
            if c["processed"] is not None:
                assert c["processed"] == pytest.approx(x[i], abs=1e-12)
            removed = [s["name"] for s in record["stages"] if i in s["removed_top"]]
            assert [c["removed_by"]] == (removed or [None])
            assert (c["removed_by"] is None) == (i in scores)
            if i in scores:
                assert c["final_prob"] == pytest.approx(final[i], abs=1e-9)
                assert c["noise"] == noise[i]
                assert c["score"] == pytest.approx(scores[i], abs=1e-9)


def test_explain_does_not_change_the_draw() -> None:
    row = (RNG.normal(size=100) * 3).astype(np.float32)
    for setting in (
        {},
        {"temperature": 0},
        {"top_p": 0.7, "typical_p": 0.9},
        {"xtc_probability": 1.0},
    ):
        for t in range(30):
            plain = sample(row, SamplingParams(**setting, logprobs=3), position=t)
            explained = sample(
                row, SamplingParams(**setting, logprobs=3, explain=4, receipt=True), position=t
            )
            assert (plain.token, plain.logprob, plain.top) == (
                explained.token,
                explained.logprob,
                explained.top,
            )
            assert explained.explain is not None
            assert explained.explain["token"] == explained.token


def test_records_survive_json() -> None:
    for params in (
        SamplingParams(explain=3, receipt=True),
        SamplingParams(explain=3, temperature=0),
        SamplingParams(explain=3, num_beams=2),
    ):
        drawn = sample(
            RNG.normal(size=20),
            params,
            mask=bits([1, 2, 3], 20),
            beam=2 if params.num_beams > 1 else 0,
        )
        assert json.loads(json.dumps(drawn.explain, allow_nan=False)) == drawn.explain


def test_the_whole_row_is_kept_only_with_receipt_and_for_64_tokens() -> None:
    row = RNG.normal(size=20)
    for params, position, kept in (
        (SamplingParams(explain=2), 5, False),
        (SamplingParams(explain=2, receipt=True), 5, True),
        (SamplingParams(explain=2, receipt=True), 3 + 63, True),
        (SamplingParams(explain=2, receipt=True), 3 + 64, False),
        (SamplingParams(explain=2, receipt=True, n=2), 5, False),
    ):
        record = sample(row, params, position=position, prompt_len=3).explain
        assert record is not None
        assert (record["row"] is not None) == kept


# ------------------------------------------------------------------------------------------ what-if


CHANGES: list[dict[str, Any]] = [
    {"temperature": 2.0},
    {"temperature": 0.0},
    {"top_p": 0.3, "temperature": 1.2},
    *STRONG.values(),
    {"xtc_probability": 1.0, "xtc_threshold": 0.01},
    {"repetition_penalty": 2.0},
    {"frequency_penalty": 1.0, "presence_penalty": 1.0},
    {"no_repeat_ngram": 1},
    {"logit_bias": {11: 20.0}},
    {"banned_token_ids": [0, 1, 2, 3, 4, 5, 6, 7]},
    {"seed": 99},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_what_if_equals_the_sampler_under_the_changed_settings(changes: dict[str, Any]) -> None:
    params = SamplingParams(explain=4, receipt=True, top_p=0.95)
    records, logits = recorded(params)
    found = explanation.what_if(records, params, changes, prompt_ids=PROMPT, breakers=())
    tokens = PROMPT
    for result, row, record in zip(found, logits, records, strict=True):
        key = noise_key(changes.get("seed", 5))
        want = sample(
            row,
            params.with_(**changes),
            key=key,
            position=len(tokens),
            prompt_len=4,
            history=tokens,
        )
        assert result.after == want.token
        assert result.before == record["token"]
        assert result.record["stages"] == want.explain["stages"]
        tokens = (*tokens, record["token"])
    # Random tokens rarely repeat, so DRY may change nothing.
    assert any(r.changed for r in found) or "dry_multiplier" in changes


def test_a_what_if_without_changes_gives_the_same_tokens() -> None:
    params = SamplingParams(explain=4, receipt=True, top_p=0.9, repetition_penalty=1.1)
    records, _ = recorded(params)
    assert not any(r.changed for r in explanation.what_if(records, params, {}, prompt_ids=PROMPT))


def test_a_what_if_keeps_the_grammar_mask() -> None:
    params = SamplingParams(explain=2, receipt=True, regex="a")
    records, _ = recorded(params, mask=bits([5, 6, 7], 200))
    again = explanation.what_if(records, params, {"temperature": 50.0})
    assert {r.after for r in again} <= {5, 6, 7}


def test_a_mask_without_a_structure_is_kept() -> None:
    """A thinking budget has masks of its own."""
    params = SamplingParams(explain=2, receipt=True, thinking_budget=3)
    records, _ = recorded(params, mask=bits([5, 6, 7], 200))
    assert {r.after for r in explanation.what_if(records, params, {"temperature": 50.0})} <= {
        5,
        6,
        7,
    }


def test_min_tokens_needs_end_tokens_only_where_it_withholds_more() -> None:
    """As the scheduler records them: a record past min_tokens withholds no id."""
    params = SamplingParams(explain=2, receipt=True, min_tokens=3, max_tokens=12)
    early, _ = recorded(params, count=3, withheld=(0, 1, 2))
    records = [*early, *recorded(params)[0][3:]]
    assert not any(r.changed for r in explanation.what_if(records, params, {}))
    assert len(explanation.what_if(records, params, {"temperature": 0, "min_tokens": 2})) == 12
    assert len(explanation.what_if(early, params, {"min_tokens": 9})) == 3
    assert len(explanation.what_if(records[9:], params, {"min_tokens": 9})) == 3
    with pytest.raises(ParameterError, match="min_tokens"):
        explanation.what_if(records, params, {"min_tokens": 4})


def test_a_what_if_refuses_what_it_cannot_compute() -> None:
    params = SamplingParams(explain=4, receipt=True)
    records, _ = recorded(params)
    short, _ = recorded(SamplingParams(explain=4))
    with pytest.raises(RequestError, match="whole row"):
        explanation.what_if(short, params, {"top_k": 2})
    with pytest.raises(RequestError, match="prompt_ids"):
        explanation.what_if(records, params, {"repetition_penalty": 1.5})
    with pytest.raises(RequestError, match="missing before"):
        explanation.what_if(records[1:], params, {"repetition_penalty": 1.5}, prompt_ids=PROMPT)
    with pytest.raises(ParameterError, match="dry_breakers"):
        explanation.what_if(records, params, {"dry_multiplier": 1.0}, prompt_ids=PROMPT)
    with pytest.raises(ParameterError, match="min_tokens"):
        explanation.what_if(records, params, {"min_tokens": 3})
    with pytest.raises(ParameterError, match="max_tokens"):
        explanation.what_if(records, params, {"max_tokens": 3})
    with pytest.raises(ParameterError, match="no such"):
        explanation.what_if(records, params, {"temprature": 3})
    with pytest.raises(RequestError, match="not the settings"):
        explanation.what_if(records, params.with_(temperature=30.0), {"top_k": 2})
    damaged = [{**records[0], "row": records[0]["row"][:40]}]
    with pytest.raises(RequestError, match="damaged"):
        explanation.what_if(damaged, params, {"top_k": 2})
    with pytest.raises(RequestError, match="leave no token to sample"):
        explanation.what_if(
            records, params, {"allowed_token_ids": [7], "no_repeat_ngram": 1}, prompt_ids=PROMPT
        )


# ------------------------------------------------------------------------------------------- tables


def test_rendered_tables_have_the_expected_lines() -> None:
    params = SamplingParams(explain=4, receipt=True, top_k=2, repetition_penalty=1.5, seed=1)
    records, _ = recorded(params, count=2)
    page = explanation.render(records[0], lambda i: f"w{i}")
    lines = page.splitlines()
    assert lines[0].startswith(f"position 4  'w{records[0]['token']}' ({records[0]['token']})  p ")
    assert any(line.split()[:3] == ["top_k", "198", "2"] for line in lines)
    assert sum(line.lstrip().startswith("*") for line in lines) <= 1
    assert all(line == line.rstrip() for line in lines)
    again = explanation.what_if(records, params, {"temperature": 0}, prompt_ids=PROMPT)
    assert (
        explanation.render_what_if(again, str).splitlines()[-2].endswith("of 2 tokens would differ")
    )
    beams = sample(RNG.normal(size=20), SamplingParams(num_beams=2, explain=2), beam=2).explain
    assert beams is not None
    assert beams["token"] is None
    assert len(beams["candidates"]) == 2


def test_greedy_records_have_scores_but_no_noise() -> None:
    record = sample(np.array([1.0, 5.0, 4.0]), SamplingParams(temperature=0, explain=2)).explain
    assert record is not None
    assert (record["score"], record["runner_up"], record["lead"]) == (5.0, 2, 1.0)
    assert record["top"][0]["noise"] is None
    assert record["final_prob"] is None


def test_a_tie_ranks_by_id_and_a_token_without_a_rival_has_no_runner_up() -> None:
    one = SamplingParams(temperature=0, explain=2, allowed_token_ids=[1])
    record = sample(np.array([5.0, 5.0, 4.0]), one).explain
    assert record is not None
    assert (record["token"], record["rank"], record["margin"]) == (1, 2, 0.0)
    assert (record["runner_up"], record["lead"]) == (None, None)
