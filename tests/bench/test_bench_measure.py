"""Measurements of `bench`: alternating rounds, warm-up, the jobs of a table, and the crowd."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from machine_limits import CARD, LIMITS
from verbatim import LLM
from verbatim.bench import measure
from verbatim.bench.crowd import Crowd, make_crowd, run_crowd


class FakeRunner:
    """A runner that records its rounds."""

    def __init__(self, name: str, log: list[str], seconds: float = 1.0) -> None:
        self.name, self.log, self.seconds = name, log, seconds

    def prefill(self, tokens: int) -> float:
        self.log.append(self.name)
        return self.seconds

    def decode(self, context: int, steps: int) -> float:
        return self.prefill(context)

    def batch(self, sequences: int, context: int, steps: int) -> float:
        return self.prefill(context)


def test_rounds_alternate_and_the_first_is_a_warm_up() -> None:
    log: list[str] = []
    [job] = measure.jobs([100], [], [], 8, 512, 4096)
    row = measure.measure(job, [FakeRunner("verbatim", log, 0.5), FakeRunner("rival", log, 2.0)], 3)
    assert log == ["verbatim", "rival"] * 4
    assert row.rate("verbatim") == 200
    assert row.rate("rival") == 50


def test_a_gpu_has_two_rounds_to_warm_up() -> None:
    """The first compiles kernels, and the second captures the graph of the prompt's shape."""
    times = iter([0.8, 0.3, 0.002, 0.002])
    job = measure.Job("prefill", 100, 100, lambda _: next(times))
    row = measure.measure(job, [FakeRunner("verbatim", [])], 2, measure.GPU_WARM_UPS)
    assert row.seconds["verbatim"] == [0.002, 0.002]


def test_a_slow_measurement_is_not_repeated() -> None:
    log: list[str] = []
    [job] = measure.jobs([100], [], [], 8, 512, 4096)
    row = measure.measure(
        job, [FakeRunner("verbatim", log, 0.5), FakeRunner("rival", log, 60.0)], 3
    )
    assert log.count("rival") == 1
    assert row.seconds["rival"] == [60.0]
    assert len(row.seconds["verbatim"]) == 3


def test_jobs_fit_the_context_and_batches_start_together() -> None:
    table = measure.jobs([32, 5000], [32, 4090], [1, 32, 1000], 16, 512, 4096)
    assert [(j.kind, j.size) for j in table] == [
        ("prefill", 32),
        ("decode", 32),
        ("batch", 1),
        ("batch", 32),
        ("batch", 1000),
    ]
    assert table[3].tokens == 32 * 16


def test_the_least_time_of_a_crowd_matches_values_computed_by_hand() -> None:
    crowd = Crowd([[1] * 10, [1] * 20], [4, 2])
    assert crowd.tokens == 6
    # contexts 10 to 13 and 20 to 21: 87 positions; four steps
    read = 87 * CARD.kv_token_bytes + 4 * CARD.weight_bytes
    slow_memory = replace(LIMITS, read_bytes=1e9)
    assert crowd.least_seconds(slow_memory, CARD) == pytest.approx(read / 1e9)
    # 30 prompt tokens, which attend to 50 + 200 positions, and 6 drawn ones
    ops = 30 * CARD.prompt_ops_token + 6 * CARD.ops_token + (87 + 250) * CARD.ops_position
    slow_units = replace(LIMITS, int8_ops=1e9)
    assert crowd.least_seconds(slow_units, CARD) == pytest.approx(ops / 1e9)


def test_a_crowd_fits_the_context_and_draws_all_its_tokens(tiny: Path) -> None:
    with LLM(str(tiny), context=40, backend="reference") as llm:
        crowd = make_crowd(llm, 3)
        assert crowd.prompts != make_crowd(llm, 3, seed=1).prompts
        assert crowd.lengths == make_crowd(llm, 3, seed=1).lengths
        assert all(
            len(p) + n < llm.context for p, n in zip(crowd.prompts, crowd.lengths, strict=True)
        )
        before = llm.stats()["output_tokens_total"]
        assert run_crowd(llm, crowd) > 0
        assert llm.stats()["output_tokens_total"] - before == crowd.tokens
