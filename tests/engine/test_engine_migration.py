"""The library as users of vLLM, transformers and OpenAI's client expect it."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import typing
from dataclasses import replace
from typing import Any

import pytest

from verbatim import (
    LLM,
    AsyncEngine,
    EngineConfig,
    ParameterError,
    SamplingParams,
    UnknownParameterError,
)
from verbatim.base.config import SETTINGS, STEP_TOKENS, EngineOptions
from verbatim.base.defaults import catalog_defaults
from verbatim.base.errors import RequestError
from verbatim.engine.calls import engine_base
from verbatim.explain.explained import Explanation
from verbatim.testing.fakes import server_parts

SHORT = SamplingParams(max_tokens=5, seed=1, ignore_eos=True)
ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture
def llm() -> Any:
    with LLM.from_loaded(server_parts("pipeline"), kv_blocks=64) as llm:
        yield llm


# --- options


def test_the_options_are_keyword_arguments_with_the_defaults_of_the_config() -> None:
    parameters = inspect.signature(LLM.__init__).parameters
    assert inspect.signature(AsyncEngine.__init__).parameters == parameters
    documented = " ".join((LLM.__init__.__doc__ or "").split())
    for name, rule in SETTINGS.items():
        assert parameters[name].default == getattr(EngineConfig(), name), name
        assert f"{name}: {rule.help}" in documented, name
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def test_a_type_checker_sees_each_option_with_the_type_of_its_setting_or_a_wider_one() -> None:
    record, options = typing.get_type_hints(EngineConfig), typing.get_type_hints(EngineOptions)
    assert list(options) == list(SETTINGS)
    wider = {name: kind for name, kind in options.items() if kind != record[name]}
    assert set(wider) == {"kv_memory", "cache_dir", "cache_dir_size", "adapters"}
    for name in ("kv_memory", "cache_dir", "cache_dir_size"):
        assert set(typing.get_args(record[name]) or {record[name]}) < set(
            typing.get_args(wider[name])
        )


def test_the_options_reach_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(
        engine_base,
        "load_for_engine",
        lambda model, *_, **__: given.append(model) or server_parts("pipeline"),
    )
    with LLM(model="any", kv_memory="1M", max_running=3, prefix_cache=False) as llm:
        assert given == ["any"]
        given_options = {"kv_memory": 1 << 20, "max_running": 3, "prefix_cache": False}
        assert llm.config == EngineConfig(**given_options, step_tokens=STEP_TOKENS)


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"max_model_len": 100}, "write context"),
        ({"n_ctx": 100}, "write context"),
        ({"gpu_memory_utilization": 0.9}, "write kv_memory"),
        ({"trust_remote_code": True}, "nothing in a model file is ever executed"),
        ({"seed": 1}, r"SamplingParams\(seed=...\)"),
        ({"contxt": 1}, "did you mean 'context'"),
        ({"hf_token": "x"}, "set the variable HF_TOKEN"),
        ({"quantization": "awq"}, "a checkpoint states its own"),
        ({"zzz_tokens": 1}, "known options: backend, "),
        ({"zzz": 1}, "known options: backend, "),
    ],
)
def test_an_unknown_option_is_answered_by_name(options: dict[str, Any], answer: str) -> None:
    with pytest.raises(TypeError, match=f"LLM has no option .*{answer}"):
        LLM("smollm2", **options)


def test_a_size_that_is_none_names_the_option() -> None:
    with pytest.raises(ParameterError, match="kv_memory: 'lots' is not a size such as 512M or 2G"):
        EngineConfig(kv_memory="lots")  # type: ignore[arg-type]


# --- arguments


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (lambda llm: llm.generate("x", sampling_params=SHORT), r"generate\(\) .* write params"),
        (lambda llm: llm.chat(ASK, sampling_params=SHORT), r"chat\(\) .* write params"),
        (lambda llm: llm.generate("x", max_new_tokens=5), r"SamplingParams\(max_tokens=...\)"),
        (lambda llm: llm.chat(ASK, max_tokens=5), r"SamplingParams\(max_tokens=...\)"),
        (lambda llm: llm.generate("x", do_sample=False), "temperature=0 takes the most likely"),
        (lambda llm: llm.stream("x", temperature=0), r"SamplingParams\(temperature=...\)"),
        (lambda llm: llm.chat_stream(ASK, do_sample=True), "any other temperature samples"),
        (lambda llm: llm.generate("x", use_tqdm=True), "write progress"),
        (lambda llm: llm.generate("x", stream=True), r"use stream\(prompt, params\)"),
        (lambda llm: llm.chat(ASK, stream=True), r"use chat_stream\(messages, params\)"),
        (lambda llm: llm.generate(input_ids=[1, 2]), "give it as the first argument"),
        (lambda llm: llm.generate("x", SHORT)[0], "Use .text, or .choices"),
        (lambda llm: SamplingParams(max_new_tokens=5), "write max_tokens"),
        (lambda llm: SamplingParams(do_sample=False), "temperature=0 takes the most likely"),
        (lambda llm: SamplingParams(guided_json={}), "write json_schema"),
        (lambda llm: SamplingParams(use_beam_search=True), "write num_beams=4"),
        (lambda llm: llm.generate("x", lora_request=1), r"SamplingParams\(adapter='NAME'\)"),
        (lambda llm: llm.generate(prompt_token_ids=[1]), "give it as the first argument"),
        (lambda llm: llm.chat(ASK, chat_template_kwargs={}), r"enable_thinking=False\)"),
        (lambda llm: llm("x"), r"use generate\(prompt\)"),
    ],
)
def test_an_argument_of_other_libraries_is_answered_by_name(
    llm: LLM, call: Any, answer: str
) -> None:
    with pytest.raises(TypeError, match=answer):
        call(llm)


@pytest.mark.parametrize(
    ("look", "answer"),
    [
        (lambda llm: llm.generate(["x"], SHORT)[0].outputs[0].text, "use .text, or .choices"),
        (lambda llm: llm.apply_chat_template, r"use chat\(messages\)"),
        (lambda llm: llm.get_tokenizer(), "use the property tokenizer"),
        (lambda llm: llm.zzz, "'LLM' object has no attribute 'zzz'$"),
        (lambda llm: LLM.from_pretrained, r"type object 'LLM' .*; write LLM\(model\)"),
        (lambda llm: LLM.zzz, "type object 'LLM' has no attribute 'zzz'$"),
        (lambda llm: llm.generate("x", SHORT).zzz, "'Completion' object has no attribute 'zzz'$"),
    ],
)
def test_an_attribute_of_other_libraries_is_answered_by_name(
    llm: LLM, look: Any, answer: str
) -> None:
    with pytest.raises(AttributeError, match=answer):
        look(llm)


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (lambda llm: llm.generate(), "prompts: is missing"),
        (lambda llm: llm.generate({"prompt": "x"}), "give its 'prompt' alone"),
        (lambda llm: llm.generate("x", {"temperature": 0}), r"write SamplingParams\(\*\*params\)"),
        (lambda llm: llm.vote("x", 2, params={"seed": 1}), r"write SamplingParams\(\*\*params\)"),
        (lambda llm: llm.explain(None), "prompt: NoneType is neither"),
        (lambda llm: llm.explain("x", top=0), "top: 0 is below 1"),
        (lambda llm: llm.explain("x", top="5"), "top: '5' is not a whole number"),
        (lambda llm: llm.score("x", window="4"), "window: '4' is not a whole number"),
        (lambda llm: llm.score("x", window=4, stride=1.5), "stride: 1.5 is not a whole number"),
        (lambda llm: LLM(None), "model: None is not a model; give a name or a path"),
        (lambda llm: LLM(42), "model: 42 is not a model"),
    ],
)
def test_a_wrong_value_is_answered_with_what_to_write(llm: LLM, call: Any, answer: str) -> None:
    with pytest.raises(ParameterError, match=answer):
        call(llm)


def test_the_error_for_an_unknown_parameter_is_still_its_own() -> None:
    with pytest.raises(UnknownParameterError, match="did you mean temperature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


def test_template_options_still_reach_the_template(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with_tools = llm.chat(ASK, SHORT, tools=[tool])
    assert len(with_tools.prompt_ids) > len(llm.chat(ASK, SHORT).prompt_ids)


# --- what a Completion shows


def test_a_completion_shows_its_text_and_why_it_ended(llm: LLM) -> None:
    done = llm.generate("x", SHORT)
    assert repr(done) == (
        f"Completion({done.text!r}, finish='length (max_tokens)', tokens='2 + 5', "
        f"seconds={round(done.timings.total, 3)}, seed=1)"
    )
    assert pickle.loads(pickle.dumps(done)) == done


def test_a_notebook_shows_tokens_coloured_by_probability(llm: LLM) -> None:
    plain = llm.generate("x", SHORT)
    assert plain.choices[0].pieces == ()
    assert "SamplingParams(logprobs=0) colours" in plain._repr_html_()
    done = llm.generate("x", SHORT.with_(logprobs=0))
    assert len(done.choices[0].pieces) == 5
    shown = done._repr_html_()
    assert shown.count('<span style="background:hsla(') == 5
    assert "<script" not in llm.generate("x", SHORT.with_(choice=["<script>"]))._repr_html_()


def test_an_explanation_prints_itself(llm: LLM) -> None:
    why = llm.explain("x", SamplingParams(max_tokens=3, temperature=0))
    assert [token.rank for token in why] == [1, 1, 1]
    assert why.text == llm.generate("x", SamplingParams(max_tokens=3, temperature=0)).text
    assert repr(why).count("rank 1") == 3
    assert repr(why).startswith(f"Explanation of {why.text!r}, 3 tokens")
    assert "logit" in repr(why[0])
    assert why[0]["token"] == why[0].id == why.records[0]["token"]
    assert why._repr_html_().count("<span") == 3
    again = why.what_if(temperature=1.0)
    assert "tokens would differ" in repr(again)
    assert llm.explain(ASK, SHORT).completion.prompt_ids == tuple(llm.encode_chat(ASK))
    with pytest.raises(ParameterError, match="one answer"):
        llm.explain("x", SamplingParams(n=2))


def test_a_what_if_starts_from_the_parameters_in_force(llm: LLM) -> None:
    """Those that the model's files state are among them."""
    loaded = replace(llm.loaded, defaults=catalog_defaults({"temperature": 0.2, "top_k": 5}))
    with LLM.from_loaded(loaded, kv_blocks=64) as stated:
        why = stated.explain("hi", SHORT)
        assert [step.after for step in why.what_if(temperature=0)] == [
            r["best"] for r in why.records
        ]


