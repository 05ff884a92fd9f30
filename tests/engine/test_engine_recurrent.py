"""Recurrent layers in the engine: one answer, whatever the cut of the sequence into steps.

Chunked prefill, prefix hits, preemption, forks, batches, and drafts that are accepted and rejected
at every place of a block must not change a bit of the log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from engine_rig import tiny_parts

from verbatim.base.config import EngineConfig
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion
from verbatim.engine.core import EngineCore
from verbatim.schedule.invariants import check_scheduler
from verbatim.testing_models import RECURRENT_FAMILIES

PROMPT = [256, *b"Once upon a time there was a scheduler that never"]  # three blocks and two tokens
OTHER = [256, *b"A state is"]
PARAMS = SamplingParams(temperature=0, max_tokens=26, logprobs=0, ignore_eos=True)
CASES = [(f, b) for f in RECURRENT_FAMILIES for b in ("reference", "cpu")]
Answer = tuple[tuple[int, ...], tuple[float, ...]]


def core_of(family: str, backend: str, **options: Any) -> EngineCore:
    config = EngineConfig(check=backend == "reference", speculate="off", **options)
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
    """Family and backend -> the answer to PROMPT alone, in one prefill step."""
    made: dict[tuple[str, str], Answer] = {}

    def get(family: str, backend: str) -> Answer:
        if (family, backend) not in made:
            core = core_of(family, backend, prefix_cache=False)
            made[family, backend] = answer(finish(core, (PROMPT, PARAMS))[0])
            assert len(set(made[family, backend][1])) > 20, "flat logits would hide errors"
        return made[family, backend]

    return get


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_chunks_and_prefix_hits_keep_every_bit(family: str, backend: str, alone: Any) -> None:
    core = core_of(family, backend, step_tokens=7)
    first, again = (finish(core, (PROMPT, PARAMS))[0] for _ in range(2))
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 48)
    assert answer(first) == answer(again) == alone(family, backend)
    longer = [*PROMPT, *first.token_ids]  # the blocks of the output are cached, too
    hit = finish(core, (longer, PARAMS.with_(max_tokens=4)))[0]
    assert hit.usage.cached_tokens == 64
    cold = core_of(family, backend, prefix_cache=False)
    assert answer(hit) == answer(finish(cold, (longer, PARAMS.with_(max_tokens=4)))[0])


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_a_hit_needs_the_snapshot_at_its_end(family: str, backend: str, alone: Any) -> None:
    """Snapshots may be evicted on their own: keys and values without a state are no hit."""
    core = core_of(family, backend)
    finish(core, (PROMPT, PARAMS))
    pool = core.scheduler.cache.pools[-1]
    kept = list(pool.cached)
    for block in kept[2:]:  # least recently used first: blocks 0 and 1 of the prompt stay
        del pool.cached[block]
        pool._drop_hash(block)
        pool.free.append(block)
    again = finish(core, (PROMPT, PARAMS))[0]
    assert again.usage.cached_tokens == 32
    assert answer(again) == alone(family, backend)


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_preemption_keeps_every_bit(family: str, backend: str, alone: Any) -> None:
    """Three sequences that need five blocks each in a cache of eight."""
    core = core_of(family, backend, kv_blocks=8)
    done = finish(core, *[(PROMPT, PARAMS)] * 3, (OTHER, PARAMS))
    assert core.scheduler.preemptions > 0
    assert {answer(one) for one in done[:3]} == {alone(family, backend)}


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_forks_and_batches_keep_every_bit(family: str, backend: str, alone: Any) -> None:
    core = core_of(family, backend)
    draws = PARAMS.with_(n=3, temperature=1.0, seed=5)
    together = finish(core, (OTHER, PARAMS), (PROMPT, draws), (PROMPT, PARAMS), (OTHER, draws))
    assert answer(together[2]) == alone(family, backend)
    single = finish(core_of(family, backend, prefix_cache=False), (PROMPT, draws))[0]
    assert [answer(single, i) for i in range(3)] == [answer(together[1], i) for i in range(3)]
    assert len({answer(single, i)[0] for i in range(3)}) == 3


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_rejected_drafts_leave_no_trace(
    family: str, backend: str, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zero to four right drafts, then wrong ones, over the borders of blocks."""
    expected = alone(family, backend)[0]
    core = core_of(family, backend)

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
    assert answer(done) == alone(family, backend)
