"""LoRA adapters over HTTP: chosen by `model` or `adapter`, listed, with a fingerprint of their own
and a prefix cache of their own. One that computes NaN fails its own requests only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import Live
from streams import stream

pytestmark = pytest.mark.server
BELL = 7  # the token whose values are NaN
ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    server = Live(
        "--adapter",
        "sql=unused",
        "--lora",
        "fr=unused",
        engine=f"pipeline,adapters=sql+fr,broken={BELL}",
    )
    yield server.wait_ready()
    assert server.stop() == 0, server.log_text()


def complete(live: Live, **body: Any) -> dict[str, Any]:
    fixed = {"prompt": "a prompt of two blocks " * 2, "max_tokens": 8, "seed": 1}
    answer = live.post("/v1/completions", {**fixed, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_the_model_name_or_the_field_chooses_the_adapter(live: Live) -> None:
    base = complete(live)
    named = complete(live, model="sql")
    field = complete(live, adapter="sql")
    other = complete(live, model="fr:latest")
    texts = [found["choices"][0]["text"] for found in (base, named, field, other)]
    assert texts[1] == texts[2]
    assert len(set(texts)) == 3
    assert [named["model"], other["model"]] == ["sql", "fr"]
    prints = [found["system_fingerprint"] for found in (base, named, field, other)]
    assert prints[1] == prints[2]
    assert len(set(prints)) == 3
    # the field repeats the prompt that the name has cached; the others share nothing
    cached = [
        found["usage"]["prompt_tokens_details"]["cached_tokens"]
        for found in (base, named, field, other)
    ]
    assert cached[2] > 0 == cached[0] == cached[1] == cached[3]


# route -> (body without the model, where the answer is)
PROTOCOLS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": ASK, "max_tokens": 32, "seed": 1}, "choices"),
    "/v1/responses": ({"input": "hi", "max_output_tokens": 32, "temperature": 0}, "output"),
    "/v1/messages": ({"messages": ASK, "max_tokens": 32, "temperature": 0}, "content"),
    "/api/chat": (
        {"messages": ASK, "stream": False, "options": {"num_predict": 32, "seed": 1}},
        "message",
    ),
    "/v1/embeddings": ({"input": "hi"}, "data"),
    "/v1/score": ({"prompt": "hello"}, "data"),
}


@pytest.mark.parametrize("route", PROTOCOLS)
def test_every_protocol_takes_the_name(route: str, live: Live) -> None:
    body, where = PROTOCOLS[route]
    answers = [live.post(route, {**body, "model": name}) for name in ("m", "sql", "sql")]
    assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text
    base, adapted, again = (without_ids(answer.json()[where]) for answer in answers)
    assert base != adapted == again
    assert answers[1].json().get("model", "sql") == "sql"


@pytest.mark.parametrize("route", PROTOCOLS)
def test_a_request_whose_values_are_not_finite_gets_an_error_of_its_own(
    route: str, live: Live
) -> None:
    body, _ = PROTOCOLS[route]
    bell = json.loads(
        json.dumps(body).replace('"hi"', '"hi\\u0007 you"').replace("hello", "a\\u0007b")
    )
    answer = live.post(route, {**bell, "model": "sql"})
    assert answer.status_code == 500, answer.text
    assert "not finite numbers (NaN or infinity) at position" in answer.text
    assert "the adapter sql or the model file is broken" in answer.text
    assert live.post(route, {**body, "model": "sql"}).status_code == 200


def test_a_stream_whose_values_are_not_finite_ends_with_an_error_event(live: Live) -> None:
    before = live.wait_at_rest()["verbatim_requests_not_finite_total"]
    body = {"prompt": [1, BELL], "max_tokens": 8, "stream": True}
    failed = asyncio.run(stream(live.port, "/v1/completions", body))
    (error,) = failed.errors
    assert (error["type"], error["code"]) == ("server_error", "not_finite")
    assert error["message"].startswith("model m: the model computed values that are not finite")
    assert live.wait_at_rest()["verbatim_requests_not_finite_total"] == before + 1


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2, "echo": True, "logprobs": 1},
        {"n": 2, "best_of": 3},
        {"num_beams": 2, "temperature": 0},
        {"prompt": [[1, 2], [1, BELL]]},
    ],
)
def test_several_choices_whose_values_are_not_finite(more: dict[str, Any], live: Live) -> None:
    body = {"prompt": [1, BELL, 2], "max_tokens": 4, **more}
    failed = live.post("/v1/completions", body)
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "not_finite")
    assert live.post("/v1/completions", {**body, "prompt": [1, 2]}).status_code == 200


def test_an_embedding_whose_values_are_not_finite(live: Live) -> None:
    failed = live.post("/v1/embeddings", {"input": ["a", "a\u0007b"]})
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "not_finite")
    assert live.post("/v1/embeddings", {"input": ["a", "ab"]}).status_code == 200


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_ids(item) for key, item in value.items() if key != "id"}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


def test_models_are_listed_with_their_parent(live: Live) -> None:
    listed = live.client.get("/v1/models").json()["data"]
    parents = {m["id"]: m.get("parent") for m in listed}
    assert [parents["m"], parents["sql"], parents["fr"]] == [None, "m", "m"]
    assert len({m["fingerprint"] for m in listed}) == 3
    assert live.client.get("/v1/models/sql").json() in listed
    for m in listed:
        shown = live.post("/api/show", {"model": m["id"]}).json()["model_info"]
        assert shown["general.fingerprint"] == m["fingerprint"]


def test_an_unknown_or_contradicting_adapter_is_refused_by_name(live: Live) -> None:
    def error(**body: Any) -> dict[str, Any]:
        answer = live.post("/v1/completions", {"prompt": "x", "max_tokens": 1, **body})
        assert answer.status_code in (400, 404)
        found: dict[str, Any] = answer.json()["error"]
        return found

    assert error(model="nosuch")["param"] == "model"
    unknown = error(adapter="nosuch")
    assert unknown["param"] == "adapter"
    assert "loaded are sql, fr" in unknown["message"]
    assert error(model="sql", adapter="fr")["param"] == "adapter"
