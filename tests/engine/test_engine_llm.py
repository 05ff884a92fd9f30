"""LLM: the user's calls and their results, on the fake model with the real sampler, so that
every output is computable."""

from __future__ import annotations

import gc
import itertools
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_rig import cpu_available, tiny_parts

from eventually import eventually
from filter_values import WEAK
from verbatim import LLM, SamplingParams
from verbatim.backend.gpu_weights import activation_bytes
from verbatim.base.config import EngineConfig
from verbatim.base.errors import (
    CapacityError,
    ContextError,
    ParameterError,
    UnavailableError,
    UnsupportedError,
    VerbatimError,
)
from verbatim.base.records import Completion, Finish
from verbatim.engine.embed_input import HiddenPool
from verbatim.engine.loading.engine_setup import with_step_tokens
from verbatim.engine.stream import ChoiceStream
from verbatim.explain.receipt import compare, read_receipt
from verbatim.model.embedding import EmbeddingSpec
from verbatim.model.spec import LayerSpec, ModelSpec
from verbatim.sampling.draw import noise_key
from verbatim.schedule.no_token import NOTHING_LEFT
from verbatim.testing.fakes import (
    ByteTokenizer,
    ChatByteTokenizer,
    FakeBackend,
    fake_parts,
    fake_spec,
    server_parts,
)

EOS = ByteTokenizer.EOS


def fake_llm(**options: Any) -> LLM:
    return LLM.from_loaded(fake_parts(canary=True), **{"kv_blocks": 128, "check": True, **options})


@pytest.fixture
def llm() -> LLM:
    return fake_llm()


def letters(llm: LLM, **changes: Any) -> SamplingParams:
    """Only lower-case letters: readable output."""
    return SamplingParams(
        **{"max_tokens": 60, "allowed_token_ids": list(range(97, 123)), "seed": 5, **changes}
    )


# --------------------------------------------------------------------------------------- shapes


def test_one_prompt_gives_one_and_a_list_gives_a_list(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, seed=1)
    one = llm.generate("hello", params)
    assert isinstance(one, Completion)
    assert one.prompt_ids == (256, *b"hello")
    ids = llm.generate([256, *b"hello"], params)
    assert ids.token_ids == one.token_ids
    many = llm.generate(["hello", "other", "hello"], params)
    assert [c.token_ids for c in many][::2] == [one.token_ids] * 2
    assert llm.generate([[256, *b"hello"], [1, 2]], params)[0].token_ids == one.token_ids
    assert llm.generate([], params) == []


@pytest.mark.parametrize(
    "options",
    [{"seed": 3}, {"seed": 3, "n": 2}, {"seed": 3, "n": 1, "best_of": 3}, {"num_beams": 2}],
)
def test_a_request_without_deltas_has_the_same_completion(
    llm: LLM, options: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=6, speculate="off", **options)
    found = []
    for deltas in (True, False):
        llm.core.add(llm.core.request("Hello", params, request_id="r"), deltas=deltas)
        outputs = []
        while llm.core.busy:
            outputs += llm.core.step()
        *sent, completion = outputs
        assert isinstance(completion, Completion)
        assert bool(sent) == (deltas and "best_of" not in options)
        found.append([(c.text, c.token_ids, c.score) for c in completion.choices])
    assert found[0] == found[1]


def test_deltas_are_made_for_streams_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """For 256 sequences they take a fifth of the host's time per step."""
    made: list[Any] = []
    take = ChoiceStream.take
    monkeypatch.setattr(ChoiceStream, "take", lambda stream: made.append(1) or take(stream))
    done = llm.generate("a", SamplingParams(max_tokens=5))
    assert (len(done.token_ids), made) == (5, [])
    assert "".join(delta.text for delta in llm.stream("a", SamplingParams(max_tokens=5)))
    assert made


def test_one_params_for_all_or_one_per_prompt(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=n, seed=1, ignore_eos=True) for n in (1, 2, 3)]
    assert [len(c.token_ids) for c in llm.generate(["a", "b", "c"], each)] == [1, 2, 3]
    with pytest.raises(ParameterError, match="2 for 3 prompts"):
        llm.generate(["a", "b", "c"], each[:2])
    with pytest.raises(ParameterError, match="params"):
        llm.generate("a", {"max_tokens": 3})  # type: ignore[call-overload]


def test_every_field_of_a_completion(llm: LLM) -> None:
    done = llm.generate(
        "hello",
        SamplingParams(max_tokens=6, seed=9, logprobs=3, ignore_eos=True, prompt_logprobs=1),
    )
    assert done.seed == 9
    assert done.fingerprint == llm.fingerprint
    assert done.usage.prompt_tokens == 6
    assert done.usage.output_tokens == len(done.token_ids) == len(done.logprobs) == 6
    assert done.usage.total_tokens == 12
    assert done.finish.reason == "length"
    assert done.finish.detail == "max_tokens"
    assert [entry.token for entry in done.logprobs] == list(done.token_ids)
    assert all(len(entry.top) == 3 for entry in done.logprobs)
    assert done.prompt_logprobs[0] is None
    assert [entry.token for entry in done.prompt_logprobs[1:] if entry] == list(b"hello")
    assert 0 <= done.timings.queued <= done.timings.first_token <= done.timings.total


def test_an_unseeded_request_reports_its_random_seed(llm: LLM) -> None:
    first, second = llm.generate(["x", "x"], SamplingParams(max_tokens=12))
    assert first.seed != second.seed
    again = llm.generate("x", SamplingParams(max_tokens=12, seed=first.seed))
    assert again.token_ids == first.token_ids


def test_facts(llm: LLM) -> None:
    # what the cache holds, and the last token needs no place in it
    assert llm.context == 128 * 16 + 1
    assert llm.cache_plan()["blocks"] == (128,)
    assert "2048 tokens" in llm.cache_plan()["text"]
    assert not llm.has_template
    assert fake_llm().fingerprint == llm.fingerprint
    with pytest.raises(TypeError):
        fake_llm(no_such_option=1)
    with pytest.raises(ParameterError, match="4096"):
        fake_llm(context=5000)


def test_a_cache_below_the_context_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="verbatim.engine"):
        fake_llm(kv_blocks=4, context=64).close()
        assert not caplog.messages
        fake_llm(kv_blocks=4, context=66).close()
    [line] = caplog.messages
    assert "holds 65 tokens of one sequence, and the context is 66" in line


# -------------------------------------------------------------------------------------- endings


