"""LoRA adapters over HTTP: chosen by `model` or `adapter`, listed, with a fingerprint of their own
and a prefix cache of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from live_server import Live

pytestmark = pytest.mark.server
ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    server = Live("--adapter", "sql=unused", "--lora", "fr=unused", engine="hash,adapters=sql+fr")
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


def test_every_protocol_takes_the_name(live: Live) -> None:
    base, adapted = (
        [
            live.post("/v1/chat/completions", {"messages": ASK, **body}).json()["choices"],
            live.post("/v1/responses", {"input": "hi", **body}).json()["output"][0]["content"],
            live.post("/v1/messages", {"messages": ASK, **body}).json()["content"],
            live.post(
                "/api/chat",
                {
                    "messages": ASK,
                    "stream": False,
                    "options": {"num_predict": 4, "seed": 1},
                    "model": body["model"],
                },
            ).json()["message"],
            live.post("/v1/embeddings", {"input": "hi", "model": body["model"]}).json()["data"],
        ]
        for body in (
            {"model": name, "seed": 1, "max_tokens": 32, "max_output_tokens": 32}
            for name in ("m", "sql")
        )
    )
    for one, other in zip(base, adapted, strict=True):
        assert one != other


def test_models_are_listed_with_their_parent(live: Live) -> None:
    listed = live.client.get("/v1/models").json()["data"]
    assert [(m["id"], m.get("parent")) for m in listed] == [("m", None), ("sql", "m"), ("fr", "m")]
    assert len({m["fingerprint"] for m in listed}) == 3
    assert live.client.get("/v1/models/sql").json() == listed[1]


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
