"""Shares of the queue per key, and request bodies that do not arrive: no key, and no number of slow
senders, keeps other requests out."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from live_server import Live, check_ledger
from streams import request_bytes, stream

from eventually import HANG_SECONDS, eventually_async
from verbatim.base.errors import ParameterError
from verbatim.server.settings import Limits

pytestmark = pytest.mark.server
QUEUE = 40
OPEN, UNFINISHED = "verbatim_http_open_requests", "verbatim_http_unfinished_bodies"
BODY = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True, "seed": 7, "stream": True}


@pytest.fixture
def keys(tmp_path: Path) -> list[str]:
    made = [f"key-of-tenant-{n}" for n in range(20)]
    (tmp_path / "keys").write_text("\n".join(made))
    return made


def start(tmp_path: Path, key: str, *flags: str, **more: Any) -> Live:
    flags = ("--api-key-file", str(tmp_path / "keys"), *flags)
    live = Live(*flags, engine=more.pop("engine", "hash"), **more).wait_ready()
    live.client.headers["authorization"] = f"Bearer {key}"
    return live


# ------------------------------------------------------------------------------ shares of the queue


@pytest.mark.parametrize("tenants", [2, 20])
def test_no_key_is_refused_below_its_share_of_a_full_queue(
    tenants: int, keys: list[str], tmp_path: Path
) -> None:
    """Keys come one after the other, and each opens one request more than it may. With n keys in
    the queue a key is refused only if it has queue size / n requests open."""
    gate = tmp_path / "gate"
    gate.write_text("0")  # no step runs, so no request ends
    live = start(tmp_path, keys[0], "--max-queue", str(QUEUE), engine=f"hash,gate={gate}")
    shares = [ceil(QUEUE / n) for n in range(1, tenants + 1)]

    async def fill() -> list[list[Any]]:
        asked: list[list[asyncio.Task[Any]]] = []
        for number, share in enumerate(shares):
            asked.append([])
            for count in range(share + 1):
                one = stream(live.port, "/v1/completions", BODY, key=keys[number])
                task = asyncio.create_task(one)
                asked[-1].append(task)
                expected = sum(shares[:number]) + min(count + 1, share)

                async def counted(task: Any = task, expected: int = expected) -> bool:
                    return task.done() or (await metrics(live))[OPEN] == expected

                await eventually_async(counted, "the request is neither admitted nor refused")
        assert (await metrics(live))[OPEN] == sum(shares)
        # The first key holds more than its share now, so it gets no further place.
        asked[0].append(
            asyncio.create_task(stream(live.port, "/v1/completions", BODY, key=keys[0]))
        )
        await asyncio.wait(asked[0][-1:])
        gate.write_text(str(1 << 40))
        return [await asyncio.gather(*tasks) for tasks in asked]

    done = asyncio.run(fill())
    refused = [sum(got.status == 429 for got in each) for each in done]
    assert refused == [2, *[1] * (tenants - 1)]
    assert [sum(got.finished for got in each) for each in done] == shares
    codes = {e["code"] for each in done for got in each if got.status == 429 for e in got.errors}
    assert codes == {"overloaded"}
    assert live.metrics()["verbatim_requests_refused_total"] == sum(refused)
    check_ledger(live.wait_at_rest())
    assert live.stop() == 0, live.log_text()


async def metrics(live: Live) -> dict[str, float]:
    return await asyncio.to_thread(live.metrics)


# -------------------------------------------------------------------------- bodies that do not come


class Sender:
    """Sends a request whose body stops after some bytes."""

    def __init__(self, live: Live, key: str, sent: int, **body: Any) -> None:
        data = request_bytes("/v1/completions", {**BODY, "stream": False, **body}, key)
        sent += data.index(b"\r\n\r\n") + 4
        self._rest = data[sent:]
        self._sock = socket.create_connection(("127.0.0.1", live.port), timeout=HANG_SECONDS)
        live.send_and_wait(self._sock, data[:sent])

    def send(self, live: Live, count: int) -> None:
        live.send_and_wait(self._sock, self._rest[:count])
        self._rest = self._rest[count:]

    def finish(self) -> tuple[int, bytes]:
        with contextlib.suppress(OSError):
            self._sock.sendall(self._rest)
        return self.answer()

    def answer(self) -> tuple[int, bytes]:
        out = b""
        with self._sock, contextlib.suppress(ConnectionResetError):
            while piece := self._sock.recv(65536):
                out += piece
        return int(out.split(b" ", 2)[1]), out

    def waits(self) -> bool:
        """No byte of an answer has come."""
        self._sock.setblocking(False)
        try:
            return not self._sock.recv(1, socket.MSG_PEEK) and False
        except BlockingIOError:
            return True
        finally:
            self._sock.settimeout(HANG_SECONDS)


@pytest.fixture
def slow(keys: list[str], tmp_path: Path) -> Iterator[Live]:
    """A clocked server with 8 places for requests and 400 KB for unfinished bodies."""
    live = start(
        tmp_path,
        keys[1],
        *("--max-queue", "8", "--max-body-bytes", "250000", "--max-unfinished-bytes", "400000"),
        clock=True,
    )
    yield live
    check_ledger(live.wait_at_rest())
    assert live.stop() == 0, live.log_text()


def test_an_unfinished_body_holds_no_place_in_the_queue(keys: list[str], tmp_path: Path) -> None:
    live = start(tmp_path, keys[1], "--max-queue", "8", clock=True)
    senders = [Sender(live, keys[0], 1) for _ in range(60)]
    live.complete()  # another key asks
    assert live.metrics()[UNFINISHED] == 60
    assert live.metrics()[OPEN] == 0
    live.client.headers["authorization"] = f"Bearer {keys[0]}"
    live.complete()  # the same key asks
    assert {sender.finish()[0] for sender in senders} == {200}
    assert live.metrics()[UNFINISHED] == 0
    check_ledger(live.wait_at_rest())
    assert live.stop() == 0, live.log_text()


def test_the_key_with_most_unfinished_bodies_loses_its_oldest(slow: Live, keys: list[str]) -> None:
    """A body counts as 64 KiB at least: six of them fit in 400 KB."""
    bob = Sender(slow, keys[1], 1)
    alice = [Sender(slow, keys[0], 1) for _ in range(7)]
    assert slow.metrics()[UNFINISHED] == 6
    for sender in alice[:2]:
        status, data = sender.answer()
        assert (status, b"max-unfinished-bytes" in data) == (429, True)
    assert slow.metrics()["verbatim_requests_refused_total"] == 2
    assert all(sender.waits() for sender in alice[2:])
    assert [sender.finish()[0] for sender in (bob, *alice[2:])] == [200] * 6


def test_unfinished_bodies_are_bounded_in_bytes(slow: Live, keys: list[str]) -> None:
    text = "x" * 240_000
    bob = Sender(slow, keys[1], 1)
    first = Sender(slow, keys[0], 1, prompt=text)
    second = Sender(slow, keys[0], 1, prompt=text)
    first.send(slow, 150_000)
    assert slow.metrics()[UNFINISHED] == 3
    second.send(slow, 240_000)
    assert first.answer()[0] == 429
    assert second.finish()[0] == 400  # it arrived whole, and is longer than the context
    assert bob.finish()[0] == 200


def test_a_body_needs_a_minimum_rate(slow: Live, keys: list[str]) -> None:
    """1,024 bytes per second after the first ten seconds."""
    idle, steady = (Sender(slow, keys[0], 1, prompt="x" * 60_000) for _ in range(2))
    steady.send(slow, 20 * 1024)
    slow.advance(9.9)
    assert idle.waits()
    slow.advance(0.2)
    status, data = idle.answer()
    assert (status, b"min-body-rate" in data) == (408, True)
    slow.advance(19.8)
    assert steady.waits()
    slow.advance(0.2)
    assert steady.answer()[0] == 408


def test_one_body_fits_in_the_room_for_unfinished_ones() -> None:
    with pytest.raises(ParameterError, match="max_body_bytes"):
        Limits(max_body_bytes=1000, max_unfinished_bytes=999)
