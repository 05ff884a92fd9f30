"""Speculation changes latency and nothing else: tokens, log-probabilities, explanations and finish
reasons are equal to the bit.

Every draft is submitted in full, whether it pays or not, in batches, on a KV cache so small that
sequences are preempted.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from mixed_requests import answer, random_params, random_prompt

from verbatim.backend import open_backend
from verbatim.backend.protocol import Backend
from verbatim.base.config import EngineConfig
from verbatim.base.errors import BackendError, ParameterError, UnsupportedError
from verbatim.base.params import SamplingParams
from verbatim.base.records import Finish
from verbatim.engine.calls.llm import LLM
from verbatim.engine.loaded_model import LoadedModel
from verbatim.engine.step.own_proposers import draft_blocks
from verbatim.schedule.no_token import NOTHING_LEFT
from verbatim.speculate.draft_policy import Speculator
from verbatim.testing.fakes import ByteTokenizer
from verbatim.testing.tiny_models import tiny_model

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def backend_of(name: str, *, seed: int = 0, noise: float = 0.0) -> Backend:
    model = tiny_model("llama", seed=seed, type="q8_0", **SHAPE)
    if noise:
        model = perturbed(model, noise)
    try:
        return open_backend(model, EngineConfig(backend=name, context=256, threads=1))
    except BackendError as error:
        if name == "cpu":
            pytest.skip(f"the native kernels are not built here: {error}")
        raise


def perturbed(model: Any, noise: float) -> Any:
    """The target with noise on its LM head: a draft model of medium quality."""
    import dataclasses

    import numpy as np

    from verbatim.formats.conversion import quantise
    from verbatim.formats.tensor import Tensor, Weights

    head = model.weights["head"]
    values = head.to_f32() + np.float32(noise) * np.random.default_rng(9).standard_normal(
        head.shape, dtype=np.float32
    )
    tensors = {
        **model.weights.tensors,
        "head": Tensor("head", head.type, head.shape, quantise(head.type, values)),
    }
    return dataclasses.replace(
        model, weights=Weights(tensors, model.weights.source, model.weights.digest)
    )


def engine(backend: str, mode: str, draft: Backend | None = None, **options: Any) -> LLM:
    words = ByteTokenizer()
    loaded = LoadedModel(
        backend_of(backend), words, (words.EOS,), name="tiny", digest="tiny", draft=draft
    )
    llm = LLM.from_loaded(
        loaded, context=256, kv_blocks=9, step_tokens=48, speculate=mode, check=True, **options
    )
    llm.core.drafting.adaptive = False
    llm.core.drafting.max_drafts = 5
    return llm


# Requests that every comparison has: three that together grow beyond the 9 blocks of the cache, and
# one that runs out of tokens.
GROWS = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
RUNS_OUT = GROWS.with_(allowed_token_ids=(97, 98, 99), no_repeat_ngram=1)


def compare(backend: str, count: int, seed: int) -> None:
    r = random.Random(seed)
    prompts = [[97 + i * k % 7 for i in range(30)] for k in range(1, 5)]
    prompts += [random_prompt(r) for _ in range(count)]
    params = [GROWS, GROWS, GROWS, RUNS_OUT, *(random_params(r) for _ in range(count))]
    crowds = [12, *(r.randrange(1, 17) for _ in range(count))]
    count = len(prompts)
    drafts = {"draft random": {"seed": 5}, "draft itself": {}, "draft between": {"noise": 0.05}}
    modes = ["off", "ngram", "suffix", "suffix remembered", *drafts, "auto"]
    answers: dict[str, list[Any]] = {}
    for mode in modes:
        draft = backend_of(backend, **drafts[mode]) if mode in drafts else None
        answers[mode], at = [], 0
        accepted = drafted = 0
        tenants = (
            ("*",) if mode == "suffix remembered" else ()
        )  # drafts from earlier completions as well
        with engine(backend, mode.split()[0], draft, suffix_tenants=tenants) as llm:
            for crowd in crowds:
                for done in llm.generate(prompts[at : at + crowd], params[at : at + crowd]):
                    answers[mode].append(answer(done))
                    drafted, accepted = (
                        drafted + done.usage.drafted_tokens,
                        accepted + done.usage.accepted_tokens,
                    )
                at += crowd
                if at >= count:
                    break
            assert mode == "off" or accepted > 0, (
                f"{mode}: no draft was ever accepted, so the test shows nothing"
            )
            assert mode in ("off", "draft itself") or accepted < drafted, (
                f"{mode}: no draft was ever rejected"
            )
            if mode == "off":
                assert llm.core.scheduler.preemptions > 0, (
                    "the cache should be too small for these crowds"
                )
                assert any(
                    c[2] == Finish("error", NOTHING_LEFT)
                    for choices in answers[mode]
                    for c in choices
                ), "no bans ran out"
    for mode in modes[1:]:
        for i, (plain, speculative) in enumerate(zip(answers["off"], answers[mode], strict=True)):
            assert speculative == plain, f"{mode}, request {i}: {params[i]}"


@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.soak), "cpu"])
def test_speculation_never_changes_an_answer(backend: str) -> None:
    compare(backend, 10 if backend == "reference" else 36, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_speculation_never_changes_any_of_2000_answers(backend: str) -> None:
    compare(backend, 2000, seed=2)


def draft_rates(same_noise: bool) -> tuple[int, int]:
    """(drafted, accepted) with the target as its own draft model at temperature 1."""
    with engine("reference", "draft", backend_of("reference")) as llm:
        if not same_noise:
            draft = llm.core.drafting.own["draft"]
            propose = draft.propose

            def other_noise(views: Any, limit: int, floor: float = 0.0) -> Any:
                return propose([v._replace(key=v.key ^ 0x5DEECE66D) for v in views], limit, floor)

            draft.propose = other_noise  # type: ignore[method-assign]
        done = llm.generate(
            [[97 + i] for i in range(12)],
            [
                SamplingParams(temperature=1.0, max_tokens=30, seed=i, ignore_eos=True)
                for i in range(12)
            ],
        )
    return sum(d.usage.drafted_tokens for d in done), sum(d.usage.accepted_tokens for d in done)


def test_the_target_as_its_own_draft_model_is_always_accepted_with_the_same_noise() -> None:
    drafted, accepted = draft_rates(same_noise=True)
    assert drafted > 200
    assert accepted == drafted
    drafted, accepted = draft_rates(same_noise=False)
    assert accepted < 0.8 * drafted, "with noise of its own it could not know what the target draws"


@pytest.mark.parametrize("count", [1000, pytest.param(4000, marks=pytest.mark.soak)])
def test_a_draft_that_is_close_agrees_at_least_as_often_as_theory_says(count: int) -> None:
    """P(same token) >= (1 - TV) / (1 + TV) for Gumbel draws with shared noise; averaged over
    `count` positions of random rows."""
    import numpy as np

    from verbatim.sampling.draw import draw
    from verbatim.sampling.numerics import masses

    random_rows = np.random.default_rng(3)
    ids = np.arange(50)
    same, bound = [], []
    for position in range(count):
        target = random_rows.standard_normal(50) * 2
        draft_logits = target + random_rows.standard_normal(50) * 0.5
        p, q = (np.exp(x) / np.exp(x).sum() for x in (target, draft_logits))
        tv = 0.5 * np.abs(p - q).sum()
        bound.append((1 - tv) / (1 + tv))
        same.append(
            draw(ids, target - target.max(), 7, position)[0]
            == draw(ids, draft_logits - draft_logits.max(), 7, position)[0]
        )
    assert masses(np.zeros(1))[0] > 0
    # The standard deviation of the mean of Bernoulli draws is at most this. A false alarm is a
    # 4-sigma event (probability below 1 in 30,000).
    deviation = 0.5 / np.sqrt(count)
    assert np.mean(same) >= np.mean(bound) - 4 * deviation


@pytest.mark.parametrize(
    "ends",
    [
        {"stop": ("e", "t", "ab")},
        {"choice": ("alpha", "beta")},
        {"on_loop": "stop", "logit_bias": {98: 90.0}},
    ],
)
def test_drafts_after_the_end_of_a_completion_leave_no_trace(ends: dict[str, Any]) -> None:
    """A stop string, a structure or a loop ends a completion in the middle of accepted drafts.
    Nothing after the end is counted, cached or remembered."""
    asked = [
        SamplingParams(
            **{"temperature": 1.0, "max_tokens": 100, "seed": i, "ignore_eos": True, **ends}
        )
        for i in range(7)
    ]
    left: dict[str, Any] = {}
    for mode in ("off", "draft"):
        with engine("reference", mode, backend_of("reference") if mode == "draft" else None) as llm:
            left[mode] = [trace(llm, [97 + i % 5] * 5, params) for i, params in enumerate(asked)]
    assert left["draft"] == left["off"]
    assert any(choice[2].reason != "length" for choices, _ in left["off"] for choice in choices), (
        "none ended early"
    )


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_bans_that_leave_no_token_end_one_completion_only(backend: str) -> None:
    """The draft model runs out of allowed tokens before the target does. Drafts accepted before are
    counted."""
    asked = SamplingParams(
        allowed_token_ids=(97, 98), no_repeat_ngram=2, max_tokens=40, temperature=1.0, seed=3
    )
    with engine(backend, "draft", backend_of(backend)) as llm:
        done, beside = llm.generate(
            [[97], [98]], [asked, SamplingParams(max_tokens=5, seed=1, ignore_eos=True)]
        )
        assert done.choices[0].finish == Finish("error", NOTHING_LEFT)
        assert done.token_ids == (97, 98, 98, 97)
        assert done.usage.drafted_tokens == done.usage.accepted_tokens == 3, (
            "its own draft, and all that it could draw"
        )
        assert len(beside.token_ids) == 5


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_draft_model_with_fewer_positions_than_the_target(backend: str) -> None:
    """Learnt positions end with their table: beyond it there are no drafts, and the output is
    the same."""
    words, answers = ByteTokenizer(), []
    config = EngineConfig(backend=backend, threads=1)
    for draft in (
        None,
        open_backend(tiny_model("gpt2", seed=0, type="q8_0", n_positions=32), config),
    ):
        target = open_backend(tiny_model("gpt2", seed=0, type="q8_0"), config)
        loaded = LoadedModel(target, words, (words.EOS,), draft=draft)
        with LLM.from_loaded(
            loaded, context=128, kv_blocks=16, speculate="draft" if draft else "off", check=True
        ) as llm:
            llm.core.drafting.adaptive = False
            asked = SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True)
            done = llm.generate([[97] * 20, [98] * 30, [99] * 50], asked)
            answers.append([answer(d) for d in done])
            drafted = [d.usage.drafted_tokens for d in done]
    assert answers[0] == answers[1]
    assert drafted[0] > drafted[1] > 0 == drafted[2]


def test_a_draft_model_with_fewer_positions_than_asked_for_opens_with_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from verbatim.engine.loading.load_engine import _load_draft

    def load(path: str, *, context: int | None = None, **_: Any) -> Any:
        return tiny_model("gpt2", context=context, n_positions=32)

    monkeypatch.setattr("verbatim.hub.catalog.resolve", lambda name, **_: name)
    monkeypatch.setattr("verbatim.model.loading.load.load_model", load)
    for asked, opened in ((16, 16), (256, 32), (None, 32)):
        config = EngineConfig(backend="reference", context=asked, speculate="draft:small")
        draft, _ = _load_draft(config, 260, offline=True, progress=None)
        assert draft is not None
        assert draft.spec.context == opened
        draft.close()


def test_what_drafts_saved_agrees_with_what_was_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a completion ends by an end token, a stop string, a limit or for lack of allowed
    tokens: the time saved is that of the accepted drafts."""
    settled: list[int] = []
    account = Speculator._account

    def counted(self: Speculator, record: Any, pending: Any, seen: Any) -> None:
        settled.append(seen.accepted - record.accepted)
        account(self, record, pending, seen)

    monkeypatch.setattr(Speculator, "_account", counted)
    r = random.Random(5)
    with engine("reference", "draft", backend_of("reference")) as llm:
        for _ in range(30):
            settled.clear()
            done = llm.generate(random_prompt(r), random_params(r))
            assert sum(settled) == done.usage.accepted_tokens


