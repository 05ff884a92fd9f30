"""One answer, whatever the cut of the sequence into steps: recurrent layers, Gemma 4, 8-bit caches.

Chunked prefill, prefix hits, preemption, forks, batches, and drafts that are accepted and rejected
at every place of a block must not change a bit of the log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from engine_rig import tiny_parts

from parity_types import RECURRENT_FAMILIES
from verbatim.base.config import EngineConfig
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion
from verbatim.engine.core import EngineCore
from verbatim.schedule.invariants import check_scheduler

PROMPT = [256, *b"Once upon a time there was a scheduler that never"]  # three blocks and two tokens
OTHER = [256, *b"A state is"]
PARAMS = SamplingParams(temperature=0, max_tokens=26, logprobs=0, ignore_eos=True)
BACKENDS = ("reference", "cpu")
# The reference backend takes ten times as long, so most families run on it under `make soak`.
RECURRENT = [
    pytest.param((f, b, "f16"), marks=pytest.mark.soak)
    if b == "reference" and f not in ("lfm2", "qwen35")
    else (f, b, "f16")
    for f in RECURRENT_FAMILIES
    for b in BACKENDS
]
# Gemma 4: head sizes per layer, layers that read the keys and values of others.
CASES = [
    *RECURRENT,
    *[("gemma4", b, "f16") for b in BACKENDS],
    ("gemma4moe", "cpu", "f16"),
    *[("llama", b, kv_type) for b in BACKENDS for kv_type in ("q8", "fp8")],
    *[
        (f, "cpu", kv_type)
        for f, kv_type in (("gemma4", "q8"), ("gemma4", "fp8"), ("qwen35", "q8"))
    ],
]
Answer = tuple[tuple[int, ...], tuple[float, ...]]
Case = tuple[str, str, Any]  # family, backend, type of the KV cache


def core_of(case: Case, **options: Any) -> EngineCore:
    family, backend, kv_type = case
    options = {"kv_blocks": 256, "speculate": "off", **options}  # each check visits every block
    config = EngineConfig(check=backend == "reference", kv_type=kv_type, **options)
    return EngineCore(tiny_parts(backend, config, family), config)


def finish(core: EngineCore, *requests: tuple[list[int], SamplingParams]) -> list[Completion]:
    """Run the requests together; check the block accounting after every step."""
    added = [core.request(*request) for request in requests]
    for request in added:
        core.add(request)
    done: dict[str, Completion] = {}
    while len(done) < len(added):
        for out in core.step():
            if isinstance(out, Completion):
                done[out.request_id] = out
        check_scheduler(core.scheduler)
    return [done[request.id] for request in added]


def answer(done: Completion, choice: int = 0) -> Answer:
    found = done.choices[choice]
    return found.token_ids, tuple(entry.logprob for entry in found.logprobs)


@pytest.fixture(scope="module")
def alone() -> Any:
    """Case -> the answer to PROMPT alone, in one prefill step."""
    made: dict[Case, Answer] = {}

    def get(case: Case) -> Answer:
        if case not in made:
            core = core_of(case, prefix_cache=False)
            made[case] = answer(finish(core, (PROMPT, PARAMS))[0])
            assert len(set(made[case][1])) > 20, "flat logits would hide errors"
        return made[case]

    return get


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_chunks_and_prefix_hits_keep_every_bit(case: Case, alone: Any) -> None:
    core = core_of(case, step_tokens=7)
    first, again = (finish(core, (PROMPT, PARAMS))[0] for _ in range(2))
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 48)
    assert answer(first) == answer(again) == alone(case)
    longer = [*PROMPT, *first.token_ids]  # the blocks of the output are cached, too
    hit = finish(core, (longer, PARAMS.with_(max_tokens=4)))[0]
    assert hit.usage.cached_tokens == 64
    cold = core_of(case, prefix_cache=False)
    assert answer(hit) == answer(finish(cold, (longer, PARAMS.with_(max_tokens=4)))[0])


@pytest.mark.parametrize("case", RECURRENT, ids="-".join)
def test_a_hit_needs_the_snapshot_at_its_end(case: Case, alone: Any) -> None:
    """Snapshots may be evicted on their own: keys and values without a state are no hit."""
    core = core_of(case)
    finish(core, (PROMPT, PARAMS))
    pool = core.scheduler.cache.pools[-1]
    kept = list(pool.cached)
    for block in kept[2:]:  # least recently used first: blocks 0 and 1 of the prompt stay
        del pool.cached[block]
        pool._drop_hash(block)
        pool.free.append(block)
    again = finish(core, (PROMPT, PARAMS))[0]
    assert again.usage.cached_tokens == 32
    assert answer(again) == alone(case)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_preemption_keeps_every_bit(case: Case, alone: Any) -> None:
    """Three sequences that need five blocks each and share three, in a cache that holds fewer."""
    core = core_of(case, kv_blocks=6 if case[0] == "llama" else 8)
    done = finish(core, *[(PROMPT, PARAMS)] * 3, (OTHER, PARAMS))
    assert core.scheduler.preemptions > 0
    assert {answer(one) for one in done[:3]} == {alone(case)}


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_forks_and_batches_keep_every_bit(case: Case, alone: Any) -> None:
    core = core_of(case)
    draws = PARAMS.with_(n=3, temperature=1.0, seed=5)
    together = finish(core, (OTHER, PARAMS), (PROMPT, draws), (PROMPT, PARAMS), (OTHER, draws))
    assert answer(together[2]) == alone(case)
    single = finish(core_of(case, prefix_cache=False), (PROMPT, draws))[0]
    assert [answer(single, i) for i in range(3)] == [answer(together[1], i) for i in range(3)]
    assert len({answer(single, i)[0] for i in range(3)}) == 3


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_rejected_drafts_leave_no_trace(
    case: Case, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zero to four right drafts, then wrong ones, over the borders of blocks."""
    expected = alone(case)[0]
    core = core_of(case)

    def propose(_: Mapping[int, Any]) -> None:
        for seq in core.scheduler.running:
            at = len(seq.tokens) - seq.prompt_len
            if len(seq.tokens) - seq.computed == 1:
                right = expected[at : at + at % 5]
                wrong = [(token + 1) % 250 for token in expected[at + at % 5 :][:3]]
                core.scheduler.set_drafts(seq.id, (*right, *wrong))

    monkeypatch.setattr(core.drafting, "propose", propose)
    done = finish(core, (PROMPT, PARAMS))[0]
    assert 0 < done.usage.accepted_tokens < done.usage.drafted_tokens
    assert answer(done) == alone(case)


def test_every_kv_type_has_other_bits() -> None:
    """Otherwise the cases above would compare one cache with itself."""
    for family, backend in (("llama", "cpu"), ("llama", "reference"), ("gemma4", "cpu")):
        answers = {
            answer(finish(core_of((family, backend, kv_type)), (PROMPT, PARAMS))[0])
            for kv_type in ("f16", "q8", "fp8")
        }
        assert len(answers) == 3
