# ruff: noqa: PT017
"""Third-party clients against our server: `python client_calls.py URL MODEL NAME…` in the
environment of client_setup.

Each runs a chat, a stream, an error, a cancelled stream and, if it supports them, tools and a JSON
schema. A wrong result is an AssertionError. Prints one line per client: "NAME: ok", or its
traceback in JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import traceback
from typing import Any

ASK = [{"role": "user", "content": "Say hello."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def openai_sync(url: str, model: str) -> None:
    import openai
    from pydantic import BaseModel

    client = openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0)
    answer = client.chat.completions.create(model=model, messages=ASK, max_tokens=12, seed=1)
    assert answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    stream = client.chat.completions.create(
        model=model,
        messages=ASK,
        max_tokens=12,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        == answer.choices[0].message.content
    )
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    for wrong in ({"temperature": -1}, {"model": "nope"}, {"extra_body": {"no_such": 1}}):
        try:
            client.chat.completions.create(**{"model": model, "messages": ASK, **wrong})
        except (openai.BadRequestError, openai.NotFoundError) as error:
            assert error.param, wrong
        else:
            raise AssertionError(wrong)
    with client.chat.completions.create(model=model, messages=ASK, stream=True) as cancelled:
        next(iter(cancelled))

    called = client.chat.completions.create(
        model=model,
        messages=ASK,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=60,
    )
    call = called.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    assert called.choices[0].finish_reason == "tool_calls"
    follow = [
        *ASK,
        called.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    assert client.chat.completions.create(
        model=model, messages=follow, tools=[TOOL], max_tokens=8
    ).choices

    class City(BaseModel):
        name: str
        large: bool

    # A schema does not limit the length of a string: the answer may be truncated, and parse reports
    # it.
    try:
        parsed = client.chat.completions.parse(
            model=model, messages=ASK, response_format=City, max_tokens=80, temperature=0
        )
        assert isinstance(parsed.choices[0].message.parsed, City)
    except openai.LengthFinishReasonError:
        pass
    response = client.responses.create(
        model=model, input="Say hello.", max_output_tokens=8, store=True
    )
    assert response.output_text
    assert client.responses.retrieve(response.id).output_text == response.output_text
    client.responses.delete(response.id)
    with client.responses.stream(model=model, input="Say hello.", max_output_tokens=8) as events:
        kinds = [e.type for e in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    kept = client.chat.completions.create(model=model, messages=ASK, max_tokens=4, store=True)
    assert client.chat.completions.retrieve(kept.id).id == kept.id
    assert client.chat.completions.delete(kept.id).deleted
    assert client.embeddings.create(model=model, input=["a", "b"]).data[1].embedding
    assert (
        client.completions.create(model=model, prompt="Once", max_tokens=4, logprobs=1)
        .choices[0]
        .logprobs.tokens
    )
    assert model in [m.id for m in client.models.list()]


def openai_async(url: str, model: str) -> None:
    import openai

    async def run() -> None:
        async with openai.AsyncOpenAI(
            base_url=url + "/v1", api_key="unused", max_retries=0
        ) as client:
            made = [
                client.chat.completions.create(model=model, messages=ASK, max_tokens=8, seed=1)
                for _ in range(4)
            ]
            answers = await asyncio.gather(*made)
            assert len({a.choices[0].message.content for a in answers}) == 1
            text = ""
            async for chunk in await client.chat.completions.create(
                model=model, messages=ASK, max_tokens=8, seed=1, stream=True
            ):
                text += chunk.choices[0].delta.content or ""
            assert text == answers[0].choices[0].message.content
            async with client.chat.completions.stream(
                model=model,
                messages=ASK,
                tools=[TOOL],
                tool_choice="required",
                parallel_tool_calls=False,
                max_tokens=60,
            ) as events:
                final = await events.get_final_completion()
            assert final.choices[0].message.tool_calls[0].function.name == "get_weather"
            leaving = await client.chat.completions.create(
                model=model, messages=ASK, max_tokens=2000, stream=True
            )
            await anext(aiter(leaving))
            await leaving.close()  # disconnect in the middle of the answer

    asyncio.run(run())


def litellm(url: str, model: str) -> None:
    import litellm as lib

    common: dict[str, Any] = {
        "model": f"openai/{model}",
        "api_base": url + "/v1",
        "api_key": "unused",
        "num_retries": 0,
    }
    answer = lib.completion(messages=ASK, max_tokens=8, seed=1, **common)
    assert answer.choices[0].message.content
    pieces = [
        c.choices[0].delta.content or ""
        for c in lib.completion(messages=ASK, max_tokens=8, seed=1, stream=True, **common)
    ]
    assert "".join(pieces) == answer.choices[0].message.content
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    # its tools need a package that it does not install
    made = lib.completion(
        messages=ASK, response_format=form, max_tokens=300, temperature=0, **common
    )
    assert json.loads(made.choices[0].message.content)["yes"] in (True, False)
    try:
        lib.completion(messages=ASK, temperature=-5, **common)
    except lib.BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError
    next(iter(lib.completion(messages=ASK, stream=True, **common)))


def langchain(url: str, model: str) -> None:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    chat = ChatOpenAI(
        model=model, base_url=url + "/v1", api_key="unused", max_retries=0, max_tokens=8, seed=1
    )
    whole = chat.invoke("Say hello.")
    assert whole.content
    assert "".join(c.content for c in chat.stream("Say hello.")) == whole.content
    called = (
        ChatOpenAI(model=model, base_url=url + "/v1", api_key="unused", max_tokens=60)
        .bind_tools([TOOL], tool_choice="required")
        .invoke("Say hello.")
    )
    assert called.tool_calls[0]["name"] == "get_weather"
    schema = {
        "title": "Answer",
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    structured = ChatOpenAI(
        model=model, base_url=url + "/v1", api_key="unused", max_tokens=300, temperature=0
    ).with_structured_output(schema, method="json_schema")
    assert structured.invoke("Yes or no?")["yes"] in (True, False)
    vectors = OpenAIEmbeddings(
        model=model, base_url=url + "/v1", api_key="unused", check_embedding_ctx_length=False
    )
    assert len(vectors.embed_query("hello")) > 1
    try:
        ChatOpenAI(model="nope", base_url=url + "/v1", api_key="unused", max_retries=0).invoke("x")
    except Exception as error:
        assert "model" in str(error)
    else:
        raise AssertionError
    next(iter(chat.stream("Say hello.")))


def instructor(url: str, model: str) -> None:
    import instructor as lib
    import openai
    from pydantic import BaseModel

    class Answer(BaseModel):
        yes: bool

    raw = openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0)
    for mode in (lib.Mode.TOOLS, lib.Mode.JSON_SCHEMA):
        client = lib.from_openai(raw, mode=mode)
        made = client.chat.completions.create(
            model=model,
            messages=ASK,
            response_model=Answer,
            max_tokens=300,
            temperature=0,
            max_retries=1,
        )
        assert made.yes in (True, False)


def pydantic_ai(url: str, model: str) -> None:
    from pydantic import BaseModel
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Answer(BaseModel):
        yes: bool

    made = OpenAIChatModel(model, provider=OpenAIProvider(base_url=url + "/v1", api_key="unused"))
    assert Agent(made, model_settings={"max_tokens": 8}).run_sync("Say hello.").output
    assert Agent(
        made, output_type=NativeOutput(Answer), model_settings={"max_tokens": 300, "temperature": 0}
    ).run_sync("Yes or no?").output.yes in (True, False)
    assert Agent(
        made, output_type=Answer, model_settings={"max_tokens": 300, "temperature": 0}
    ).run_sync("Yes or no?").output.yes in (True, False)

    async def stream() -> None:
        async with Agent(made, model_settings={"max_tokens": 8}).run_stream("Say hello.") as result:
            assert await result.get_output()

    asyncio.run(stream())


def llm_command(url: str, model: str) -> None:
    import tempfile

    from click.testing import CliRunner
    from llm.cli import cli

    with tempfile.TemporaryDirectory() as home:
        with open(os.path.join(home, "extra-openai-models.yaml"), "w") as file:
            file.write(f"- model_id: ours\n  model_name: {model}\n  api_base: {url}/v1\n")
        shell = CliRunner(env={"LLM_USER_PATH": home, "OPENAI_API_KEY": "unused"})
        base = ["-m", "ours", "--no-log"]
        done = shell.invoke(cli, [*base, "-o", "max_tokens", "8", "Say hello."])
        assert done.exit_code == 0, done.output
        assert done.stdout.strip()
        more = ["-o", "temperature", "2", "-o", "max_tokens", "999999999", "x"]
        wrong = shell.invoke(cli, [*base, *more])
        assert wrong.exit_code != 0
        assert "max_tokens" in wrong.stderr


def anthropic(url: str, model: str) -> None:
    import anthropic as lib

    client = lib.Anthropic(base_url=url, api_key="unused", max_retries=0)
    answer = client.messages.create(
        model=model, max_tokens=8, messages=ASK, system="Be brief.", extra_body={"temperature": 0}
    )
    assert answer.content[0].text
    with client.messages.stream(
        model=model, max_tokens=8, messages=ASK, system="Be brief.", extra_body={"temperature": 0}
    ) as stream:
        assert "".join(stream.text_stream) == answer.content[0].text
        assert stream.get_final_message().usage.output_tokens == answer.usage.output_tokens
    tool = {
        "name": "get_weather",
        "description": "x",
        "input_schema": TOOL["function"]["parameters"],
    }
    called = client.messages.create(
        model=model, max_tokens=60, messages=ASK, tools=[tool], tool_choice={"type": "any"}
    )
    block = called.content[-1]
    assert (called.stop_reason, block.name) == ("tool_use", "get_weather")
    follow = [
        *ASK,
        {"role": "assistant", "content": called.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}],
        },
    ]
    assert client.messages.create(model=model, max_tokens=8, messages=follow, tools=[tool]).content
    assert client.messages.count_tokens(model=model, messages=ASK).input_tokens > 0
    try:
        client.messages.create(
            model=model, max_tokens=8, messages=ASK, extra_body={"temperature": -1}
        )
    except lib.BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError
    with client.messages.stream(model=model, max_tokens=500, messages=ASK) as cancelled:
        next(iter(cancelled))


def ollama(url: str, model: str) -> None:
    import ollama as lib

    client = lib.Client(host=url)
    options = {"num_predict": 8, "seed": 1}
    whole = client.chat(model=model, messages=ASK, options=options)
    assert whole.message.content
    assert (
        "".join(
            p.message.content
            for p in client.chat(model=model, messages=ASK, options=options, stream=True)
        )
        == whole.message.content
    )
    assert client.generate(model=model, prompt="Say hello.", options=options).response
    named = client.chat(model=model, messages=ASK, options=options, logprobs=True, top_logprobs=1)
    assert named.logprobs[0].top_logprobs
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    made = client.chat(model=model, messages=ASK, format=schema, options={"num_predict": 60})
    assert json.loads(made.message.content)["yes"] in (True, False)
    assert any(m.model == model for m in client.list().models)
    try:
        client.chat(model=model, messages=ASK, options={"temperature": -1.0})
    except lib.ResponseError as error:
        assert "temperature" in error.error
    else:
        raise AssertionError
    next(iter(client.chat(model=model, messages=ASK, stream=True)))


if __name__ == "__main__":
    # One process for all: most of a client's time is the import of libraries that others share.
    gc.disable()  # it would visit the imported modules again and again
    for name in sys.argv[3:]:
        try:
            globals()[name](sys.argv[1], sys.argv[2])
            print(f"{name}: ok", flush=True)
        except BaseException:
            print(f"{name}: {json.dumps(traceback.format_exc())}", flush=True)