def test_eos_ends_and_stays_out_of_the_text() -> None:
    llm = fake_llm()
    done = llm.generate("hello", SamplingParams(max_tokens=500, seed=2, logit_bias={EOS: 4}))
    assert done.finish.reason == "stop"
    assert done.finish.detail == "eos"
    assert done.token_ids[-1] == EOS
    assert EOS not in done.token_ids[:-1]
    assert "</s>" not in done.text
    shown = llm.generate(
        "hello",
        SamplingParams(
            max_tokens=500, seed=2, logit_bias={EOS: 4}, skip_special=False, include_stop=True
        ),
    )
    assert shown.text == done.text + "</s>"
    on = llm.generate(
        "hello", SamplingParams(max_tokens=100, seed=2, logit_bias={EOS: 4}, ignore_eos=True)
    )
    assert len(on.token_ids) == 100
    assert on.token_ids[: len(done.token_ids)] == done.token_ids


def test_min_tokens_delays_the_end() -> None:
    done = fake_llm().generate(
        "hello", SamplingParams(max_tokens=50, min_tokens=20, seed=2, logit_bias={EOS: 50})
    )
    assert len(done.token_ids) == 21
    assert done.finish.detail == "eos"


def test_stop_token_ids(llm: LLM) -> None:
    plain = llm.generate("hello", letters(llm))
    stop = plain.token_ids[10]
    done = llm.generate("hello", letters(llm, stop_token_ids=[stop]))
    cut = plain.token_ids.index(stop)
    assert done.token_ids == plain.token_ids[: cut + 1]
    assert done.finish == type(done.finish)("stop", str(stop))
    assert done.text == plain.text[:cut]
    assert (
        llm.generate("hello", letters(llm, stop_token_ids=[stop], include_stop=True)).text
        == plain.text[: cut + 1]
    )


def test_stop_strings_across_tokens(llm: LLM) -> None:
    plain = llm.generate("hello", letters(llm))
    for at, size in ((5, 1), (10, 2), (17, 5)):
        stop = plain.text[at : at + size]
        cut = plain.text.index(stop)
        done = llm.generate("hello", letters(llm, stop=[stop, "not there"]))
        assert done.text == plain.text[:cut]
        assert done.finish == type(done.finish)("stop", stop)
        assert done.token_ids == plain.token_ids[: cut + size]  # tokens stay: they were drawn
        assert done.usage.output_tokens == cut + size
        kept = llm.generate("hello", letters(llm, stop=stop, include_stop=True))
        assert kept.text == plain.text[: cut + size]


def test_a_stop_string_before_min_tokens_is_text(llm: LLM) -> None:
    plain = llm.generate("hello", letters(llm))
    stop = plain.text[3:5]
    done = llm.generate("hello", letters(llm, stop=stop, min_tokens=10))
    assert done.text.startswith(plain.text[:10])


