"""bench/determinism.py: one answer of our own server, and a server that differs is found."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from types import ModuleType

import httpx
import pytest
from live_server import Live


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[2] / "bench" / "determinism.py"
    spec = importlib.util.spec_from_file_location("determinism_bench", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_our_server_has_one_answer_in_a_crowd(bench: ModuleType, fake: Live) -> None:
    words = ["--url", f"{fake.url}/v1", "--model", "m", "--copies", "12", "--others", "6"]
    found = await bench.run(bench.arguments([*words, "--tokens", "9", "--open", "8"]))
    assert set(found) == {"temperature 0", "temperature 1"}
    for one in found.values():
        assert (one["copies"], one["distinct"], one["most_frequent"]) == (12, 1, 12)
        assert one["equal_characters"] == one["characters"] > 0


async def test_another_answer_is_counted(bench: ModuleType) -> None:
    """A server whose every fifth answer differs after the fourth character."""
    numbers = itertools.count()

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        other = body["prompt"] == bench.PROMPT and next(numbers) % 5 == 0
        return httpx.Response(200, json={"choices": [{"text": "sameX" if other else "same"}]})

    words = ["--url", "http://server/v1", "--copies", "10", "--others", "3", "--tokens", "4"]
    found = await bench.run(bench.arguments(words), httpx.MockTransport(answer))
    assert found["temperature 0"]["distinct"] == 2
    assert found["temperature 0"]["most_frequent"] == 8
    assert found["temperature 0"]["equal_characters"] == 4


async def test_a_refused_request_ends_the_run(bench: ModuleType) -> None:
    refuse = httpx.MockTransport(lambda _: httpx.Response(429, text="the queue is full"))
    with pytest.raises(RuntimeError, match="429 the queue is full"):
        await bench.run(bench.arguments(["--copies", "1", "--others", "0"]), refuse)
