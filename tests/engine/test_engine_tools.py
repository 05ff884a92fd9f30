"""Tools in the library: Python functions as tools, calls in Completions and Deltas, and messages
that continue a conversation."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Literal

import pydantic
import pytest
from jsonschema import validate

from verbatim import LLM, AsyncEngine, SamplingParams
from verbatim.base.errors import ParameterError, RequestError
from verbatim.base.records import ToolCall
from verbatim.base.schema_types import schema_of
from verbatim.engine.loaded_model import LoadedModel
from verbatim.testing.fakes import FakeBackend, ThinkByteTokenizer, fake_parts, fake_spec
from verbatim.text.templates.chat_template import ChatTemplate
from verbatim.text.tools.function_tools import function_of

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}: {{ t.function.description }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"
    "{% endfor %}<assistant>"
)
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
ASK = [{"role": "user", "content": "Weather?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class Place(pydantic.BaseModel):
    city: str


def weather(city: Literal["Paris", "Rome"], days: int = 1) -> str:
    """Forecast of a city.

    city: where it is
    days (int): how many days
    """
    return f"{city}: sun for {days} days"


def sky(city: Literal["Paris", "Rome"]) -> None: ...


def sea(city: Literal["Nice"]) -> None: ...


def with_template(source: str = TEMPLATE) -> LoadedModel:
    parts = fake_parts(FakeBackend(fake_spec(vocab=262), pipeline=True))
    template = ChatTemplate(source, "<s>", "</s>")
    return replace(parts, tokenizer=ThinkByteTokenizer(), template=template)


def open_llm(source: str = TEMPLATE) -> LLM:
    return LLM.from_loaded(with_template(source))


def writes(text: str, **more: Any) -> SamplingParams:
    return SamplingParams(choice=[text], seed=1, **more)


def test_a_function_is_described_by_its_signature_and_docstring() -> None:
    assert function_of(weather) == {
        "name": "weather",
        "description": "Forecast of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"], "description": "where it is"},
                "days": {"type": "integer", "description": "how many days"},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    }


def test_a_pydantic_argument_is_a_definition_and_a_closed_object() -> None:
    def go(to: list[Place]) -> None: ...

    schema = function_of(go)["parameters"]
    validate({"to": [{"city": "Rome"}]}, schema)
    with pytest.raises(Exception, match="Additional properties"):
        validate({"to": [{"city": "Rome", "x": 1}]}, schema)


def test_pydantic_models_are_closed_unless_they_allow_more() -> None:
    class Inner(pydantic.BaseModel):
        a: dict[str, int] = {}

    class Outer(pydantic.BaseModel):
        inner: Inner

    class Loose(pydantic.BaseModel, extra="allow"):
        a: int

    schema = schema_of(Outer)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Inner"]["additionalProperties"] is False
    assert schema["$defs"]["Inner"]["properties"]["a"]["additionalProperties"] == {
        "type": "integer"
    }
    assert schema_of(Loose)["additionalProperties"] is True


@pytest.mark.parametrize("source", [TEMPLATE, PLAIN])
def test_calls_are_separated_from_the_text(source: str) -> None:
    with open_llm(source) as llm:
        done = llm.chat(ASK, writes(f"Let me look.{CALL}"), tools=[weather])
        assert done.text == "Let me look."
        (call,) = done.tool_calls
        assert (call.name, call.arguments) == ("weather", {"city": "Rome"})
        assert weather(**call.arguments) == "Rome: sun for 1 days"
        talk = [*ASK, done.message, call.result({"sky": "blue"})]
        shown = llm.decode(llm.chat(talk, writes("Sun."), tools=[weather]).prompt_ids)
    assert "weather" in shown
    assert "Rome" in shown
    assert '{"sky": "blue"}' in shown


def test_a_stream_gives_a_call_once_and_its_text_without_it() -> None:
    with open_llm() as llm:
        stream = llm.chat_stream(ASK, writes(f"Look: {CALL}"), tools=[weather])
        deltas = list(stream)
    assert stream.completion is not None
    assert "".join(delta.text for delta in deltas) == stream.completion.text == "Look: "
    assert [c for delta in deltas for c in delta.tool_calls] == [*stream.completion.tool_calls]


def test_required_and_named_calls_are_valid_whatever_is_drawn() -> None:
    with open_llm() as llm:
        for seed in range(6):
            params = SamplingParams(seed=seed, max_tokens=300)
            done = llm.chat(
                *(ASK, params),
                tools=[sky, sea],
                tool_choice="sea" if seed % 2 else "required",
                parallel_tool_calls=False,
            )
            (call,) = done.tool_calls
            assert call.name in (("sea",) if seed % 2 else ("sky", "sea"))
            validate(call.arguments, function_of(globals()[call.name])["parameters"])
            assert done.parsed is None


def test_a_strict_tool_is_a_valid_call_or_text_with_the_schema() -> None:
    strict = {"type": "function", "function": {**function_of(weather), "strict": True}}
    params = SamplingParams(max_tokens=300, json_schema=dict[str, bool])
    with open_llm() as llm:
        found = [llm.chat(ASK, params.with_(seed=s), tools=[strict]) for s in range(8)]
    assert any(done.tool_calls for done in found)
    for done in found:
        if not done.tool_calls:
            assert isinstance(done.parsed, dict)


def test_the_choice_none_neither_shows_nor_reads_tools() -> None:
    with open_llm() as llm:
        done = llm.chat(ASK, writes(CALL), tools=[weather], tool_choice="none")
        assert (done.text, done.tool_calls) == (CALL, ())
        assert done.prompt_ids == llm.chat(ASK, writes("x")).prompt_ids
        shown = llm.chat(ASK, writes("x"), tools=[weather]).prompt_ids
        assert list(shown) == llm.encode_chat(ASK, tools=[weather])


def test_asyncio_has_the_same_calls() -> None:
    async def ask() -> tuple[ToolCall, ...]:
        async with AsyncEngine.from_loaded(with_template()) as engine:
            done = await engine.chat(ASK, writes(CALL), tools=[weather])
            streamed = engine.chat_stream(ASK, writes(CALL), tools=[weather])
            parts = [call async for delta in streamed for call in delta.tool_calls]
            assert [call.arguments for call in parts] == [done.tool_calls[0].arguments]
            return done.tool_calls

    assert [call.name for call in asyncio.run(ask())] == ["weather"]


def nothing_by_name(*cities: str) -> None: ...


def unknown_type(at: complex) -> None: ...


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tools": [{"name": "f"}]}, r"tools\[0\]: give"),
        ({"tools": [3]}, r"tools\[0\]: 3 is neither"),
        ({"tools": [lambda: 1]}, r"tools\[0\]: .*lambda.* is neither"),
        ({"tools": weather}, "tools: give a list"),
        ({"tools": [weather, weather]}, "same name"),
        ({"tools": [nothing_by_name]}, r"nothing_by_name\(\): the parameter \*cities"),
        ({"tools": [unknown_type]}, r"unknown_type\(\): .*complex"),
        ({"tools": [weather], "tool_choice": "wether"}, "tool_choice: names a function"),
        ({"tool_choice": "required"}, "has no tools"),
        ({"tools": [weather], "tool_choice": {"name": "weather"}}, "tool_choice: give"),
    ],
)
def test_wrong_tools_are_named(options: dict[str, Any], match: str) -> None:
    with open_llm() as llm, pytest.raises(ParameterError, match=match):
        llm.chat(ASK, SamplingParams(max_tokens=1), **options)


def test_a_result_that_is_no_json_is_refused() -> None:
    call = ToolCall("f", {}, "1")
    for value in (float("nan"), {1, 2}):
        with pytest.raises(ParameterError, match="value: is neither text nor JSON"):
            call.result(value)


def test_a_forced_call_excludes_other_grammars() -> None:
    with open_llm() as llm, pytest.raises(RequestError, match="combined with regex"):
        llm.chat(ASK, SamplingParams(regex="a"), tools=[weather], tool_choice="required")


def test_unknown_keys_of_a_message_are_named_with_tools_as_without() -> None:
    with open_llm() as llm:
        for more in ({}, {"tools": [weather]}):
            with pytest.raises(RequestError, match="mood"):
                llm.chat([{**ASK[0], "mood": "x"}], SamplingParams(max_tokens=1), **more)


def test_log_probabilities_carry_the_text_of_their_tokens() -> None:
    with open_llm() as llm:
        params = writes("abcd", logprobs=2, prompt_logprobs=1)
        done = llm.generate("hi", params)
        stream = llm.stream("hi", params)
        deltas = list(stream)
    assert [row.text for row in done.logprobs] == list("abcd")
    assert all(len(row.top_texts) == len(row.top) == 2 for row in done.logprobs)
    assert [row.text for delta in deltas for row in delta.logprobs] == [
        row.text for row in done.logprobs
    ]
    scored = done.prompt_logprobs[-1]
    assert scored is not None
    assert scored.text == "i"