def test_max_tokens_zero_and_one(llm: LLM) -> None:
    none = llm.generate("hello", SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert (none.text, none.token_ids, none.finish.detail) == ("", (), "max_tokens")
    assert none.usage.output_tokens == 0
    assert len(none.prompt_logprobs) == 6
    assert len(llm.generate("hello", SamplingParams(max_tokens=1)).token_ids) == 1


def test_missing_max_tokens_means_up_to_the_context() -> None:
    llm = fake_llm(context=50)
    done = llm.generate("hello", SamplingParams(seed=1, ignore_eos=True))
    assert done.finish.reason == "length"
    assert done.finish.detail == "context"
    assert len(done.prompt_ids) + len(done.token_ids) == 50


def test_a_loop_is_reported_and_stops_only_when_asked(llm: LLM) -> None:
    looping = letters(llm, allowed_token_ids=[97], max_tokens=200)
    told = llm.generate("hello", looping)
    assert (told.finish.reason, told.choices[0].loop, len(told.token_ids)) == ("length", 1, 200)
    stopped = llm.generate("hello", looping.with_(on_loop="stop"))
    assert (stopped.finish.reason, len(stopped.token_ids)) == ("loop", 64)
    least = llm.generate("hello", looping.with_(on_loop="stop", min_tokens=100))
    assert (least.finish.reason, len(least.token_ids)) == ("loop", 112), (
        "min_tokens is kept; it is looked at every 16 tokens"
    )
    assert llm.generate("hello", letters(llm, max_tokens=200)).choices[0].loop == 0


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("param", "params"),
    [
        ("logit_bias", {"logit_bias": {260: 1.0}}),
        ("stop_token_ids", {"stop_token_ids": [260]}),
        ("allowed_token_ids", {"allowed_token_ids": [5, 260]}),
        ("banned_token_ids", {"banned_token_ids": [100_000]}),
        ("speculate", {"speculate": "guess"}),
        ("speculate", {"speculate": "draft"}),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_by_name(
    llm: LLM, param: str, params: dict[str, Any]
) -> None:
    with pytest.raises((ParameterError, UnsupportedError)) as caught:
        llm.generate("hello", SamplingParams(**params))
    assert caught.value.param == param
    assert caught.value.status == 400


@pytest.mark.parametrize("prompt", [[], [260], [-1], [True], [1.5], ["x", 1], [None]])
def test_bad_prompts(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        llm.generate(prompt or [prompt])
    assert caught.value.param in ("prompt", "prompts")
    llm.check()


def test_a_prompt_longer_than_the_context_is_rejected_not_truncated() -> None:
    llm = fake_llm(context=32)
    with pytest.raises(ContextError) as caught:
        llm.generate([1] * 32)
    for number in ("32 tokens", "context holds 32"):
        assert number in str(caught.value)
    with pytest.raises(ContextError) as caught:
        llm.generate([1] * 30, SamplingParams(max_tokens=3))
    assert caught.value.param == "max_tokens"
    assert len(llm.generate([1] * 30, SamplingParams(max_tokens=2, ignore_eos=True)).token_ids) == 2
    assert llm.generate([1] * 32, SamplingParams(max_tokens=0)).usage.prompt_tokens == 32


def test_a_request_that_can_never_fit_the_cache_is_rejected_before_any_runs() -> None:
    llm = fake_llm(context=1000, kv_blocks=4)
    with pytest.raises(CapacityError, match="4"):
        llm.generate([[1, 2], [1] * 60], SamplingParams(max_tokens=6))
    assert llm.stats()["requests_total"] == 0
    assert len(llm.generate([1] * 60, SamplingParams(max_tokens=5, ignore_eos=True)).token_ids) == 5


@pytest.mark.parametrize(
    ("param", "params"),
    [
        ("prompt_logprobs", {"prompt_logprobs": 1024, "max_tokens": 1}),
        ("logprobs", {"logprobs": 1024, "max_tokens": 2000}),
        ("logprobs", {"logprobs": 20, "n": 1024, "max_tokens": 200}),
        ("explain", {"explain": 1000, "max_tokens": 1000}),
    ],
)
def test_reports_are_bounded(param: str, params: dict[str, Any]) -> None:
    llm = fake_llm(kv_blocks=256)
    with pytest.raises(ParameterError, match="too many to report") as caught:
        llm.generate([1] * 2000, SamplingParams(**params))
    assert caught.value.param == param


def test_a_thousand_choices() -> None:
    llm = fake_llm(kv_blocks=64, max_running=32, check=False)
    done = llm.generate("x", SamplingParams(n=1024, max_tokens=2, seed=1, ignore_eos=True, top_k=3))
    assert len(done.choices) == 1024
    assert done.usage.output_tokens == 2048
    llm.check()


def test_one_invalid_prompt_rejects_the_list_before_any_runs(llm: LLM) -> None:
    with pytest.raises(ParameterError):
        llm.generate([[1, 2], [999]], SamplingParams(max_tokens=6))
    assert llm.stats()["requests_total"] == 0


def test_nothing_left_to_draw_ends_that_request_alone(llm: LLM) -> None:
    stuck = SamplingParams(max_tokens=9, allowed_token_ids=[EOS], min_tokens=3, seed=1)
    bad, good = llm.generate(
        ["a", "b"], [stuck, SamplingParams(max_tokens=9, seed=1, ignore_eos=True)]
    )
    assert bad.finish.reason == "error"
    assert "no token is left" in bad.finish.detail
    assert len(good.token_ids) == 9


def test_chat_without_a_template_is_refused(llm: LLM) -> None:
    with pytest.raises(UnsupportedError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_closed() -> None:
    with fake_llm() as llm:
        backend = llm.loaded.backend
    assert backend.closed
    llm.close()
    for ask in (llm.generate, llm.embed, llm.stream):
        with pytest.raises(UnavailableError):
            ask("x")
    assert not llm._wanted


def test_a_stream_of_a_closed_llm_says_so() -> None:
    llm = fake_llm()
    with llm.stream("hello", letters(llm)) as stream:
        next(stream)
        llm.close()
        with pytest.raises(UnavailableError, match="closed"):
            list(stream)
        stream.cancel()
        with pytest.raises(UnavailableError, match="closed"):
            next(stream)
    assert stream.completion is None


@pytest.mark.parametrize("what", ["generate", "embed", "stream"])
def test_close_while_another_thread_waits_for_its_completion(what: str) -> None:
    backend = Meanwhile()
    llm = LLM.from_loaded(fake_parts(backend), kv_blocks=128, step_tokens=4)
    closing = threading.Thread(target=llm.close)

    def close_from_elsewhere() -> None:
        closing.start()
        # close() waits for this step, and no other follows
        eventually(lambda: llm.closed, "the model is not closed")

    backend.deed = close_from_elsewhere
    with pytest.raises(UnavailableError, match="closed"):
        {
            "generate": llm.generate,
            "embed": llm.embed,
            "stream": lambda text: list(llm.stream(text)),
        }[what]("a long prompt")
    closing.join()
    assert backend.closed
    assert not llm._wanted


@pytest.mark.parametrize("what", ["generate", "embed", "score"])
def test_an_interrupted_call_leaves_nothing_behind(what: str) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    backend = Meanwhile(canary=True)
    llm = LLM.from_loaded(fake_parts(backend), kv_blocks=128, check=True, step_tokens=4)
    backend.deed = interrupt
    with pytest.raises(KeyboardInterrupt):
        getattr(llm, what)("a long prompt")
    assert not llm.core.requests
    assert not llm._wanted
    params = SamplingParams(max_tokens=3, seed=1)
    assert llm.generate("x", params).choices == fake_llm().generate("x", params).choices
    llm.check()


# ------------------------------------------------------------------------------ several choices


def test_n_choices_are_distinct_and_the_first_equals_that_of_n_1(llm: LLM) -> None:
    one = llm.generate("hello", SamplingParams(max_tokens=12, seed=4))
    four = llm.generate("hello", SamplingParams(max_tokens=12, seed=4, n=4))
    assert four.choices[0].token_ids == one.token_ids
    assert len({c.token_ids for c in four.choices}) == 4
    assert [c.index for c in four.choices] == [0, 1, 2, 3]
    assert four.usage.output_tokens == sum(len(c.token_ids) for c in four.choices)
    for i, choice in enumerate(four.choices):
        alone = fake_llm()
        seq = alone.core
        request = seq.request("hello", SamplingParams(max_tokens=12, seed=4))
        seq.add(request)
        running = seq.requests[request.id]
        running.sequences[0].spec = type(running.sequences[0].spec)(
            request.params, noise_key(4, i), 6
        )
        outs: list[Any] = []
        while seq.busy:
            outs += seq.step()
        assert outs[-1].token_ids == choice.token_ids


def test_best_of_returns_the_most_likely(llm: LLM) -> None:
    all_of_them = llm.generate(
        "hello", SamplingParams(max_tokens=8, seed=4, n=6, logprobs=0, ignore_eos=True)
    )
    best = llm.generate(
        "hello", SamplingParams(max_tokens=8, seed=4, n=2, best_of=6, ignore_eos=True)
    )
    means = {c.token_ids: sum(e.logprob for e in c.logprobs) / 8 for c in all_of_them.choices}
    ranked = sorted(means, key=lambda ids: -means[ids])
    assert [c.token_ids for c in best.choices] == ranked[:2]
    assert best.choices[0].score == pytest.approx(means[ranked[0]])
    assert best.usage.output_tokens == 48


def test_vote_counts_answers(llm: LLM) -> None:
    params = letters(llm, allowed_token_ids=[97, 98], max_tokens=1)
    vote = llm.vote("hello", 15, params=params)
    texts = [c.text for c in vote.completion.choices]
    assert dict(vote.counts) == {t: texts.count(t) for t in set(texts)}
    assert vote.answer == max(vote.counts, key=lambda item: item[1])[0]
    none = llm.vote("hello", 3, extract=lambda text: None, params=params)
    assert (none.answer, none.counts) == ("", ())


@pytest.mark.parametrize("most", ["a", "b"])
def test_the_majority_wins_a_vote_whichever_came_first(llm: LLM, most: str) -> None:
    """The answers are fixed here, so the test knows the majority without counting as vote()
    does."""
    least = "b" if most == "a" else "a"
    answers = iter([least, most, most, least, most, most, least])
    vote = llm.vote(
        "hello", 7, extract=lambda text: next(answers), params=letters(llm, max_tokens=1)
    )
    assert (vote.answer, vote.counts) == (most, ((most, 4), (least, 3)))
    tie = iter([least, most, None, most, least])
    assert (
        llm.vote(
            "hello", 5, extract=lambda text: next(tie), params=letters(llm, max_tokens=1)
        ).answer
        == least
    )


def test_beams_return_scores_and_free_everything(llm: LLM) -> None:
    done = llm.generate(
        "hello", SamplingParams(max_tokens=10, num_beams=4, num_return_sequences=3, logprobs=0)
    )
    scores = [c.score for c in done.choices]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    for choice in done.choices:
        assert choice.score == pytest.approx(
            sum(e.logprob for e in choice.logprobs) / len(choice.token_ids)
        )
    greedy = llm.generate(
        "hello", SamplingParams(max_tokens=10, temperature=0, logprobs=0, ignore_eos=True)
    )
    assert scores[0] >= sum(e.logprob for e in greedy.logprobs) / 10 - 1e-12
    llm.check()


def test_a_beam_with_nothing_left_to_draw_drops_out(llm: LLM) -> None:
    """With three tokens and no pair twice, a beam is stuck after its third return to a token."""
    params = SamplingParams(
        max_tokens=7,
        num_beams=3,
        num_return_sequences=3,
        allowed_token_ids=[97, 98, 99],
        no_repeat_ngram=2,
    )
    for ids in itertools.product((1, 2), repeat=3):
        done = llm.generate([*ids], params)
        assert [c.finish.reason for c in done.choices] == ["length"] * 3
        for choice in done.choices:
            assert len(set(itertools.pairwise(choice.token_ids))) == len(choice.token_ids) - 1 == 6
    longest = llm.generate([1, 2], params.with_(max_tokens=11))  # at most 9 pairs, 10 tokens
    assert {c.finish for c in longest.choices} == {Finish("error", NOTHING_LEFT)}
    llm.check()


@pytest.mark.parametrize(
    "options",
    [
        {"kv_blocks": 4},
        {"max_running": 2},
        {"step_tokens": 3},
        {"use_cache": False},
        {"prefix_cache": False},
    ],
)
def test_beams_are_the_same_when_blocks_are_scarce(options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=14, num_beams=4, num_return_sequences=4, stop="q")
    wide, narrow = fake_llm(), fake_llm(**options)
    first, second = wide.generate("hello world", params), narrow.generate("hello world", params)
    assert [(c.token_ids, c.score, c.text) for c in first.choices] == [
        (c.token_ids, c.score, c.text) for c in second.choices
    ]
    narrow.check()


# ------------------------------------------------------------------------------------ streaming


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n": 3},
        {"n": 2, "best_of": 4},
        {"num_beams": 3, "num_return_sequences": 2, "seed": None},
        # one extension per step: the search finds one beam of three
        {"num_beams": 3, "num_return_sequences": 3, "seed": None, "allowed_token_ids": [97]},
        {"stop": ["ab", "q"]},
        {"temperature": 0},
        {"logprobs": 1},
        {"max_tokens": 0},
        {"allowed_token_ids": list(range(200, 256))},  # broken UTF-8 all the way
    ],
)
def test_streamed_text_equals_the_whole_text(llm: LLM, changes: dict[str, Any]) -> None:
    params = letters(llm, **changes)
    whole = llm.generate("hello", params)
    stream = llm.stream("hello", params)
    deltas = list(stream)
    assert stream.completion is not None
    assert stream.completion.choices == whole.choices
    if params.best_of:
        assert deltas == []
        return
    assert {d.index for d in deltas} == {choice.index for choice in whole.choices}
    for choice in whole.choices:
        mine = [d for d in deltas if d.index == choice.index]
        assert "".join(d.text for d in mine) == choice.text
        assert tuple(t for d in mine for t in d.token_ids) == choice.token_ids
        assert tuple(e for d in mine for e in d.logprobs) == choice.logprobs
        assert [d.finish for d in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish == choice.finish


def test_beams_stream_their_common_prefix(llm: LLM) -> None:
    stream = llm.stream("hello", SamplingParams(max_tokens=30, num_beams=2, logit_bias={97: 30}))
    deltas = list(stream)
    assert len(deltas) > 3
    assert "".join(d.text for d in deltas) == stream.completion.text


def test_streams_take_turns(llm: LLM) -> None:
    params = letters(llm)
    whole = [llm.generate(p, params).text for p in ("one", "two")]
    streams = [llm.stream(p, params) for p in ("one", "two")]
    texts = ["", ""]
    for a, b in zip(*streams, strict=False):
        texts[0] += a.text
        texts[1] += b.text
    for i, stream in enumerate(streams):
        texts[i] += "".join(d.text for d in stream)
    assert texts == whole


def test_a_stream_aborted_elsewhere_still_ends(llm: LLM) -> None:
    stream = llm.stream("hello", letters(llm))
    next(stream)
    llm.core.abort(stream.request_id)
    list(stream)
    assert stream.completion.finish.reason == "cancel"


def test_cancel_takes_effect_before_the_next_step(llm: LLM) -> None:
    stream = llm.stream("hello", letters(llm))
    next(stream)
    stream.cancel()
    assert list(stream) == []
    assert stream.completion.finish.reason == "cancel"
    assert not llm.core.requests


@pytest.mark.parametrize("how", ["close", "with", "drop"])
def test_closing_or_dropping_a_stream_aborts_it(llm: LLM, how: str) -> None:
    stream = llm.stream("hello", letters(llm, n=2))
    next(iter(stream))
    if how == "close":
        stream.close()
        assert stream.completion is not None
        assert stream.completion.finish.reason == "cancel"
    elif how == "with":
        with stream:
            pass
    del stream
    gc.collect()
    # the next call that takes the lock aborts a dropped one
    llm.generate("next", SamplingParams(max_tokens=1))
    assert not llm.core.requests
    llm.check()


class Meanwhile(FakeBackend):
    """Runs a given function once, during a step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.deed: Callable[[], Any] = list

    def execute(self, plan: Any) -> Any:
        deed, self.deed = self.deed, list
        deed()
        return super().execute(plan)


def test_a_stream_collected_during_a_step_breaks_nothing() -> None:
    """The garbage collector may run in the thread that holds the engine's lock."""
    backend = Meanwhile(canary=True)
    llm = LLM.from_loaded(fake_parts(backend), kv_blocks=128, check=True)
    params = letters(llm, ignore_eos=True)
    alone = llm.generate("other", params)
    held = [llm.stream("hello", params)]
    next(held[0])
    backend.deed = held.clear
    assert llm.generate("other", params).choices == alone.choices
    assert not held
    assert not llm.core.requests
    llm.check()


# ------------------------------------------------------------------------------ score and embed


def test_score_equals_the_logprobs_of_generation(llm: LLM) -> None:
    done = llm.generate("hello", SamplingParams(max_tokens=20, seed=3, logprobs=0, ignore_eos=True))
    score = llm.score([*done.prompt_ids, *done.token_ids])
    assert [e.logprob for e in score.logprobs[6:]] == [e.logprob for e in done.logprobs]
    assert score.logprobs[0] is None
    assert score.total == pytest.approx(sum(e.logprob for e in score.logprobs if e))
    assert score.perplexity == pytest.approx(math.exp(-score.total / 25))
    assert math.isnan(llm.score([5]).perplexity)


@pytest.mark.parametrize("options", [{"step_tokens": 5}, {"kv_blocks": 8, "step_tokens": 7}])
def test_scores_do_not_depend_on_chunks(llm: LLM, options: dict[str, Any]) -> None:
    text = "the quick brown fox jumps over the lazy dog"
    assert fake_llm(**options).score(text, top=2) == llm.score(text, top=2)


def test_a_long_text_is_scored_in_windows(llm: LLM) -> None:
    text = "the quick brown fox jumps over the lazy dog and runs away"
    ids = llm.encode(text)
    score = llm.score(text, window=16, stride=10, top=1)
    assert score.token_ids == tuple(ids)
    assert [i for i, entry in enumerate(score.logprobs) if entry is None] == [0]
    for i in range(1, len(ids)):
        # where the first window that has it begins
        start = 0 if i < 16 else 10 * -(-(i - 15) // 10)
        alone = llm.score(ids[start : start + 16], top=1).logprobs[i - start]
        assert score.logprobs[i] == alone
    assert llm.score(text, window=len(ids)) == llm.score(text)
    apart = llm.score(text, window=8, stride=8)
    assert [i for i, entry in enumerate(apart.logprobs) if entry is None] == list(
        range(0, len(ids), 8)
    )
    assert apart.perplexity == pytest.approx(
        math.exp(-apart.total / (len(ids) - len(range(0, len(ids), 8))))
    )


def test_a_text_longer_than_the_context_has_a_perplexity() -> None:
    llm = fake_llm(context=64)
    with pytest.raises(ContextError):
        llm.score([7] * 200)
    assert llm.score([7] * 200, window=64).perplexity > 0


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"window": 1}, "window: 1 is below 2"),
        ({"window": 10**6}, "window: 1000000 is more than the context holds"),
        ({"window": 8, "stride": 9}, "stride: 9 is not between 1 and the window"),
        ({"window": 8, "stride": 0}, "stride: 0 is not between 1"),
        ({"stride": 4}, "stride: belongs to window"),
    ],
)
def test_windows_that_make_no_sense_are_refused_by_name(
    llm: LLM, asked: dict[str, int], wanted: str
) -> None:
    with pytest.raises(ParameterError, match=wanted):
        llm.score("the quick brown fox", **asked)


