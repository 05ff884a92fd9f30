"""Diffusion models: one answer whatever the cut of the sequence into steps, every parameter
honoured or refused by name, receipts, explanations, streams. tests/parity compares the tokens with
PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
from engine_rig import tiny_parts

from verbatim import LLM, EngineConfig, ParameterError, SamplingParams, UnsupportedError
from verbatim.base.errors import CapacityError
from verbatim.base.params import DIFFUSION
from verbatim.base.records import Completion
from verbatim.engine.core import EngineCore
from verbatim.explain.explanation import what_if
from verbatim.schedule.invariants import check_scheduler

PROMPT = [256, *b"Once upon a time there was a scheduler that never"]  # three blocks and two tokens
CROWD = [[256, *b"A state is"], PROMPT[:21], [256, 65]]
REMASKING = (
    *("low_confidence_static", "low_confidence_dynamic", "entropy_bounded"),
    *("random", "sequential"),
)
Answer = tuple[tuple[int, ...], tuple[float, ...]]


def params(**changes: Any) -> SamplingParams:
    plain = {"temperature": 0.8, "seed": 11, "max_tokens": 19, "ignore_eos": True, "logprobs": 0}
    return SamplingParams(**{**plain, **changes})


def core_of(backend: str, family: str = "sdar", **options: Any) -> EngineCore:
    options = {"kv_blocks": 256, **options}  # each check visits every block
    config = EngineConfig(check=backend == "reference", **options)
    return EngineCore(tiny_parts(backend, config, family), config)


def finish(
    core: EngineCore, *requests: tuple[list[int], SamplingParams], preempt: bool = False
) -> list[Completion]:
    """`preempt`: all sequences after every second step."""
    added = [core.request(*request) for request in requests]
    for request in added:
        core.add(request)
    done: dict[str, Completion] = {}
    steps = 0
    while len(done) < len(added):
        done.update((o.request_id, o) for o in core.step() if isinstance(o, Completion))
        check_scheduler(core.scheduler)
        steps += 1
        if preempt and steps % 2:
            core.scheduler.preempt_all()
    return [done[request.id] for request in added]


def answer(completion: Completion) -> Answer:
    choice = completion.choices[0]
    return choice.token_ids, tuple(row.logprob for row in choice.logprobs)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    ("backend", "block", "remasking"),
    [
        ("reference", 4, "low_confidence_dynamic"),
        ("cpu", 1, "low_confidence_static"),
        ("cpu", 4, "random"),
        ("cpu", 7, "entropy_bounded"),
        ("cpu", 32, "low_confidence_dynamic"),
    ],
)
def test_a_seeded_request_has_one_answer(backend: str, block: int, remasking: str) -> None:
    """Chunks of one block, a crowd, prefix hits, preemption inside blocks and no cache at all, with
    parameters that read noise, confidence and history."""
    wanted = params(block_length=block, remasking=remasking, repetition_penalty=1.2, top_p=0.95)
    core = core_of(backend)
    alone = answer(finish(core, (PROMPT, wanted))[0])
    assert answer(finish(core, (PROMPT, wanted))[0]) == alone  # prefix hit
    crowd = [
        (prompt, params(seed=i, max_tokens=5 + i, block_length=(2, 5, 16)[i]))
        for i, prompt in enumerate(CROWD)
    ]
    engines: list[dict[str, Any]] = [
        {"step_tokens": max(16, block + 2)},
        {"use_cache": False},
        {"prefix_cache": False, "kv_blocks": 12, "context": 96},
    ]
    for options in engines:
        core = core_of(backend, **options)
        done = finish(core, *crowd, (PROMPT, wanted), preempt="kv_blocks" in options)
        assert answer(done[len(crowd)]) == alone, options


@pytest.mark.parametrize("family", ["llada", "dream", "nemotron_labs_diffusion"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_other_ways_to_attend_have_one_answer(backend: str, family: str) -> None:
    """Full attention, and a causal context in front of the block in progress."""
    wanted = params(block_length=5, denoising_steps=3, remasking="random", presence_penalty=0.3)
    alone = answer(finish(core_of(backend, family), (PROMPT, wanted))[0])
    crowd = [(prompt, params(seed=i, max_tokens=5 + i, remasking="sequential"))
             for i, prompt in enumerate(CROWD)]  # fmt: skip
    engines: list[dict[str, Any]] = [{"step_tokens": 70}, {"kv_blocks": 12, "context": 96}]
    for options in engines:
        core = core_of(backend, family, **options)
        done = finish(core, *crowd, (PROMPT, wanted), preempt="kv_blocks" in options)
        assert answer(done[len(crowd)]) == alone, options


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_self_speculation_gives_the_tokens_of_plain_decoding(backend: str) -> None:
    """Over samplers and seeds, beside a request that fills blocks; drafts are never left out."""
    kinds = [
        {"temperature": 0.0}, {"temperature": 1.0, "seed": 3}, {"top_p": 0.8, "seed": 5, "n": 2},
        {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.2}, {"regex": "[abc]{9,19}"},
    ]  # fmt: skip
    requests = [(CROWD[i % 3], params(**kind)) for i, kind in enumerate(kinds)]
    requests.append((PROMPT, params(block_length=6)))
    answers, accepted = [], 0
    for mode in ("off", "self"):
        core = core_of(backend, "nemotron_labs_diffusion", speculate=mode)
        core.drafting.adaptive = False
        done = finish(core, *requests)
        answers.append([[(c.token_ids, c.logprobs) for c in one.choices] for one in done])
        accepted = sum(one.usage.accepted_tokens for one in done)
        assert not done[-1].usage.drafted_tokens
    assert answers[0] == answers[1]
    assert accepted


def test_prefix_hits_cover_whole_groups_of_blocks(backend: str) -> None:
    """Keys of a block of 32 depend on all its tokens: a prompt that differs in the second half has
    no hit, although its first 16 tokens are equal."""
    core = core_of(backend)
    wanted = params(block_length=32)
    other = [*PROMPT[:20], *PROMPT[:20]]
    alone = answer(finish(core_of(backend), (PROMPT, wanted))[0])
    finish(core, (other, wanted))
    hit = finish(core, (PROMPT, wanted))[0]
    assert hit.usage.cached_tokens == 0
    assert answer(hit) == alone
    assert finish(core, (PROMPT, wanted))[0].usage.cached_tokens == 32
    assert finish(core, (PROMPT, wanted.with_(block_length=4)))[0].usage.cached_tokens == 0


def test_choices_of_one_prompt_are_those_of_separate_requests(backend: str) -> None:
    core = core_of(backend)
    both = finish(core, (PROMPT, params(n=3)))[0]
    assert len({choice.token_ids for choice in both.choices}) == 3
    plain = finish(core_of(backend, prefix_cache=False, step_tokens=20), (PROMPT, params(n=3)))[0]
    assert [c.token_ids for c in plain.choices] == [c.token_ids for c in both.choices]


@pytest.mark.parametrize("remasking", REMASKING)
def test_the_cpu_backend_draws_what_the_pipeline_draws(remasking: str) -> None:
    """The native sampler's confidence, to the bit: its rows again through sampling/pipeline.py."""
    from verbatim.backend.cpu.sampler import NativeSampler

    answers = []
    for pipeline in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if pipeline:
                patch.setattr(NativeSampler, "needs_pipeline", lambda self, params: True)
            core = core_of("cpu")
            wanted = [
                params(remasking=remasking, top_k=20, min_tokens=6, ignore_eos=False),
                params(remasking=remasking, temperature=0, logprobs=2, frequency_penalty=0.5),
                params(remasking=remasking, logprobs_mode="processed", xtc_probability=0.5),
            ]
            done = finish(core, *[(PROMPT, p) for p in wanted])
            answers.append([c.choices for c in done])
    assert answers[0] == answers[1]


