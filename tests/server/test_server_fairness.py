"""Shares of the API keys, over HTTP: a key with many open requests delays another key's first token
by a few steps of the engine. The test lets the engine run one counted step after the other."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from live_server import Gate, Live
from streams import request_bytes

from eventually import HANG_SECONDS

pytestmark = pytest.mark.server

BESIDE_ONE = 2  # steps to bob's first token beside one request: the one in progress, and his own
LATER = 5  # further steps that he may wait for other keys, however many requests they have


class Client:
    """One stream."""

    def __init__(self, live: Live, key: str, prompt: int, output: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", live.port), timeout=HANG_SECONDS)
        self._answer = b""
        fields = {"max_tokens": output, "min_tokens": output, "stream": True, "seed": 1}
        body = {"prompt": [1 + len(key) % 7, *[3] * (prompt - 1)], **fields}
        self._socket.sendall(request_bytes("/v1/completions", body, key))

    def wait_for(self, text: bytes) -> None:
        while text not in self._answer:
            self._answer += self._socket.recv(65536) or pytest.fail(f"closed: {self._answer!r}")

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("gate") / "steps")


# (places, tokens per step). At a depth of 10 tokens, attention is half the cost of the fake model:
# 36 tokens for each of twenty keys need a large step beside 256 decoded tokens.
@pytest.fixture(scope="module", params=[(32, 512), (256, 2048)], ids=["32 places", "256 places"])
def keyed(request: pytest.FixtureRequest, gate: Gate) -> Iterator[Live]:
    gate.steps = 0
    gate.allow(0)
    keys = gate.path.with_name("keys")
    keys.write_text("".join(f"key-number-{n}\n" for n in range(20)))
    places, tokens = map(str, request.param)
    flags = ("--api-key-file", str(keys), "--max-running", places, "--step-tokens", tokens)
    flags += ("--max-queue", "2000", "--no-prefix-cache")  # each test computes its prompts
    live = Live(*flags, engine=f"hash,gate={gate.path}")
    live.client.headers["Authorization"] = "Bearer key-number-0"
    yield live.wait_ready()
    assert live.stop() == 0


@pytest.mark.parametrize(
    ("keys", "requests"), [(1, 1), (1, 120), (19, 20)], ids=["one request", "two keys", "20 keys"]
)
def test_the_requests_of_other_keys_delay_a_first_token_by_at_most_five_steps(
    keyed: Live, gate: Gate, keys: int, requests: int
) -> None:
    steps = int(keyed.metrics()["verbatim_steps_total"])
    others = [
        Client(keyed, f"key-number-{key}", 200, 100)
        for _ in range(requests)
        for key in range(1, keys + 1)
    ]
    keyed.wait_for("verbatim_requests_open", len(others))
    keyed.barrier()
    gate.allow(6)
    keyed.wait_for("verbatim_steps_total", steps + 6)
    bob = Client(keyed, "key-number-0", 36, 8)
    bob.wait_for(b"\r\n\r\n")  # the engine has it
    gate.allow(BESIDE_ONE if keys == requests == 1 else BESIDE_ONE + LATER)
    bob.wait_for(b'"text"')
    for client in (bob, *others):
        client.close()
    gate.open()
    gate.steps = int(keyed.wait_at_rest()["verbatim_steps_total"])
    gate.allow(0)