def test_scores_survive_preemption() -> None:
    llm = fake_llm(kv_blocks=8, step_tokens=9)
    prompts = [f"{i} the quick brown fox jumps over" for i in range(6)]
    params = SamplingParams(max_tokens=40, seed=1, prompt_logprobs=1, ignore_eos=True)
    crowded = llm.generate(prompts, params)
    assert llm.stats()["preemptions_total"] > 0
    for prompt, done in zip(prompts, crowded, strict=True):
        alone = fake_llm().generate(prompt, params)
        assert alone.prompt_logprobs == done.prompt_logprobs
        assert alone.choices == done.choices


@pytest.mark.parametrize(("pooling", "row"), [("cls", 0), ("last", -1)])
def test_embed_follows_the_models_pooling(pooling: str, row: int) -> None:
    from verbatim.testing.fakes import mix

    number, rows = 1, []
    for token in (256, *b"hello"):
        number = mix(number, token)
        rows.append(FakeBackend()._hidden(number))
    for options in ({}, {"step_tokens": 2}):
        stated = replace(fake_parts(), embedding=EmbeddingSpec(pooling))
        for llm in (
            LLM.from_loaded(stated, **options),
            LLM.from_loaded(fake_parts(), pooling=pooling, **options),
        ):
            np.testing.assert_array_equal(llm.embed("hello"), np.array(rows[row], np.float32))