@pytest.mark.parametrize("target", [{}, {"sliding_window": 32}])
@pytest.mark.parametrize("heads", [4, 1])
def test_the_draft_models_kv_cache_counts_towards_the_memory(
    target: dict[str, int], heads: int
) -> None:
    config, words = EngineConfig(backend="reference", threads=1), ByteTokenizer()
    memory = 400_000
    draft = open_backend(
        tiny_model("llama", num_key_value_heads=heads, num_hidden_layers=5), config
    )
    family = "gemma3" if target else "llama"
    loaded = LoadedModel(
        open_backend(tiny_model(family, **target), config), words, (words.EOS,), draft=draft
    )
    allocated: list[tuple[int, ...]] = []
    allocate = draft.allocate
    draft.allocate = lambda blocks: (allocated.append(blocks), allocate(blocks))[1]  # type: ignore[method-assign]
    with LLM.from_loaded(loaded, kv_memory=memory, speculate="draft") as llm:
        theirs = sum(n * b for n, b in zip(allocated[0], draft.block_bytes(), strict=True))
        ours = llm.core.cache_plan.bytes
        assert 0.8 * memory < ours + theirs <= memory
        assert "for the draft model" in str(llm.core.cache_plan)
        most = llm.core.config.max_running * draft.spec.context // draft.block_size
        assert (
            draft_blocks(draft, loaded, EngineConfig(max_running=1), llm.core.scheduler)
            <= most // llm.core.config.max_running
        )


