"""The examples of Ollama's API page and of OpenAI's quick start, sent unchanged: body, content type
and model name. Only the address differs.

On a fake model all of them are answered in the documented shape, or refused with the reason and the
remedy. On the default model those with a checkable result make sense. docs/coming-from/ollama.md
lists them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import Live, check_ledger
from pydantic import BaseModel

from eventually import HANG_SECONDS

pytestmark = pytest.mark.server

MODELS = (
    "llama3.2",
    "llama3.1",
    "llama3.1:8b",
    "codellama:code",
    "llava",
    "mistral",
    "all-minilm",
    "gpt-5.5",
    "gpt-4.1",
)
FLAGS = [word for name in MODELS for word in ("--served-model-name", name)]
CURL = "application/x-www-form-urlencoded"  # what curl -d sends
JSON = "application/json"
SKY = '"prompt": "Why is the sky blue?"'
SCHEMA = """{
    "type": "object",
    "properties": {
      "age": {
        "type": "integer"
      },
      "available": {
        "type": "boolean"
      }
    },
    "required": [
      "age",
      "available"
    ]
  }"""
WEATHER = """{
  "model": "llama3.2",
  "messages": [
    {
      "role": "user",
      "content": "What is the weather today in Paris?"
    }
  ],
  "stream": false,
  "tools": [
    {
      "type": "function",
      "function": {
        "name": "get_current_weather",
        "description": "Get the current weather for a location",
        "parameters": {
          "type": "object",
          "properties": {
            "location": {
              "type": "string",
              "description": "The location to get the weather for, e.g. San Francisco, CA"
            },
            "format": {
              "type": "string",
              "description": "The format to return the weather in, e.g. 'celsius' or 'fahrenheit'",
              "enum": ["celsius", "fahrenheit"]
            }
          },
          "required": ["location", "format"]
        }
      }
    }
  ]
}"""
OPTIONS = """{
    "num_keep": 5,
    "seed": 42,
    "num_predict": 100,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.0,
    "typical_p": 0.7,
    "repeat_last_n": 33,
    "temperature": 0.8,
    "repeat_penalty": 1.2,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.0,
    "penalize_newline": true,
    "stop": ["\\n", "user:"],
    "numa": false,
    "num_ctx": 1024,
    "num_batch": 2,
    "num_gpu": 1,
    "main_gpu": 0,
    "use_mmap": true,
    "num_thread": 8
  }"""
WEATHER_TOOL = """{
      "type": "function",
      "function": {
        "name": "get_weather",
        "description": "Get the weather in a given city",
        "parameters": {
          "type": "object",
          "properties": {
            "city": {
              "type": "string",
              "description": "The city to get the weather for"
            }
          },
          "required": ["city"]
        }
      }
    }"""
STREAMED_TOOLS = f"""{{
  "model": "llama3.2",
  "messages": [ {{ "role": "user", "content": "what is the weather in tokyo?" }} ],
  "tools": [ {WEATHER_TOOL} ],
  "stream": true
}}"""
TOOL_HISTORY = f"""{{
  "model": "llama3.2",
  "messages": [
    {{ "role": "user", "content": "what is the weather in Toronto?" }},
    {{
      "role": "assistant",
      "content": "",
      "tool_calls": [
        {{ "function": {{ "name": "get_weather", "arguments": {{ "city": "Toronto" }} }} }}
      ]
    }},
    {{ "role": "tool", "content": "11 degrees celsius", "tool_name": "get_weather" }}
  ],
  "stream": false,
  "tools": [ {WEATHER_TOOL} ]
}}"""
BLUE = '{ "role": "user", "content": "why is the sky blue?" }'
STRUCTURED_CHAT = f"""{{
  "model": "llama3.1",
  "messages": [{{"role": "user", "content": "Ollama is 22 years old and busy saving the world. Return a JSON object with the age and availability."}}],
  "stream": false,
  "format": {SCHEMA},
  "options": {{
    "temperature": 0
  }}
}}"""  # noqa: E501
HELLO = """{
  "model": "llama3.2",
  "messages": [
    {
      "role": "user",
      "content": "Hello!"
    }
  ],
  "options": {
    "seed": 101,
    "temperature": 0
  }
}"""

# name -> (path, content type, body, the member of each line that holds the output)
ANSWERED = {
    "generate": ("/api/generate", CURL, f'{{ "model": "llama3.2", {SKY} }}', "response"),
    "whole": (
        "/api/generate",
        CURL,
        f'{{ "model": "llama3.2", {SKY}, "stream": false }}',
        "response",
    ),
    "structured": (
        "/api/generate",
        JSON,
        '{ "model": "llama3.1:8b", "prompt": "Ollama is 22 years old and is busy saving the world. '
        f'Respond using JSON", "stream": false, "format": {SCHEMA} }}',
        "response",
    ),
    "json mode": (
        "/api/generate",
        CURL,
        '{ "model": "llama3.2", "prompt": "What color is the sky at different times of the day? '
        'Respond using JSON", "format": "json", "stream": false }',
        "response",
    ),
    "raw": (
        "/api/generate",
        CURL,
        '{ "model": "mistral", "prompt": "[INST] why is the sky blue? [/INST]", "raw": true, '
        '"stream": false }',
        "response",
    ),
    "seed": (
        "/api/generate",
        CURL,
        f'{{ "model": "mistral", {SKY}, "options": {{ "seed": 123 }} }}',
        "response",
    ),
    "options": (
        "/api/generate",
        CURL,
        f'{{ "model": "llama3.2", {SKY}, "stream": false, "options": {OPTIONS} }}',
        "response",
    ),
    "load": ("/api/generate", CURL, '{ "model": "llama3.2" }', "response"),
    "chat": ("/api/chat", CURL, f'{{ "model": "llama3.2", "messages": [{BLUE}] }}', "message"),
    "chat, whole": (
        "/api/chat",
        CURL,
        f'{{ "model": "llama3.2", "messages": [{BLUE}], "stream": false }}',
        "message",
    ),
    "chat, structured": ("/api/chat", JSON, STRUCTURED_CHAT, "message"),
    "chat, history": (
        "/api/chat",
        CURL,
        f'{{ "model": "llama3.2", "messages": [{BLUE}, {{ "role": "assistant", "content": "due to '
        'rayleigh scattering." }, { "role": "user", "content": "how is that different than mie '
        'scattering?" } ] }',
        "message",
    ),
    "chat, seed": ("/api/chat", CURL, HELLO, "message"),
    "chat, tools": ("/api/chat", CURL, WEATHER, "message"),
    "chat, streamed tools": ("/api/chat", CURL, STREAMED_TOOLS, "message"),
    "chat, tool history": ("/api/chat", CURL, TOOL_HISTORY, "message"),
    "chat, load": ("/api/chat", CURL, '{ "model": "llama3.2", "messages": [] }', "message"),
    "embed": (
        "/api/embed",
        CURL,
        '{ "model": "all-minilm", "input": "Why is the sky blue?" }',
        "embeddings",
    ),
    "embed, two": (
        "/api/embed",
        CURL,
        '{ "model": "all-minilm", "input": ["Why is the sky blue?", "Why is the grass green?"] }',
        "embeddings",
    ),
    "embeddings": (
        "/api/embeddings",
        CURL,
        '{ "model": "all-minilm", "prompt": "Here is an article about llamas..." }',
        "embedding",
    ),
    "show": ("/api/show", CURL, '{ "model": "llama3.2" }', "details"),
    "pull": ("/api/pull", CURL, '{ "model": "llama3.2" }', "status"),
}
LISTS = {"/api/tags": "models", "/api/ps": "models", "/api/version": "version"}
SHA = "sha256:29fdb92e57cf0827ded04ae6461b5931d01fa595843f55d36f5b275a52087dd2"
# Examples of what this server does not do, and what the error names.
REFUSED = {
    "suffix": (
        "/api/generate",
        '{ "model": "codellama:code", "prompt": "def compute_gcd(a, b):", "suffix": "    return '
        'result", "options": { "temperature": 0 }, "stream": false }',
        "suffix",
    ),
    "images": (
        "/api/generate",
        '{ "model": "llava", "prompt":"What is in this picture?", "stream": false, '
        '"images": ["iVBORw0KGgo="] }',
        "images",
    ),
    "chat images": (
        "/api/chat",
        '{ "model": "llava", "messages": [ { "role": "user", "content": "what is in this image?", '
        '"images": ["iVBORw0KGgo="] } ] }',
        "images",
    ),
    "unload": ("/api/generate", '{ "model": "llama3.2", "keep_alive": 0 }', "keep_alive"),
    "chat unload": (
        "/api/chat",
        '{ "model": "llama3.2", "messages": [], "keep_alive": 0 }',
        "keep_alive",
    ),
    "options of 2024": (
        "/api/generate",
        f'{{ "model": "llama3.2", {SKY}, "options": {{ "mirostat": 1, "mirostat_tau": 0.8 }} }}',
        "options.mirostat: not supported; this sampler does not exist here; min_p",
    ),
    "newline": (
        "/api/generate",
        f'{{ "model": "llama3.2", {SKY}, "options": {{ "penalize_newline": false }} }}',
        "options.penalize_newline: not supported; the penalties apply to a newline",
    ),
    "create": (
        "/api/create",
        '{ "model": "mario", "from": "llama3.2", "system": "You are Mario from Super Mario Bros."}',
        "send system and options with each request",
    ),
    "quantise": (
        "/api/create",
        '{ "model": "llama3.2:quantized", "from": "llama3.2:3b-instruct-fp16", '
        '"quantize": "q4_K_M" }',
        "verbatim convert",
    ),
    "pull another": ("/api/pull", '{ "model": "llama3" }', "verbatim pull"),
    "push": ("/api/push", '{ "model": "mattw/pygmalion:latest" }', "nothing is uploaded"),
    "copy": (
        "/api/copy",
        '{ "source": "llama3.2", "destination": "llama3-backup" }',
        "verbatim serve --served-model-name",
    ),
    "blob": (f"/api/blobs/{SHA}", "model", "verbatim serve --model FILE"),
    "not served": (
        "/api/chat",
        f'{{ "model": "deepseek-r1", "messages": [{BLUE}], "think": true }}',
        "--served-model-name",
    ),
}


def served(*flags: str, engine: str | None, random_seeds: bool = False) -> Iterator[Live]:
    flags = (*FLAGS, "--max-output-tokens", "100", *flags)
    live = Live(*flags, engine=engine, random_seeds=random_seeds).wait_ready()
    yield live
    check_ledger(live.wait_at_rest())
    assert live.stop() == 0, live.log_text()


@pytest.fixture(scope="module")
def quick() -> Iterator[Live]:
    yield from served(engine="pipeline")


@pytest.fixture(scope="module")
def model(default_model: Path) -> Iterator[Live]:
    """Greedy defaults: the examples give no seed, and are sent as they are."""
    flags = ("--model", str(default_model), "--pooling", "mean", "--defaults", "greedy")
    yield from served(*flags, engine=None, random_seeds=True)


def send(live: Live, name: str) -> list[dict[str, Any]]:
    """The lines of the answer to an example."""
    path, kind, body, member = ANSWERED[name]
    answer = live.client.post(path, content=body, headers={"content-type": kind})
    assert answer.status_code == 200, answer.text
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert all(member in line for line in lines)
    return lines


@pytest.mark.parametrize("name", ANSWERED)
def test_ollamas_examples_are_answered_in_the_documented_shape(quick: Live, name: str) -> None:
    lines = send(quick, name)
    path, _, body, _ = ANSWERED[name]
    if path in ("/api/generate", "/api/chat"):
        streamed = json.loads(body).get("stream", True) and "load" not in name
        assert (len(lines) > 1) == streamed
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        assert lines[-1]["model"] == json.loads(body)["model"]
        assert lines[-1]["done_reason"] in ("stop", "length", "load")
        assert "load" in name or lines[-1]["eval_count"] > 0
    if name == "options":
        named = {warning.partition(":")[0] for warning in lines[-1]["warnings"]}
        assert "options.num_thread" in named


@pytest.mark.parametrize("name", REFUSED)
def test_ollamas_examples_that_are_not_served_are_refused_by_name(quick: Live, name: str) -> None:
    path, body, named = REFUSED[name]
    answer = quick.client.post(path, content=body, headers={"content-type": CURL})
    assert answer.status_code in (400, 404)
    assert named in answer.json()["error"]


def test_ollamas_lists_and_its_other_methods(quick: Live) -> None:
    for path, member in LISTS.items():
        assert quick.client.get(path).json()[member]
    assert [m["name"] for m in quick.client.get("/api/tags").json()["models"]][-9:] == list(MODELS)
    refused = quick.client.request("DELETE", "/api/delete", content='{ "model": "llama3:13b" }')
    assert (refused.status_code, "verbatim rm NAME" in refused.json()["error"]) == (404, True)
    assert quick.client.head(f"/api/blobs/{SHA}").status_code == 404, "Ollama's: it does not exist"


def test_ollamas_examples_make_sense_on_the_default_model(model: Live) -> None:
    (made,) = send(model, "chat, structured")
    assert json.loads(made["message"]["content"])["age"] == 22
    lines = send(model, "chat, seed")
    assert lines[0]["message"]["content"] == "Hello"
    assert lines[-1]["done_reason"] == "stop"
    (made,) = send(model, "structured")
    cut = made["done_reason"] == "length"
    assert cut or {"age", "available"} <= set(json.loads(made["response"]))
    near, far = ("Why is the sky blue?", "What makes the sky blue?"), "def main(): return 7"
    vectors = model.client.post(
        "/api/embed", json={"model": "all-minilm", "input": [*near, far]}
    ).json()["embeddings"]
    alike, unlike = (sum(x * y for x, y in zip(vectors[0], v, strict=True)) for v in vectors[1:])
    assert alike > unlike


def test_a_request_without_a_seed_gets_a_random_one(model: Live) -> None:
    """A server with a fake engine counts its seeds."""
    seeds = {model.complete("x", max_tokens=1, seed=None)["seed"] for _ in range(4)}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**53 for seed in seeds)
    assert max(seeds) > 2**40


def test_openais_quick_start(quick: Live) -> None:
    """The SDK as the quick start calls it, then curl."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{quick.url}/v1", api_key="any")
    response = client.responses.create(
        model="gpt-5.5", input="Write a short bedtime story about a unicorn."
    )
    assert response.output_text
    assert client.responses.create(
        model="gpt-5.5", previous_response_id=response.id, input="Write another one."
    ).output_text
    chat = client.chat.completions.create(
        model="gpt-4.1",
        messages=[
            {"role": "developer", "content": "You are a helpful assistant."},
            {"role": "user", "content": "Hello!"},
        ],
    )
    assert chat.choices[0].message.content
    streamed = client.responses.create(
        model="gpt-5.5",
        input=[{"role": "user", "content": "Say 'double bubble bath' ten times fast."}],
        stream=True,
    )
    kinds = [event.type for event in streamed]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    answer = httpx.post(
        f"{quick.url}/v1/responses",
        headers={"Content-Type": JSON, "Authorization": "Bearer any"},
        content='{ "model": "gpt-5.5", "input": "Write a short bedtime story about a unicorn." }',
        timeout=HANG_SECONDS,
    )
    assert answer.json()["output"][0]["content"][0]["type"] == "output_text"


class CalendarEvent(BaseModel):
    name: str
    date: str
    participants: list[str]


def test_openais_guide_to_structured_outputs(model: Live) -> None:
    """responses.parse and chat.completions.parse on the default model."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{model.url}/v1", api_key="any")
    system, user = (
        "Extract the event information.",
        "Alice and Bob are going to a science fair on Friday.",
    )
    parsed = client.responses.parse(
        model="gpt-5.5",
        input=[{"role": "system", "content": system}, {"role": "user", "content": user}],
        text_format=CalendarEvent,
    ).output_parsed
    assert parsed is not None
    chat = client.chat.completions.parse(
        model="gpt-4.1",
        messages=[{"role": "system", "content": system}, {"role": "user", "content": user}],
        response_format=CalendarEvent,
    )
    assert chat.choices[0].message.parsed == parsed
    assert parsed.date == "Friday"
    assert {"Alice", "Bob"} <= {parsed.name, *parsed.participants}