@pytest.mark.parametrize("pooling", ["none", "rank", ""])
def test_a_pooling_that_embed_does_not_have_is_named(pooling: str) -> None:
    llm = LLM.from_loaded(replace(fake_parts(), embedding=EmbeddingSpec(pooling)))
    with pytest.raises(
        UnsupportedError,
        match=f"^pooling: fake .*{pooling or 'not state'}.*--pooling mean.*all-minilm",
    ):
        llm.embed("hello")
    assert llm.generate("hello", SamplingParams(max_tokens=2)).token_ids


def test_embed_takes_a_list_a_prompt_name_dimensions_and_truncation() -> None:
    spec = EmbeddingSpec("mean", normalise=True, prompts={"q": "query: ", "d": ""})
    llm = LLM.from_loaded(replace(fake_parts(), embedding=spec), context=32)
    both = llm.embed(["hello", "world"])
    assert both.shape == (2, 8)
    np.testing.assert_array_equal(both[1], llm.embed("world"))
    np.testing.assert_allclose(np.linalg.norm(both, axis=1), 1, rtol=1e-6)
    np.testing.assert_array_equal(llm.embed("hi", prompt_name="q"), llm.embed("query: hi"))
    np.testing.assert_array_equal(llm.embed("hi", prompt_name="d"), llm.embed("hi"))
    default = replace(fake_parts(), embedding=replace(spec, default_prompt="q"))
    np.testing.assert_array_equal(LLM.from_loaded(default).embed("hi"), llm.embed("query: hi"))
    short = llm.embed("hello", dimensions=3)
    np.testing.assert_allclose(short, both[0][:3] / np.linalg.norm(both[0][:3]), rtol=1e-6)
    np.testing.assert_array_equal(llm.embed("a" * 40, truncate=True), llm.embed("a" * 31))
    np.testing.assert_array_equal(llm.embed([97] * 40, truncate=True), llm.embed([97] * 32))
    for wrong, error in (
        ({"prompt_name": "x"}, "prompt_name.*known: q, d"),
        ({"dimensions": 9}, "dimensions: 9 is not from 1 to 8"),
        ({"dimensions": 0}, "dimensions"),
    ):
        with pytest.raises(ParameterError, match=error):
            llm.embed("hello", **wrong)
    with pytest.raises(ContextError, match="41 tokens and the context holds 32"):
        llm.embed("a" * 40)
    with pytest.raises(ParameterError, match="is empty"):
        llm.embed("")
    with pytest.raises(ParameterError, match="list is empty"):
        llm.embed([])
    with pytest.raises(ParameterError, match="token ids get no prompt"):
        llm.embed([1, 2], prompt_name="q")
    with pytest.raises(UnsupportedError, match="no cross-encoder"):
        llm.rerank("hello", ["world"])