def test_a_what_if_of_a_long_answer_draws_its_first_64_tokens_again(llm: LLM) -> None:
    why = llm.explain("hi", SamplingParams(max_tokens=80, seed=1, ignore_eos=True))
    assert len(why) == 80
    steps = why.what_if(temperature=0)
    assert [step.after for step in steps] == [record["best"] for record in why.records[:64]]
    assert "of 64 tokens would differ" in repr(steps)
    bare = llm.generate("hi", SamplingParams(max_tokens=2, seed=1, explain=1))
    with pytest.raises(RequestError, match="whole row"):
        Explanation(bare, SamplingParams(seed=1), llm.tokenizer).what_if(temperature=0)


@pytest.mark.parametrize("set_before", [True, False])
def test_a_what_if_finds_the_breakers_of_dry(llm: LLM, set_before: bool) -> None:
    dry: dict[str, Any] = {"dry_multiplier": 9.0, "dry_allowed_length": 1, "dry_breakers": ["c"]}
    params = SHORT.with_(allowed_token_ids=[97, 98, 99], max_tokens=30)
    with_dry = llm.explain("abab", params.with_(**dry))
    if set_before:
        assert not any(step.changed for step in with_dry.what_if(seed=1))
    else:  # the first step that DRY changes: the history is equal up to there
        steps = llm.explain("abab", params).what_if(**dry)
        at = next(i for i, step in enumerate(steps) if step.changed)
        assert [step.after for step in steps[: at + 1]] == [t.id for t in with_dry[: at + 1]]