def trace(llm: LLM, prompt: list[int], params: SamplingParams) -> Any:
    """The completion, and the number of blocks it left in the prefix cache."""
    scheduler, known = llm.core.scheduler, []
    scheduler.clear_prefix_cache()
    with pytest.MonkeyPatch.context() as patch:
        end = scheduler._end
        patch.setattr(scheduler, "_end", lambda seq: (known.append(list(seq.tokens)), end(seq)))
        done = llm.generate(prompt, params)
    assert known == [prompt + list(done.token_ids)], (
        "the scheduler knows tokens that the answer has not"
    )
    assert done.usage.accepted_tokens < done.usage.output_tokens == len(done.token_ids)
    return answer(done), [len(pool.cached) for pool in scheduler.cache.pools]


def test_settings_without_effect_are_rejected_by_name() -> None:
    for mode in ("off", "ngram"):
        with pytest.raises(ParameterError, match="suffix_tenants: needs speculate=suffix or auto"):
            engine("reference", mode, suffix_tenants=("me",))
    for mode in ("ngram", "suffix", "head", "draft"):
        with pytest.raises(UnsupportedError, match=r"speculate: .* needs the KV cache"):
            engine("reference", mode, use_cache=False)
    for mode in ("off", "auto"):
        with engine("reference", mode, use_cache=False) as llm:
            assert (
                llm.generate("abababab", SamplingParams(max_tokens=8, seed=1)).usage.drafted_tokens
                == 0
            )
            with pytest.raises(UnsupportedError, match="speculate: 'suffix' needs the KV cache"):
                llm.generate("abababab", SamplingParams(max_tokens=8, seed=1, speculate="suffix"))


def test_unknown_and_impossible_modes_are_refused_by_name() -> None:
    for mode in ("magic", "suffix:x", "off:", "auto:head"):
        with pytest.raises(ParameterError, match="speculate"):
            engine("reference", mode)
    with (
        engine("reference", "head") as llm,
        pytest.raises(UnsupportedError, match="'head' needs an engine that was opened with a"),
    ):
        llm.generate("a", SamplingParams(max_tokens=2))
    with engine("reference", "auto") as llm:
        with pytest.raises(UnsupportedError, match="speculate"):
            llm.generate("a", SamplingParams(speculate="draft", max_tokens=2))
        with pytest.raises(ParameterError, match="speculate"):
            llm.generate("a", SamplingParams(speculate="guess", max_tokens=2))
        with pytest.raises(ParameterError, match="speculate"):
            SamplingParams(num_beams=2, speculate="ngram")
        assert (
            SamplingParams(num_beams=2, speculate="off").speculate == "off"
        )  # which says what beams do anyway
        assert (
            llm.generate(
                "abababab", SamplingParams(speculate="off", max_tokens=8, seed=1)
            ).usage.drafted_tokens
            == 0
        )