def test_embed_is_the_mean_of_all_positions(llm: LLM) -> None:
    backend = FakeBackend()
    from verbatim.testing.fakes import mix

    number, rows = 1, []
    for token in (256, *b"hello"):
        number = mix(number, token)
        rows.append(backend._hidden(number))
    expected = np.array(rows, np.float32).mean(axis=0)
    for options in ({}, {"step_tokens": 2}):
        got = fake_llm(**options).embed("hello")
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        np.testing.assert_array_equal(got, llm.embed("hello"))


# ------------------------------------------------------------------------------ the same tokens

FIELDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"n": 3},
    {"frequency_penalty": 1.0, "repetition_penalty": 1.2},
    {"dry_multiplier": 1.0, "no_repeat_ngram": 3},
    WEAK,
    {"stop": ["ab"], "min_tokens": 5},
    {
        "logit_bias": {97: 3.0},
        "banned_token_ids": [98],
        "logprobs": 2,
        "logprobs_mode": "processed",
    },
]
MODES: list[dict[str, Any]] = [
    {"step_tokens": 4},
    {"use_cache": False},
    {"prefix_cache": False},
    {"kv_blocks": 9},
    {"speculate": "off"},
    {"speculate": "ngram"},
    {"max_running": 1},
]


def test_a_deep_prompt_is_prefilled_in_smaller_chunks_beside_a_stream() -> None:
    """The engine tells the scheduler what attention depth costs in this model; the output equals
    that of the prompt alone."""
    prompt, greedy = [7] * 300, SamplingParams(max_tokens=4, temperature=0)
    options: Any = {"step_tokens": 64, "prefix_cache": False}
    # without drafts, which depend on measured times and would count as chunks
    with LLM.from_loaded(fake_parts(), speculate="off", **options) as llm:
        alone = llm.generate(prompt, greedy).token_ids
        chunks: list[int] = []
        execute = llm.core.backend.execute

        def record(plan: Any) -> Any:
            chunks.extend(len(s.tokens) for s in plan.sequences if len(s.tokens) > 1)
            return execute(plan)

        llm.core.backend.execute = record  # type: ignore[method-assign]
        with llm.stream("abc", SamplingParams(max_tokens=900, ignore_eos=True)) as stream:
            next(stream)
            assert llm.generate(prompt, greedy).token_ids == alone
        assert chunks[1] == 63
        # so narrow a model: at a depth of 280 attention is 30 times the matrices
        assert max(chunks[-9:]) == 2


def test_every_mode_gives_the_same_outputs() -> None:
    prompts = ["hello hello hello", "the quick brown fox " * 2]
    params = [
        SamplingParams(**{"max_tokens": 30, "seed": 8, **FIELDS[i % len(FIELDS)]})
        for i in range(len(FIELDS))
    ]
    asked = [(p, q) for p in prompts for q in params]
    plain = fake_llm(kv_blocks=400).generate([p for p, _ in asked], [q for _, q in asked])
    for mode in MODES:
        llm = fake_llm(**{"kv_blocks": 400, **mode, "check": False})
        got = llm.generate([p for p, _ in asked], [q for _, q in asked])
        assert [c.choices for c in got] == [c.choices for c in plain], mode
        llm.check()
        if mode.get("kv_blocks"):
            assert llm.stats()["preemptions_total"] > 0


OTHERS = ("mistral", "gpt2", "mixtral")


@pytest.mark.parametrize(
    ("backend", "family"),
    [
        ("reference", "gemma3"),
        *[pytest.param("reference", f, marks=pytest.mark.soak) for f in OTHERS],
        *[("cpu", f) for f in ("gemma3", *OTHERS)],
    ],
)
def test_sliding_windows_and_other_families_with_few_blocks(backend: str, family: str) -> None:
    """Sliding windows of 12 with blocks of 16, alternating with full layers."""
    if backend == "cpu" and not cpu_available(family):
        pytest.skip("the native kernels are not built, or do not know this family")
    prompts = [[(i * 7 + j) % 250 for j in range(20 + i)] for i in range(4)]
    params = SamplingParams(max_tokens=20, seed=2, ignore_eos=True, logprobs=0)
    answers = []
    for options in (
        {"kv_blocks": 100},
        {"kv_blocks": 8, "step_tokens": 9},
        {"kv_blocks": 50, "use_cache": False, "step_tokens": 30},
    ):
        config = EngineConfig(check=True)
        layers = {"num_hidden_layers": 6} if family == "gemma3" else {}
        llm = LLM.from_loaded(tiny_parts(backend, config, family, **layers), check=True, **options)
        answers.append([c.choices for c in llm.generate(prompts, params)])
        llm.check()
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]


def test_a_prefix_hit_is_reported_and_changes_no_token() -> None:
    llm = fake_llm(kv_blocks=200)
    first = [1 + i % 250 for i in range(1000)]
    second = first[:900] + [3] * 100
    params = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    llm.generate(first, params)
    before = llm.stats()["computed_tokens_total"]
    hot = llm.generate(second, params)
    assert hot.usage.cached_tokens == 896
    assert llm.stats()["computed_tokens_total"] - before - 7 <= 116
    assert (
        fake_llm(kv_blocks=200, prefix_cache=False).generate(second, params).choices == hot.choices
    )
    salted = llm.generate(second, params.with_(cache_salt="other"))
    assert salted.usage.cached_tokens == 0
    assert salted.choices == hot.choices