def test_the_step_number_is_part_of_the_noise() -> None:
    """A position that is masked again draws anew; without the step, its noise would repeat."""
    import numpy as np

    from verbatim.sampling.draw import gumbel

    ids = np.arange(8)
    assert (gumbel(3, 5, ids) != gumbel(3, 5 | 1 << 32, ids)).all()


# ------------------------------------------------------------------------------------ parameters


def test_the_values_in_force_are_reported() -> None:
    core = core_of("reference")
    found = finish(core, (PROMPT, params()))[0].params
    assert found is not None
    assert [getattr(found, name) for name in DIFFUSION] == [
        *(4, 4, "low_confidence_dynamic"),
        *(0.85, None),
    ]
    assert 259 in found.banned_token_ids  # the mask


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"denoising_steps": 5}, "denoising_steps"),
    ({"denoising_steps": 2, "remasking": "entropy_bounded"}, "denoising_steps"),
    ({"confidence_threshold": 0.5, "remasking": "random"}, "confidence_threshold"),
    ({"entropy_threshold": 0.5}, "entropy_threshold"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"speculate": "ngram"}, "speculate"),
    ({"dry_multiplier": 0.5}, "dry_multiplier"),
    ({"no_repeat_ngram": 3}, "no_repeat_ngram"),
    ({"regex": "a+"}, "regex"),
    ({"regex": "a+", "remasking": "sequential", "denoising_steps": 2}, "regex"),
    ({"num_beams": 2, "temperature": 1.0, "seed": None}, "num_beams"),
]


