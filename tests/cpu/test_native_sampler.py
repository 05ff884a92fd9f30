"""The native sampler against the specification: the same token, log-probability and alternatives, to the bit, on every instruction set."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from verbatim.base.errors import ParameterError
from verbatim.base.params import SamplingParams
from verbatim.base.records import DrawSpec
from verbatim.sampling.pipeline import Row, sample_rows

native = pytest.importorskip("verbatim.backend.cpu._native")
pytestmark = pytest.mark.native


def random_row(r: random.Random, vocab: int) -> Row | None:
    def maybe(chance: float, value: Any, default: Any) -> Any:
        return value if r.random() < chance else default

    ids = [r.randrange(vocab) for _ in range(4)]
    try:
        params = SamplingParams(
            temperature=r.choice((0.0, 1e-3, 0.3, 1.0, 1.0, 1.5, 9.0)),
            top_k=maybe(0.4, r.randrange(1, 200), 0),
            top_p=maybe(0.4, r.uniform(0.001, 1.0), 1.0),
            min_p=maybe(0.3, r.random() ** 3, 0.0),
            typical_p=maybe(0.3, r.uniform(0.001, 1.0), 1.0),
            top_n_sigma=maybe(0.3, r.uniform(0.01, 3.0), 0.0),
            xtc_probability=maybe(0.3, r.random(), 0.0),
            xtc_threshold=r.uniform(0, 0.3),
            repetition_penalty=maybe(0.3, r.uniform(0.7, 1.5), 1.0),
            frequency_penalty=maybe(0.3, r.uniform(-2, 2), 0.0),
            presence_penalty=maybe(0.3, r.uniform(-2, 2), 0.0),
            dry_multiplier=maybe(0.3, r.uniform(0.1, 2), 0.0),
            dry_allowed_length=r.randrange(1, 4),
            dry_range=maybe(0.3, r.randrange(1, 20), 0),
            no_repeat_ngram=maybe(0.3, r.randrange(1, 4), 0),
            logit_bias=maybe(0.3, {i: r.uniform(-5, 5) for i in ids}, ()),
            allowed_token_ids=maybe(0.1, [r.randrange(vocab) for _ in range(9)], None),
            banned_token_ids=maybe(0.2, ids[:2], ()),
            min_tokens=maybe(0.3, 50, 0),
            logprobs=maybe(0.5, r.randrange(0, 8), None),
            logprobs_mode=maybe(0.5, "processed", "raw"),
        )
    except ParameterError:  # every allowed id happened to be banned
        return None
    history = tuple(r.randrange(min(vocab, 6)) for _ in range(r.randrange(40)))
    mask = maybe(0.2, bytes(r.randrange(256) for _ in range(r.choice(((vocab + 7) // 8, vocab // 16)))), None)
    spec = DrawSpec(
        params, r.getrandbits(64), r.randrange(len(history) + 1), history, withheld=tuple(ids[:1]), breakers=((1,), (2, 3))
    )
    return Row(spec, len(history), history if params.needs_history else (), mask)


def random_case(r: random.Random) -> tuple[np.ndarray, list[Row]]:
    vocab = r.choice((1, 2, 7, 33, 64, 100, 1000, 5000))
    rows = [row for row in (random_row(r, vocab) for _ in range(6)) if row is not None]
    logits = np.random.default_rng(r.getrandbits(32)).standard_normal((len(rows), vocab)).astype(np.float32)
    logits *= np.float32(r.choice((0.1, 1.0, 3.0, 10.0)))
    return (np.round(logits) if r.random() < 0.3 else logits), rows  # rounded: many ties


def native_draws(isa: str, logits: np.ndarray, rows: list[Row], threads: int = 1) -> list[Any]:
    from verbatim.backend.cpu.sampler import NativeSampler

    sampler = NativeSampler(native, None)
    return list(native.sample_logits(isa, threads, logits, [sampler.native_row(row) for row in rows]))


@pytest.mark.parametrize("isa", native.isas())
def test_same_bits_as_the_specification(isa: str) -> None:
    r = random.Random(11)
    for case in range(250):
        logits, rows = random_case(r)
        expected = [(d.token, d.logprob, d.top) for d in sample_rows(logits, rows)]
        found = native_draws(isa, logits, rows, threads=1 + case % 2)
        assert found == expected, rows


def test_a_row_that_is_not_finite_is_an_error_and_an_empty_one_draws_nothing() -> None:
    row = Row(DrawSpec(SamplingParams(), 1, 0), 0)
    for bad in (np.nan, np.inf):
        logits = np.zeros((1, 40), np.float32)
        logits[0, 17] = bad
        with pytest.raises(ValueError, match="finite"):
            native_draws("scalar", logits, [row])
    nothing = Row(DrawSpec(SamplingParams(), 1, 0), 0, mask=bytes(5))
    assert native_draws("scalar", np.zeros((1, 40), np.float32), [nothing])[0][0] == -1


def test_ids_outside_the_vocabulary_never_reach_a_kernel() -> None:
    for params in ({"logit_bias": {40: 1.0}}, {"banned_token_ids": (40,)}, {"allowed_token_ids": (3, 99)}):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            native_draws("scalar", np.zeros((1, 40), np.float32), [Row(DrawSpec(SamplingParams(**params), 1, 0), 0)])
    penalised = Row(DrawSpec(SamplingParams(repetition_penalty=1.1), 1, 0, (77,)), 1, (77,))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        native_draws("scalar", np.zeros((1, 40), np.float32), [penalised])