def test_an_error_while_computing_leaves_the_engine_usable() -> None:
    llm = fake_llm()
    backend, honest = llm.loaded.backend, llm.loaded.backend.execute
    backend.execute = lambda plan: (_ for _ in ()).throw(VerbatimError("the machine is on fire"))
    with pytest.raises(VerbatimError, match="fire"):
        llm.generate("hello", SamplingParams(max_tokens=3))
    backend.execute = honest
    assert len(llm.generate("hello", SamplingParams(max_tokens=3, ignore_eos=True)).token_ids) == 3
    llm.check()


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_a_failed_step_is_recomputed(failing: int) -> None:
    """The failed step was to copy a shared block: later steps must not read the block that was
    never copied."""
    llm = fake_llm()
    params = letters(llm, n=3, max_tokens=20)
    whole = llm.generate("hello", params)
    backend, honest, calls = llm.loaded.backend, llm.loaded.backend.execute, 0

    def sometimes(plan: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise VerbatimError("once")
        return honest(plan)

    backend.execute = sometimes
    stream = llm.stream("hello", params)
    with pytest.raises(VerbatimError, match="once"):
        list(stream)
    list(stream)
    assert stream.completion.choices == whole.choices
    llm.check()


def test_receipts_are_made_when_asked(llm: LLM) -> None:
    assert llm.generate("x", SamplingParams(max_tokens=2)).receipt is None
    receipt = llm.generate("x", SamplingParams(max_tokens=2, receipt=True)).receipt
    assert receipt is not None
    assert receipt["fingerprint"] == llm.fingerprint


def test_the_receipt_of_a_cancelled_answer_replays(llm: LLM) -> None:
    stream = llm.stream("x", SamplingParams(max_tokens=20, seed=3, ignore_eos=True, receipt=True))
    next(stream)
    stream.cancel()
    list(stream)
    receipt = read_receipt(stream.completion.receipt)
    assert receipt["choices"][0]["finish"][0] == "cancel"
    whole = llm.generate(receipt["prompt_ids"], SamplingParams.from_mapping(receipt["params"]))
    assert len(whole.token_ids) > len(receipt["choices"][0]["token_ids"]) > 0
    verdict = compare(receipt, whole.choices, {})
    assert verdict.identical
    assert str(verdict) == "identical up to where the answer was cancelled"
    other = llm.generate("other", SamplingParams(max_tokens=20, seed=4, ignore_eos=True))
    assert not compare(receipt, other.choices, {}).identical
    short = replace(whole.choices[0], token_ids=())
    assert compare(receipt, [short], {}).got is None


def test_a_long_context_needs_no_large_cache_with_sliding_windows() -> None:
    loaded = fake_parts(FakeBackend(fake_spec(windows=(32,)), canary=True))
    llm = LLM.from_loaded(loaded, kv_blocks=12, check=True, step_tokens=64)
    assert llm.context == 4096
    done = llm.generate([1] * 1000, SamplingParams(max_tokens=200, seed=1, ignore_eos=True))
    assert len(done.token_ids) == 200


def test_every_choice_reports_its_finish_once() -> None:
    with (
        LLM.from_loaded(fake_parts(), kv_blocks=64) as llm,
        llm.stream("a", SamplingParams(max_tokens=3, n=3, seed=1)) as stream,
    ):
        ends = [delta.index for delta in stream if delta.finish is not None]
    assert sorted(ends) == [0, 1, 2]


def test_threads_share_an_llm_and_take_turns() -> None:
    from concurrent.futures import ThreadPoolExecutor

    params = SamplingParams(max_tokens=12, seed=5)
    with LLM.from_loaded(fake_parts(), kv_blocks=64) as llm:
        alone = [llm.generate(f"prompt {i}", params).token_ids for i in range(6)]
        with ThreadPoolExecutor(6) as pool:
            together = list(
                pool.map(lambda i: llm.generate(f"prompt {i}", params).token_ids, range(6))
            )
        llm.check()
    assert together == alone


def test_threads_wait_for_a_place_in_a_short_queue() -> None:
    """More threads than queue places, of all kinds: no request is rejected, and no stream loses
    a Delta."""
    from concurrent.futures import ThreadPoolExecutor

    params = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    with LLM.from_loaded(fake_parts(), kv_blocks=64, max_waiting=3, max_running=2) as llm:

        def ask(i: int) -> tuple[int, ...]:
            if i % 3 == 1:
                with llm.stream(f"prompt {i}", params) as stream:
                    read = [token for delta in stream for token in delta.token_ids]
                assert stream.completion is not None
                assert tuple(read) == stream.completion.token_ids
                return stream.completion.token_ids
            if i % 3 == 2:
                llm.embed(f"prompt {i}")
            return llm.generate(f"prompt {i}", params).token_ids

        alone = [ask(i) for i in range(24)]
        with ThreadPoolExecutor(24) as pool:
            together = list(pool.map(ask, range(24)))
        llm.check()
    assert together == alone


class DropsX(ChatByteTokenizer):
    """A vocabulary without a token for "x"."""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return super().encode(text.replace("x", ""), special=special)

    def lost(self, text: str) -> str:
        return "x" if "x" in text else ""


def test_a_character_that_the_vocabulary_cannot_encode_causes_a_warning() -> None:
    from dataclasses import replace

    params = SamplingParams(max_tokens=2, seed=5)
    loaded = replace(server_parts("pipeline"), tokenizer=DropsX())
    with LLM.from_loaded(loaded, kv_blocks=64) as llm:
        told = (
            "prompt: the model's vocabulary cannot write U+0078, "
            "so the model does not read it as it stands"
        )
        assert told in llm.generate("a fox", params).warnings
        assert (
            told
            in llm.chat(
                [{"role": "user", "content": [{"type": "text", "text": "a fox"}]}], params
            ).warnings
        )
        assert told in llm.score("a fox").warnings
        with llm.chat_stream([{"role": "user", "content": "a fox"}], params) as stream:
            assert list(stream)
        assert stream.completion is not None
        assert told in stream.completion.warnings
        for prompt in ("a cat", [97, 120]):
            assert not llm.generate(prompt, params).warnings


def test_bytes_are_not_a_prompt() -> None:
    with (
        LLM.from_loaded(fake_parts(), kv_blocks=64) as llm,
        pytest.raises(ParameterError, match="bytes"),
    ):
        llm.generate(b"x")  # type: ignore[call-overload]


# ----------------------------------------------------------------------- cut inside a character


@pytest.mark.parametrize(
    "more", [{}, {"n": 2}, {"n": 1, "best_of": 2}, {"stop": "🙃"}, {"min_tokens": 1}]
)
@pytest.mark.parametrize("length", range(1, 7))
def test_an_output_cut_inside_a_character_ends_before_it(
    llm: LLM, length: int, more: dict[str, Any]
) -> None:
    """One token is one byte here, and the only output is é🙂: bytes 2 and 6 end a character, the
    others cut one."""
    wanted = "é🙂".encode()[:length]
    params = SamplingParams(max_tokens=length, choice=("é🙂",), seed=1, **more)
    done = llm.generate("x", params)
    for choice in done.choices:
        assert bytes(choice.token_ids[:length]) == wanted, "the tokens say the truth"
        assert choice.text == wanted.decode("utf-8", "ignore")
    stream = llm.stream("x", params)
    deltas = list(stream)
    assert stream.completion is not None
    assert [c.text for c in stream.completion.choices] == [c.text for c in done.choices]
    if params.best_of is None:
        assert "".join(d.text for d in deltas if d.index == 0) == done.text


def test_a_cancelled_stream_has_no_half_character(llm: LLM) -> None:
    with llm.stream(
        "x", SamplingParams(max_tokens=9, choice=("é🙂",), speculate="off")
    ) as stream:  # a byte at a time
        texts = [next(stream).text for _ in range(4)]
    assert texts == ["", "é", "", ""]
    assert stream.completion is not None
    assert stream.completion.finish_reason == "cancel"
    assert stream.completion.text == "é"
    assert len(stream.completion.token_ids) == 4


def test_beams_cut_inside_a_character_end_before_it(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=3, num_beams=2, num_return_sequences=2, allowed_token_ids=[0xE2, 0xE3]
    )
    for choice in llm.generate("x", params).choices:
        assert len(choice.token_ids) == 3
        assert choice.text == "\ufffd" * 2


def test_invalid_bytes_of_the_model_become_replacement_characters(llm: LLM) -> None:
    """0xE2 starts a character of three bytes. Of four in a row three are invalid; the last one
    is only cut off."""
    done = llm.generate("x", SamplingParams(max_tokens=4, allowed_token_ids=[0xE2]))
    assert done.token_ids == (0xE2,) * 4
    assert done.text == "\ufffd" * 3
    # decoding ids by themselves shows all of them
    assert llm.tokenizer.decode(done.token_ids) == "\ufffd" * 4


# ---------------------------------------------------------------------------- what is ill-typed


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"context": "512"}, "context: '512' is not a whole number"),
        ({"threads": 1.5}, "threads: 1.5 is not a whole number"),
        ({"max_running": True}, "max_running: True is not a whole number"),
        ({"speculate": None}, "speculate: None is not a string"),
        ({"prefix_cache": "no"}, "prefix_cache: 'no' is not True or False"),
        ({"suffix_tenants": "me"}, "suffix_tenants: 'me' is not a list of strings"),
        ({"suffix_tenants": [1]}, "suffix_tenants: [1] is not a list of strings"),
    ],
)
def test_an_ill_typed_option_is_named(options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ParameterError) as caught:
        EngineConfig(**options)
    assert str(caught.value) == wanted
    assert caught.value.param == next(iter(options))


