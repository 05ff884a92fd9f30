"""Sampling defaults over HTTP: the protocol's where the model states none, each with its origin."""

from __future__ import annotations

import json
from typing import Any

import pytest

TALK = {"messages": [{"role": "user", "content": "hi"}], "stream": False}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": TALK,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {**TALK, "max_tokens": 4},
    "/api/chat": TALK,
    "/api/generate": {"prompt": "hi", "stream": False},
}


@pytest.mark.parametrize("route", BODIES)
def test_a_response_reports_the_parameters_in_force_on_request(fake: Any, route: str) -> None:
    body = {**BODIES[route]}
    plain = fake.post(route, body).json()
    assert "params" not in plain, "only on request"
    params = fake.post(route, {**body, "report_params": True}).json()["params"]
    ollama = route.startswith("/api/")
    expected = {"value": 0.8, "origin": "protocol: ollama"}
    assert params["temperature"] == (expected if ollama else {"value": 1.0, "origin": "default"})
    assert params["top_k"]["value"] == (40 if ollama else 0)
    assert params["seed"]["origin"] == "server: random"
    lengths = {"/v1/messages": (4, "request"), "/v1/completions": (16, "protocol: openai")}
    value, origin = lengths.get(route, (512, "server: --max-output-tokens"))
    assert params["max_tokens"] == {"value": value, "origin": origin}


def test_a_given_value_is_the_requests(fake: Any) -> None:
    options = {"temperature": 1.0, "seed": 7, "num_predict": 3}
    body = {**TALK, "report_params": True, "options": options}
    params = fake.post("/api/chat", body).json()["params"]
    for name, value in {"temperature": 1.0, "seed": 7, "max_tokens": 3}.items():
        assert params[name] == {"value": value, "origin": "request"}


def test_a_receipt_holds_the_protocols_defaults(fake: Any) -> None:
    options = {"num_predict": 3, "seed": 1}
    body = {"prompt": "hi", "stream": False, "raw": True, "options": options}
    without = fake.post("/api/generate", body).json()
    given = {**options, "temperature": 0.8, "top_k": 40, "top_p": 0.9}
    assert (
        fake.post("/api/generate", {**body, "options": given}).json()["response"]
        == (without["response"])
    )


def test_the_documentation_example_of_ollama_answers_and_stops(real: Any) -> None:
    """curl -d '{"model": ..., "messages": [{"role": "user", "content": "hi"}], "stream": false}'"""
    body = {**TALK, "report_params": True}
    answer = real.post("/api/chat", body).json()
    assert answer["done_reason"] == "stop"
    assert answer["eval_count"] < 200, "8,161 tokens at temperature 1"
    params = answer["params"]
    assert params["temperature"] == {"value": 0.2, "origin": "model: catalog"}
    assert params["top_p"] == {"value": 0.9, "origin": "model: catalog"}
    assert params["top_k"] == {"value": 40, "origin": "protocol: ollama"}
    assert params["on_loop"]["value"] == "stop"


def test_the_models_route_shows_the_defaults(real: Any) -> None:
    sampling = real.client.get("/v1/models/m").json()["sampling"]
    assert sampling["temperature"] == {"value": 0.2, "origin": "model: catalog"}
    assert sampling["top_k"] == {"value": 0, "origin": "default"}


def test_the_lens_shows_the_defaults_of_the_model(real: Any) -> None:
    parameters = real.client.get("/lens/api/info").json()["parameters"]
    for name, value in {"temperature": 0.2, "top_p": 0.9}.items():
        assert (parameters[name]["default"], parameters[name]["origin"]) == (
            value,
            "model: catalog",
        )
    assert (parameters["top_k"]["default"], parameters["top_k"]["origin"]) == (0, "default")
    assert parameters["on_loop"]["default"] == "stop"


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_without_usage_reports_the_parameters_too(fake: Any, route: str) -> None:
    body = {**BODIES[route], "stream": True, "max_tokens": 2, "report_params": True}
    lines = fake.post(route, body).text.split("\n\n")
    events = [line[6:] for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    last = json.loads(events[-1])
    assert last["choices"] == []
    assert "usage" not in last, "the client did not ask for it"
    assert last["params"]["max_tokens"] == {"value": 2, "origin": "request"}


def test_llama_cpp_clients_see_the_parameters_in_force(real: Any) -> None:
    body = {"prompt": "hi", "n_predict": 2, "min_p": 0.1}
    answer = real.client.post("/completion", json={**body, "report_params": True}).json()
    settings = answer["generation_settings"]
    assert (settings["temperature"], settings["top_p"], settings["min_p"]) == (0.2, 0.9, 0.1)
    assert settings["n_predict"] == 2
    assert answer["params"]["temperature"] == {"value": 0.2, "origin": "model: catalog"}
    assert answer["params"]["max_tokens"] == {"value": 2, "origin": "request"}
    shown = real.client.get("/props").json()["default_generation_settings"]["params"]
    assert (shown["temperature"], shown["top_p"], shown["repeat_penalty"]) == (0.2, 0.9, 1.0)
    assert shown["n_predict"] == -1


def test_ollamas_show_lists_the_parameters_of_the_model(real: Any) -> None:
    parameters = real.post("/api/show", {}).json()["parameters"]
    assert [line.split() for line in parameters.splitlines()] == [
        ["temperature", "0.2"],
        ["top_p", "0.9"],
    ]