@pytest.mark.parametrize(("changes", "name"), REFUSED)
def test_what_a_diffusion_model_cannot_do_is_refused_by_name(
    changes: dict[str, Any], name: str
) -> None:
    with pytest.raises((ParameterError, UnsupportedError)) as caught:
        core_of("reference").request(PROMPT, params(**changes))
    assert caught.value.param == name


def test_a_block_that_no_step_holds_is_refused() -> None:
    core = core_of("reference", step_tokens=24)
    with pytest.raises(CapacityError, match="step_tokens"):
        core.add(core.request(PROMPT, params(block_length=32)))


def test_an_engine_setting_that_drafts_is_refused() -> None:
    with pytest.raises(ParameterError, match="diffusion"):
        core_of("reference", speculate="ngram")


@pytest.mark.parametrize("name", DIFFUSION)
def test_other_models_refuse_the_parameters_of_diffusion(name: str) -> None:
    config = EngineConfig()
    core = EngineCore(tiny_parts("fake", config), config)
    value: Any = "random" if name == "remasking" else 1
    with pytest.raises(UnsupportedError) as caught:
        core.request(PROMPT, SamplingParams(max_tokens=2, **{name: value}))
    assert caught.value.param == name


# ------------------------------------------------------------------------------- the completion


def test_max_tokens_only_cuts_the_answer(backend: str) -> None:
    core = core_of(backend)
    whole = finish(core, (PROMPT, params()))[0].choices[0]
    for limit in (1, 5, 12):
        cut = finish(core, (PROMPT, params(max_tokens=limit)))[0].choices[0]
        assert cut.token_ids == whole.token_ids[:limit]
        assert cut.finish.reason == "length"


def test_stop_tokens_and_stop_strings_end_the_answer_inside_a_block() -> None:
    core = core_of("reference")
    whole = finish(core, (PROMPT, params()))[0].choices[0].token_ids
    at = next(i for i in range(9, 19) if i % 4 != 1 and whole[i] not in whole[:i])
    done = finish(core, (PROMPT, params(stop_token_ids=[whole[at]])))[0].choices[0]
    assert done.token_ids == whole[: at + 1]
    assert (done.finish.reason, done.finish.detail) == ("stop", str(whole[at]))
    early = finish(core, (PROMPT, params(stop_token_ids=[whole[at]], min_tokens=19)))[0].choices[0]
    assert whole[at] not in early.token_ids[:18]


def test_a_stream_is_the_answer_in_pieces() -> None:
    llm = LLM.from_loaded(tiny_parts("reference", EngineConfig(), "sdar"))
    whole = llm.generate(PROMPT, params())
    deltas = list(llm.stream(PROMPT, params()))
    pieces = [d for d in deltas if not isinstance(d, Completion)]
    assert tuple(t for d in pieces for t in d.token_ids) == whole.token_ids
    assert "".join(d.text for d in pieces) == whole.text
    assert len(pieces) > 2
    llm.close()


def test_a_grammar_works_in_sequential_order() -> None:
    core = core_of("reference")
    wanted = params(regex="[ab]{9}", remasking="sequential", ignore_eos=False)
    choice = finish(core, (PROMPT, wanted))[0].choices[0]
    assert set(choice.text) <= {"a", "b"}
    assert len(choice.text) == 9
    crowd = finish(core_of("reference", step_tokens=40), *[(PROMPT, wanted)] * 3)
    assert {c.choices[0].token_ids for c in crowd} == {choice.token_ids}


def test_an_explanation_says_step_and_confidence_and_draws_again() -> None:
    core = core_of("reference")
    wanted = params(explain=3, receipt=True, denoising_steps=2)
    done = finish(core, (PROMPT, wanted))[0]
    records = done.choices[0].explain
    assert {r["denoising_step"] for r in records} == {0, 1}
    assert all(r["confidence"] <= 0 for r in records)
    assert done.params is not None
    again = what_if(records, done.params, {})
    assert not any(step.changed for step in again)
    assert any(step.changed for step in what_if(records, done.params, {"seed": 4}))


def test_a_receipt_replays() -> None:
    from verbatim.explain.receipt import compare, read_receipt

    core = core_of("reference")
    done = finish(core, (PROMPT, params(receipt=True, remasking="random")))[0]
    receipt = read_receipt(done.receipt)
    assert receipt["params"]["remasking"] == "random"
    replayed = SamplingParams.from_mapping(
        {k: v for k, v in receipt["params"].items() if k != "logit_bias"}
    )
    again = finish(core_of("reference", step_tokens=16), (receipt["prompt_ids"], replayed))[0]
    assert compare(receipt, again.choices, {}).identical