def test_an_unknown_option_is_named_with_the_closest_one() -> None:
    with pytest.raises(TypeError, match="LLM has no option 'contxt'; did you mean 'context'"):
        LLM.from_loaded(fake_parts(), contxt=5)
    assert EngineConfig(context=np.int64(512)).context == 512


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ([{"role": "user"}], r"messages\[0\] has no content"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}],
            r"messages\[1\] has no content",
        ),
        ([], "give at least one"),
        ("hello", "str is not a list of messages"),
        (["hello"], "str is not a list of messages"),
        ({"role": "user", "content": "x"}, "dict is not a list of messages"),
        (None, "NoneType is not a list of messages"),
        ([{"content": "x"}], "has no role"),
    ],
)
def test_an_invalid_message_is_named_before_the_template_runs(messages: Any, wanted: str) -> None:
    from verbatim.testing.fakes import server_parts

    with LLM.from_loaded(server_parts("hash"), kv_blocks=64) as llm:
        with pytest.raises(VerbatimError, match=wanted) as caught:
            llm.chat(messages)
        assert caught.value.param == "messages"
        assert "jinja" not in str(caught.value).lower()
        assert "attribute" not in str(caught.value)
        with pytest.raises(
            UnsupportedError, match=r"messages\[1\].tool_calls: .* does not support"
        ) as caught:
            llm.encode_chat(
                [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "tool_calls": [{"id": "1"}]},
                ]
            )
        assert caught.value.param == "messages[1].tool_calls"
        with pytest.raises(ParameterError, match="'tokenizer' is set by the engine"):
            llm.encode_chat([{"role": "user", "content": "x"}], tokenizer=1)


@pytest.mark.parametrize(
    ("name", "free", "tokens"),
    [
        ("cuda", 80e9, 8192),
        ("cuda", 8.7e9, 8192),
        ("cuda", 5e9, 4096),
        ("cuda", 0, 512),
        ("cpu", 80e9, 512),
    ],
)
def test_a_step_on_a_gpu_has_as_many_tokens_as_its_memory_allows(
    name: str, free: float, tokens: int
) -> None:
    """The sizes of Llama 3.1 8B: 0.23 MB of activations per token."""
    spec = ModelSpec("llama", 128256, 4096, 32, 8, 128, 14336, 8192, (LayerSpec(),) * 32)
    backend = SimpleNamespace(
        info=SimpleNamespace(name=name), spec=spec, available_memory=lambda: int(free)
    )
    loaded: Any = SimpleNamespace(backend=backend)
    assert with_step_tokens(loaded, EngineConfig()).step_tokens == tokens
    assert with_step_tokens(loaded, EngineConfig(step_tokens=9)).step_tokens == 9


def test_every_expert_that_a_token_uses_has_an_output() -> None:
    """The sizes of Qwen3-235B-A22B: 8 outputs of 4,096 float32 values per token, not 1."""
    dense = ModelSpec("qwen3", 151936, 4096, 64, 4, 128, 8 * 1536, 8192, (LayerSpec(),))
    layers = (LayerSpec(experts=128),)
    mixture = replace(dense, mlp=1536, layers=layers, experts_used=8)
    assert activation_bytes(mixture) - activation_bytes(dense) == 7 * 4096 * 4


@pytest.mark.parametrize(
    ("pooling", "want"), [("mean", [2.0, 4.0]), ("cls", [0, 1]), ("last", [4, 7])]
)
def test_positions_that_are_computed_again_are_pooled_once(pooling: Any, want: list[float]) -> None:
    """A preempted sequence computes its first positions again."""
    states = np.array([[0, 1], [2, 4], [4, 7]], np.float32)
    pool = HiddenPool(EmbeddingSpec(pooling, normalise=False))
    pool.add(0, states[:2])
    pool.add(0, states)
    assert (pool.count, pool.vector().tolist()) == (3, want)


def test_generate_without_max_tokens_ends_at_its_default_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("verbatim.engine.request.GENERATE_TOKENS", 9)
    params = SamplingParams(temperature=1, seed=1, ignore_eos=True)
    with LLM.from_loaded(fake_parts(FakeBackend(fake_spec()))) as llm:
        done = llm.generate("hi", params)
        assert len(done.token_ids) == 9
        assert any("ended after 9 tokens" in line for line in done.warnings)
        given = llm.generate("hi", params.with_(max_tokens=12))
        assert (len(given.token_ids), given.warnings) == (12, ())


def test_a_loop_is_a_warning_of_the_completion() -> None:
    params = SamplingParams(allowed_token_ids=[40], max_tokens=200, seed=1)
    with LLM.from_loaded(fake_parts(FakeBackend(fake_spec()))) as llm:
        [told] = llm.generate("hi", params).warnings
        assert told == "the output repeated a run of 1 token; on_loop stop ends such an answer"