# --- progress


class Bar:
    made: typing.ClassVar[list[Bar]] = []

    def __init__(self, total: int, desc: str) -> None:
        self.total, self.count, self.closed = total, 0, False
        self.made.append(self)

    def update(self, n: int) -> None:
        self.count += n

    def close(self) -> None:
        self.closed = True


def test_progress_counts_every_prompt(llm: LLM) -> None:
    Bar.made.clear()
    prompts = [f"prompt {i}" for i in range(7)]
    with_bar = llm.generate(prompts, SHORT, progress=Bar)
    assert [done.text for done in with_bar] == [d.text for d in llm.generate(prompts, SHORT)]
    (bar,) = Bar.made
    assert (bar.total, bar.count, bar.closed) == (7, 7, True)
    with pytest.raises(ParameterError, match="progress"):
        llm.generate(prompts, SHORT, progress=5)  # type: ignore[call-overload]


def test_progress_true_is_tqdm(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], SHORT, progress=True)
    assert "2/2" in capsys.readouterr().err


# --- AsyncEngine


def test_the_async_engine_has_the_calls_of_llm(llm: LLM) -> None:
    async def calls() -> list[Any]:
        async with AsyncEngine.from_loaded(server_parts("pipeline"), kv_blocks=64) as engine:
            Bar.made.clear()
            stream = engine.stream("x", SHORT)
            pieces = [delta.text async for delta in stream]
            assert stream.completion is not None
            assert "".join(pieces) == stream.completion.text
            talk = engine.chat_stream(ASK, SHORT)
            spoken = "".join([delta.text async for delta in talk])
            with pytest.raises(TypeError, match="write params"):
                await engine.generate("x", sampling_params=SHORT)  # type: ignore[call-overload]
            with pytest.raises(ParameterError):
                await engine.generate(["x", 5], SHORT)  # type: ignore[call-overload]
            with pytest.raises(TypeError, match=r"async for delta in engine.stream\(...\)"):
                async for _ in engine.generate("x", SHORT):  # type: ignore[attr-defined]
                    pass
            task = asyncio.create_task(engine.generate("x", SHORT))
            assert (await task).text == stream.completion.text
            async with engine.stream("x", SHORT) as left:
                await anext(left)
            return [
                await engine.generate("x", SHORT),
                await engine.generate(["x", "y"], [SHORT, SHORT], progress=Bar),
                await engine.chat(ASK, SHORT),
                await engine.chat([ASK, ASK], SHORT),
                spoken,
            ]

    one, many, said, talks, spoken = asyncio.run(calls())
    assert one.text == llm.generate("x", SHORT).text
    assert [d.text for d in many] == [d.text for d in llm.generate(["x", "y"], SHORT)]
    assert Bar.made[0].count == 2
    assert said.text == spoken == llm.chat(ASK, SHORT).text
    assert [d.text for d in talks] == [said.text] * 2
