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
# "answered": name -> path, content type, body, the member of each line that holds the output;
# "refused": what this server does not do, and what its error names
_FILE = Path(__file__).parents[1] / "data" / "ollama_examples.json"
EXAMPLES: dict[str, dict[str, dict[str, str]]] = json.loads(_FILE.read_text("utf-8"))
ANSWERED, REFUSED = EXAMPLES["answered"], EXAMPLES["refused"]
LISTS = {"/api/tags": "models", "/api/ps": "models", "/api/version": "version"}


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
    asked = ANSWERED[name]
    headers = {"content-type": asked["type"]}
    answer = live.client.post(asked["path"], content=asked["body"], headers=headers)
    assert answer.status_code == 200, answer.text
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert all(asked["member"] in line for line in lines)
    return lines


@pytest.mark.parametrize("name", ANSWERED)
def test_ollamas_examples_are_answered_in_the_documented_shape(quick: Live, name: str) -> None:
    lines = send(quick, name)
    path, body = ANSWERED[name]["path"], ANSWERED[name]["body"]
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
    asked = REFUSED[name]
    answer = quick.client.post(asked["path"], content=asked["body"], headers={"content-type": CURL})
    assert answer.status_code in (400, 404)
    assert asked["names"] in answer.json()["error"]


def test_ollamas_lists_and_its_other_methods(quick: Live) -> None:
    for path, member in LISTS.items():
        assert quick.client.get(path).json()[member]
    assert [m["name"] for m in quick.client.get("/api/tags").json()["models"]][-9:] == list(MODELS)
    refused = quick.client.request("DELETE", "/api/delete", content='{ "model": "llama3:13b" }')
    assert (refused.status_code, "verbatim rm NAME" in refused.json()["error"]) == (404, True)
    assert quick.client.head(REFUSED["blob"]["path"]).status_code == 404, (
        "Ollama's: it does not exist"
    )


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
