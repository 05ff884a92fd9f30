"""Requests that arrive while the model is loaded for the first time: they wait, up to a limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from eventually import eventually_async
from verbatim.server.app import make_app
from verbatim.server.process.supervisor import Supervisor
from verbatim.server.server_state import State
from verbatim.server.settings import Settings

pytestmark = pytest.mark.server
BODY = {"model": "m", "prompt": "hi", "max_tokens": 2, "seed": 1}


class App:
    """The application without a socket; its engine starts when a test says so."""

    def __init__(self, **settings: Any) -> None:
        self.supervisor = Supervisor(
            Settings(test_engine="pipeline", served_names=("m",), **settings)
        )
        self.state = State(self.supervisor.settings, self.supervisor)
        self.app = make_app(self.state)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://localhost"
        )

    def post(self, path: str, **body: Any) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.client.post(path, json=body))

    async def waiting(self, count: int) -> None:
        async def waits() -> bool:
            return self.state.open == count

        await eventually_async(waits, f"{self.state.open} of {count} requests are open")


@pytest.fixture
async def loading() -> AsyncIterator[App]:
    app = App()
    yield app
    await app.supervisor.close()
    await app.client.aclose()


async def test_requests_of_every_protocol_wait_for_the_model(loading: App) -> None:
    whole = loading.post("/v1/completions", **BODY)
    stream = loading.post("/v1/completions", **BODY, stream=True)
    chat = loading.post(
        "/api/chat", model="m", messages=[{"role": "user", "content": "hi"}], stream=False
    )
    lens = asyncio.create_task(loading.client.get("/lens/api/info"))
    await loading.waiting(4)
    health = await loading.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "loading")
    loading.supervisor.start()
    assert (await whole).json()["choices"][0]["text"]
    assert (await stream).text.endswith("data: [DONE]\n\n")
    assert (await chat).json()["load_duration"] > 0
    assert (await lens).status_code == 200
    assert (await loading.post("/v1/completions", **BODY)).json()["choices"]
    assert loading.state.open == 0


async def test_what_describes_the_model_waits_for_it(loading: App) -> None:
    gets = [
        asyncio.create_task(loading.client.get(path))
        for path in ("/api/tags", "/props", "/tokenizer_info")
    ]
    show = loading.post("/api/show", model="m")
    assert (await loading.client.get("/api/version")).status_code == 200
    loading.supervisor.start()
    tags, props, _ = [(await answer).json() for answer in gets]
    assert tags["models"][0]["details"]["family"] == (await show).json()["details"]["family"] != ""
    assert props["default_generation_settings"]["n_ctx"] > 0


async def test_a_prompt_of_token_ids_has_the_limit_of_the_loaded_model(loading: App) -> None:
    """A limit on the values of a body grows with the model's context."""
    ids = [7] * (loading.state.limits.max_json_values + 1)
    waits = loading.post("/v1/completions", model="m", prompt=ids)
    await loading.waiting(1)
    loading.supervisor.start()
    late = await loading.post("/v1/completions", model="m", prompt=ids)
    assert (await waits).json()["error"]["code"] == late.json()["error"]["code"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_drain_ends_the_wait(loading: App, stream: bool) -> None:
    waits = loading.post("/v1/completions", **BODY, stream=stream)
    await loading.waiting(1)
    loading.state.admission.draining.set()
    answer = await waits
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
    assert "shutting down" in answer.json()["error"]["message"]


async def test_the_wait_has_a_limit() -> None:
    app = App(load_wait_seconds=0.0)
    answer = await app.post("/v1/completions", **BODY)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert "still being loaded" in answer.json()["error"]["message"]
    assert app.state.open == 0


async def test_a_client_that_disconnects_is_dropped(loading: App) -> None:
    gone = asyncio.Event()
    first = True

    async def receive() -> dict[str, Any]:
        nonlocal first
        if first:
            first = False
            return {
                "type": "http.request",
                "body": b'{"model": "m", "prompt": "hi"}',
                "more_body": False,
            }
        await gone.wait()
        return {"type": "http.disconnect"}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/completions"}
    task = asyncio.create_task(
        loading.app({**scope, "headers": headers, "query_string": b""}, receive, send)
    )
    await loading.waiting(1)
    gone.set()
    await task
    assert loading.state.open == 0
    assert sent[0]["status"] == 499
