"""Batch invariance: one request (the needle) in random traffic has one output, equal in every token
and in every bit of its log-probabilities.

52 runs per backend (8 on the reference, which is slow; `make soak`: 500 of every family): batch 1
to 64, random step budgets, prefix cache hot, cold and off, a KV cache so small that the needle is
preempted ten times and more, streamed and whole, one choice or several; at temperature 0 and at
temperature 1 with a seed.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_rig import BACKENDS, cpu_available, tiny_parts

from verbatim.base.config import EngineConfig
from verbatim.base.params import SamplingParams
from verbatim.base.records import Choice, Completion, Delta
from verbatim.engine.core import EngineCore
from verbatim.testing.tiny_models import FAMILIES

# For each of the two temperatures. The runs 0 and 50 preempt the needle often.
RUNS = {"fake": 52, "overlapped": 52, "reference": 8, "cpu": 52}
# 49 tokens: three blocks and one
PROMPT = [256, *b"Once upon a time there was a scheduler that never"]
TOKENS = 24


def needle(temperature: float, n: int = 1, priority: int = 0) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        seed=11,
        max_tokens=TOKENS,
        logprobs=2,
        ignore_eos=True,
        n=n,
        priority=priority,
    )


def random_request(rng: random.Random) -> tuple[list[int], SamplingParams]:
    """A request of the background traffic; one in three shares a prefix with the needle."""
    prompt = [rng.randrange(260) for _ in range(rng.choice((1, 3, 8, 17, 30)))]
    if rng.random() < 0.3:
        prompt = PROMPT[: rng.randrange(1, len(PROMPT))] + prompt[:4]
    changes: dict[str, Any] = rng.choice(
        (
            {"temperature": 0},
            {"temperature": 0},
            {"n": 3, "temperature": 0.7},
            {"top_k": 5, "frequency_penalty": 0.5},
            {"min_p": 0.1},
        )
    )
    return prompt, SamplingParams(
        max_tokens=rng.randrange(1, 12), **{"temperature": 1.0, **changes}
    )


def run(
    core: EngineCore, rng: random.Random, params: SamplingParams, others: int, starved: bool
) -> tuple[Completion, list[Delta]]:
    """Run random traffic, add the needle at a random step, and step until it completes."""
    arrivals = sorted(rng.randrange(12) for _ in range(others))
    enters = rng.randrange(8)
    deltas: list[Delta] = []
    for step in range(20_000):
        while arrivals and arrivals[0] <= step:
            arrivals.pop(0)
            core.add(core.request(*random_request(rng)))
        if (
            starved and step < 600 and len(core.requests) < 3
        ):  # always two others, before it in rank, growing into its blocks
            core.add(
                core.request(
                    [step % 200] * 4, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
                )
            )
        if step == enters:
            core.add(core.request(PROMPT, params, request_id="needle"))
        for out in core.step():
            if out.request_id != "needle":
                continue
            if isinstance(out, Completion):
                return out, deltas
            deltas.append(out)
    raise AssertionError("the needle never came out")


def joined(deltas: list[Delta], index: int) -> tuple[Any, ...]:
    mine = [d for d in deltas if d.index == index]
    return (
        "".join(d.text for d in mine),
        tuple(t for d in mine for t in d.token_ids),
        tuple(lp for d in mine for lp in d.logprobs),
        mine[-1].finish,
    )


def answer(choice: Choice) -> tuple[Any, ...]:
    return choice.text, choice.token_ids, choice.logprobs, choice.finish


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "temperature"),
    [
        pytest.param(b, t, marks=[pytest.mark.soak] if (b, t) == ("reference", 0.0) else [])
        for b in RUNS
        for t in (0.0, 1.0)
    ],
)
def test_one_output_in_any_batch(backend: str, temperature: float) -> None:
    haystack(backend, temperature, "llama", RUNS[backend])


@pytest.mark.soak
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_one_output_in_any_batch_for_every_family(
    backend: str, family: str, temperature: float
) -> None:
    haystack(backend, temperature, family, 500)


def haystack(backend: str, temperature: float, family: str, runs: int) -> None:
    if backend == "cpu" and not cpu_available(family):
        pytest.skip("the native kernels are not built, or do not know this family")
    answers, preempted, batches, hits = set(), [], set(), 0
    for trial in range(runs):
        rng = random.Random(trial)
        starved = trial % 50 == 0
        others = (
            0 if starved or trial == 1 else 63 if trial == 2 else rng.choice((0, 1, 2, 3, 5, 8))
        )
        config = EngineConfig(
            kv_blocks=8 if starved else rng.choice((12, 20, 400)),
            step_tokens=4 if starved else 512 if others > 20 else rng.choice((3, 7, 16, 64, 512)),
            max_running=64 if starved or others > 20 else rng.choice((2, 8, 64)),
            prefix_cache=rng.random() < 0.7 and not starved,
            speculate="off" if starved else rng.choice(("off", "auto")),
            check=trial % 10 == 0,
        )
        size = {"num_hidden_layers": 2} if family == "llama" else {}
        core = EngineCore(tiny_parts(backend, config, family, pipeline=False, **size), config)
        if rng.random() < 0.3:  # hot: it was asked before
            core.add(core.request(PROMPT, needle(temperature)))
            while core.busy:
                core.step()
        n = rng.choice((1, 1, 1, 3))
        done, deltas = run(
            core, rng, needle(temperature, n, priority=1000 if starved else 0), others, starved
        )
        assert [joined(deltas, i) for i in range(n)] == [answer(c) for c in done.choices]
        if starved:
            preempted.append(done.timings.preemptions)
        answers.add(answer(done.choices[0]))
        hits += done.usage.cached_tokens > 0
        batches.add(int(core.stats()["requests_total"]))
        core.close()
    assert len(answers) == 1
    assert max(preempted) >= 10
    assert {1, 64} <= batches
    assert hits >= runs // 15
