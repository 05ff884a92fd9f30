"""Values that are not finite numbers end their own request with an error. Other requests of the
same step keep their tokens, and the engine continues."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from engine_rig import cpu_available

from verbatim.backend import open_backend
from verbatim.base.config import EngineConfig
from verbatim.base.errors import NOT_FINITE, BackendError
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion
from verbatim.engine.calls.async_engine import AsyncEngine
from verbatim.engine.calls.llm import LLM
from verbatim.engine.core import EngineCore
from verbatim.engine.loaded_model import AdapterInfo, LoadedModel
from verbatim.testing.fakes import ByteTokenizer, FakeBackend, fake_parts, fake_spec
from verbatim.testing.tiny_models import tiny_adapter, tiny_model

BAD = 7  # the token whose values are NaN
CONFIG = EngineConfig(kv_blocks=200, step_tokens=24, max_running=6, check=True)
Asked = tuple[list[int], SamplingParams]


def answers(core: EngineCore, asked: Sequence[Asked]) -> list[Completion]:
    for i, (prompt, params) in enumerate(asked):
        core.add(core.request(prompt, params, request_id=f"{i:03}"))
    done: list[Completion] = []
    while core.busy:
        done += [out for out in core.step() if isinstance(out, Completion)]
    core.check()
    return sorted(done, key=lambda one: one.request_id)


def traffic(seed: int) -> list[Asked]:
    """Prompts with and without BAD; a bias makes some requests draw it."""
    random = np.random.default_rng(seed)
    kinds = [
        {},
        {"n": 3},
        {"num_beams": 3},
        {"prompt_logprobs": 1, "logprobs": 2},
        {"prompt_logprobs": 0, "n": 2},
        {"speculate": "suffix"},
        {"logit_bias": {BAD: 4.0}},
    ]
    asked = []
    for i in range(21):
        prompt = random.integers(10, 60, random.integers(1, 30)).tolist()
        prompt = prompt[: len(prompt) // 2] * 2 + prompt  # repetitions, so that drafts are made
        if i % 3 == 0:
            prompt[int(random.integers(len(prompt)))] = BAD
        kind, fixed = kinds[i % len(kinds)], {"max_tokens": 8, "ignore_eos": True}
        drawn = {} if "num_beams" in kind else {"seed": i, "temperature": 0.7}
        asked.append((prompt, SamplingParams.from_mapping({**fixed, **drawn, **kind})))
    return asked


@cache
def answers_alone() -> list[Completion]:
    return [answers(EngineCore(fake_parts(broken=BAD), CONFIG), [one])[0] for one in traffic(1)]


@pytest.mark.parametrize("overlap", [False, True])
def test_every_request_ends_as_it_does_alone(overlap: bool) -> None:
    asked, alone = traffic(1), answers_alone()
    backend = FakeBackend(canary=True, broken=BAD, overlap=overlap)
    core = EngineCore(fake_parts(backend), CONFIG)
    for crowd in (answers(core, asked), answers(core, asked)):  # again, with a prefix cache
        assert [one.choices for one in crowd] == [one.choices for one in alone]
        assert [one.prompt_logprobs for one in crowd] == [one.prompt_logprobs for one in alone]
    failed = [one for one in alone if one.finish.reason == "error"]
    assert 6 < len(failed) < 14
    assert all(one.finish.detail.startswith(NOT_FINITE) for one in failed)
    assert any(one.token_ids for one in failed), "some break after a few tokens"
    assert core.stats()["requests_not_finite_total"] == 2 * len(failed)


@pytest.mark.parametrize("windows", [(None,), (None, 20)])
@pytest.mark.parametrize(
    "extra",
    [{}, {"num_beams": 2}, {"n": 2}, {"prompt_logprobs": 0}, {"n": 3, "prompt_logprobs": 0}],
)
def test_its_blocks_leave_the_prefix_cache_and_those_of_others_stay(
    windows: tuple[int | None, ...], extra: dict[str, int], tmp_path: Path
) -> None:
    config = replace(CONFIG, cache_dir=str(tmp_path), check=True)
    spec = fake_spec(windows=windows)
    core = EngineCore(fake_parts(FakeBackend(spec, canary=True, broken=BAD)), config)
    shared = list(range(100, 148))  # three blocks
    answers(core, [(shared, SamplingParams(max_tokens=1, ignore_eos=True))])

    def kept() -> list[set[bytes]]:
        return [set(pool.by_hash) for pool in core.scheduler.cache.pools]

    def stored() -> set[str]:
        assert core.disk_cache is not None
        core.disk_cache.flush()
        return {path.name for path in tmp_path.rglob("*.?")}

    before, files = kept(), stored()
    assert len(before[0]) == 3
    assert len(files) >= 3
    broken = [*shared, BAD, *range(60)]
    params = SamplingParams.from_mapping({"max_tokens": 4, **extra})
    assert answers(core, [(broken, params)])[0].finish.reason == "error"
    after = kept()
    assert after[0] == before[0]
    # blocks that left the window before the error may have been those of another request
    assert all(now <= then for now, then in zip(after, before, strict=True))
    assert {name for name in files if name.endswith(".0")} <= stored() <= files
    assert not any(pool.used for pool in core.scheduler.cache.pools)
    core.close()


def test_best_of_prefers_candidates_without_an_error() -> None:
    core = EngineCore(fake_parts(broken=BAD), CONFIG)
    asked = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.7, "logit_bias": {BAD: 4.0}}
    params = [SamplingParams.from_mapping({**asked, "seed": i, "n": 6}) for i in range(4)]
    prompt = list(range(20, 40))
    all_of = answers(core, [(prompt, one) for one in params])
    best = answers(core, [(prompt, one.with_(n=2, best_of=6)) for one in params])
    mixed = 0
    for six, two in zip(all_of, best, strict=True):
        complete = [c.token_ids for c in six.choices if c.finish.reason != "error"]
        mixed += 2 <= len(complete) < 6
        if len(complete) >= 2:
            assert all(c.finish.reason != "error" and c.token_ids in complete for c in two.choices)
    assert mixed, "no request has complete and broken candidates"


def test_the_error_names_position_and_remedy() -> None:
    llm = LLM.from_loaded(fake_parts(broken=BAD), kv_blocks=64)
    done = llm.generate([[1, 2, BAD, 3]], SamplingParams(max_tokens=3))[0]
    assert "at position 4: the model file is broken" in done.finish.detail
    scored = llm.generate([[1, 2, BAD, 3]], SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    assert "at position 3: " in scored.finish.detail
    with pytest.raises(BackendError, match=r"at position 3: .* verbatim doctor"):
        llm.score([1, 2, BAD, 3])
    with pytest.raises(BackendError, match=r"not finite numbers .* at position 2: "):
        llm.embed([1, 2, BAD, 3])
    chunked = LLM.from_loaded(fake_parts(broken=BAD), kv_blocks=64, step_tokens=2)
    with pytest.raises(BackendError, match="at position 4: "):
        chunked.embed([1, 2, 3, 4, BAD])
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, seed=1))[0].finish.reason != (
        "error"
    )


def test_the_async_engine_stays_alive() -> None:
    async def main() -> None:
        engine = AsyncEngine.from_loaded(fake_parts(broken=BAD), kv_blocks=64)
        params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
        found = await engine.generate([[1, BAD], [1, 2]], params)
        assert [one.finish.reason for one in found] == ["error", "length"]
        with pytest.raises(BackendError, match="not finite"):
            await engine.embed([1, BAD])
        assert engine.alive
        engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kv_type", ["f16", "q8"])
def test_an_adapter_that_overflows_ends_its_requests_only(backend: str, kv_type: str) -> None:
    """The blocks that held NaN are used again by the requests that follow."""
    if backend == "cpu" and not cpu_available():
        pytest.skip("the native module is not built")
    model = tiny_model("llama", vocab_size=260)
    adapter = tiny_adapter(model.spec, "wild")
    parts = {name: replace(part, scale=1e38) for name, part in adapter.parts.items()}
    model = replace(model, adapters=(replace(adapter, parts=parts),))
    config = EngineConfig(backend=backend, kv_type=kv_type, threads=1)
    wild = (AdapterInfo("wild", "wild", 4),)
    parts_of = LoadedModel(
        open_backend(model, config), ByteTokenizer(), eos_ids=(257,), adapters=wild
    )
    with LLM.from_loaded(parts_of, kv_blocks=12, check=True) as llm:
        plain = SamplingParams(max_tokens=5, seed=3, ignore_eos=True, temperature=0.9, logprobs=1)
        broken = plain.with_(adapter="wild")
        prompts = [list(range(1, 20)), list(range(30, 73)), list(range(1, 24)), [200]]
        params = [plain, broken, plain, broken]
        alone = [llm.generate([prompts[i]], [plain])[0].choices for i in (0, 2)]
        for _ in range(2):
            done = llm.generate(prompts, params)
            assert [one.choices for one in done[::2]] == alone
            assert all("the adapter wild or the model file" in x.finish.detail for x in done[1::2])
        scored = llm.generate(prompts[1:3], [broken.with_(prompt_logprobs=1), plain])
        assert "at position 1: " in scored[0].finish.detail
        assert scored[1].choices == alone[1]
