"""Load it, cut it, kill it: nothing is lost or leaked. Sizes here fit two busy cores; the soak versions are the issue's own."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from live_server import Live, check_ledger
from streams import request_bytes, stream

pytestmark = [pytest.mark.server, pytest.mark.timeout(280)]


def completion(tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": "hello", "max_tokens": tokens, "ignore_eos": True, "seed": 7, "stream": True, **more}


@pytest.fixture
def serve() -> Iterator[Any]:
    started: list[Live] = []

    def start(*flags: str, engine: str = "hash", **more: Any) -> Live:
        started.append(Live(*flags, engine=engine, **more))
        return started[-1].wait_ready()

    yield start
    for live in started:
        if live.process.poll() is None:
            live.stop(signal.SIGKILL)


def inside(pid: int) -> tuple[int, int]:
    """(open files, threads) of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


# ----------------------------------------------------------------------------------------------------------------- load


async def many(live: Live, count: int, tokens: int) -> None:
    """The engine is frozen until every stream has its head: they are all open at once, and the pipe between the processes is full."""
    opened, all_open = 0, asyncio.Event()
    gate = asyncio.Semaphore(1000)  # on their way to their head; the kernel's queue of 4,096 new connections is not under test

    def head_came() -> None:
        nonlocal opened
        opened += 1
        gate.release()
        if opened == count:
            all_open.set()

    async def one(i: int) -> Any:
        await gate.acquire()
        got = await stream(live.port, "/v1/completions", completion(tokens, seed=i % 7), on_head=head_came)
        if not got.head:
            gate.release()
        return got

    engine = live.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    running = [asyncio.create_task(one(i)) for i in range(count)]
    await asyncio.wait((asyncio.ensure_future(all_open.wait()), *running), return_when=asyncio.FIRST_COMPLETED)
    os.kill(engine, signal.SIGCONT)
    texts = set()
    for i, got in enumerate(await asyncio.gather(*running)):
        assert got.status == 200, got.head
        assert got.events[-1] == "[DONE]"
        assert got.whole
        assert not got.errors
        texts.add((i % 7, got.text))
    assert opened == count
    assert len(texts) == 7  # the same request, the same answer, however many others there were


def check_many(serve: Any, count: int) -> None:
    room = ("--max-queue", str(2 * count), "--max-waiting", str(2 * count))
    live = serve(*room, "--keepalive-seconds", "0.4", "--engine-silence-seconds", "600")
    uvloop.run(many(live, count, 12))
    numbers = live.wait_at_rest(120)
    check_ledger(numbers)
    assert numbers['verbatim_requests_ended_total{state="length"}'] == count
    assert live.stop() == 0


def test_a_thousand_streams_at_once_lose_nothing(serve: Any) -> None:
    check_many(serve, 1000)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ten_thousand_streams_at_once_lose_nothing(serve: Any) -> None:
    check_many(serve, 10_000)


def test_beyond_the_queue_429_with_retry_after_and_the_accepted_are_served(serve: Any) -> None:
    live = serve("--max-queue", "8", "--max-per-key", "0", engine="hash,pause=0.005")

    async def flood() -> list[Any]:
        return await asyncio.gather(*(stream(live.port, "/v1/completions", completion(40)) for _ in range(80)))

    done = asyncio.run(flood())
    served = [g for g in done if g.status == 200]
    refused = [g for g in done if g.status == 429]
    assert len(served) + len(refused) == 80
    assert len(served) >= 8
    assert refused
    assert all("retry-after: " in g.head.lower() and g.errors[0]["code"] == "overloaded" for g in refused)
    assert all(g.events[-1] == "[DONE]" and g.finished for g in served)
    check_ledger(live.wait_at_rest())


def test_one_key_cannot_take_all_the_room(serve: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first-key-1\nsecond-key-2\n")
    live = serve("--max-per-key", "4", "--api-key-file", str(tmp_path / "keys"), engine="hash,pause=0.01")

    async def both() -> tuple[list[Any], Any]:
        greedy = [
            asyncio.create_task(stream(live.port, "/v1/completions", completion(60), key="first-key-1")) for _ in range(12)
        ]
        await asyncio.sleep(0.3)
        other = await stream(live.port, "/v1/completions", completion(5), key="second-key-2")
        return await asyncio.gather(*greedy), other

    greedy, other = asyncio.run(both())
    assert other.status == 200
    assert other.finished
    codes = [g.errors[0]["code"] for g in greedy if g.status == 429]
    assert codes == ["key_overloaded"] * 8


# --------------------------------------------------------------------------------------------------------- disconnects


async def storm(port: int, count: int, seed: int) -> None:
    """Clients that leave: before the answer, after some events, in a whole answer, or never."""
    rng = random.Random(seed)
    gate = asyncio.Semaphore(64)

    async def one() -> None:
        async with gate:
            kind = rng.randrange(6)
            body = completion(
                rng.randrange(1, 60), prompt="x" * rng.randrange(1, 400), seed=rng.randrange(50), n=rng.choice([1, 1, 3])
            )
            if kind == 0:
                await stream(port, "/v1/completions", body, leave_after=-1)
            elif kind in (1, 2):
                await stream(port, "/v1/completions", body, leave_after=rng.randrange(1, 20))
            elif kind == 3:
                await leave_whole(port, {**body, "stream": False}, rng.random() * 0.05)
            elif kind == 4:
                await leave_half_sent(port, body, rng)
            else:
                got = await stream(port, "/v1/completions", body)
                assert got.status in (200, 429), got.head

    await asyncio.gather(*(one() for _ in range(count)))


async def leave_whole(port: int, body: dict[str, Any], after: float) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes("/v1/completions", body))
    await asyncio.sleep(after)
    writer.transport.abort()


async def leave_half_sent(port: int, body: dict[str, Any], rng: random.Random) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    data = request_bytes("/v1/completions", body)
    writer.write(data[: rng.randrange(len(data))])
    await asyncio.sleep(0.005)
    writer.transport.abort()


def check_disconnects(live: Live, rounds: int, each: int) -> None:
    pids = (live.process.pid, live.engine_pid())
    asyncio.run(storm(live.port, each // 4, 0))  # so that pools and caches are what they will be
    live.wait_at_rest()
    before = [inside(pid) for pid in pids]
    for seed in range(rounds):
        asyncio.run(storm(live.port, each, seed + 1))
    numbers = live.wait_at_rest()
    check_ledger(numbers)
    assert numbers["verbatim_blocks_used"] == 0
    assert numbers["verbatim_engine_restarts_total"] == 0
    for pid, (files, threads) in zip(pids, before, strict=True):
        now = inside(pid)
        assert now[0] <= files + 2
        assert now[1] <= threads + 4  # a pool may not have been full before


def test_disconnects_at_random_phases_leak_nothing(serve: Any) -> None:
    live = serve("--max-queue", "1000", engine="hash,pause=0.001")
    check_disconnects(live, 1, 500)
    assert live.stop() == 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_disconnects_leak_nothing(serve: Any) -> None:
    live = serve("--max-queue", "1000", engine="hash,pause=0.001")
    check_disconnects(live, 10, 1000)
    assert live.stop() == 0


def test_a_disconnect_frees_the_request_at_once_streamed_or_not(serve: Any) -> None:
    """A request that would run for minutes is gone from the engine right after its client, and counts as cancelled."""
    live = serve(engine="hash,pause=0.05")
    asyncio.run(stream(live.port, "/v1/completions", completion(3000), leave_after=2))
    asyncio.run(leave_whole(live.port, completion(3000, stream=False), 0.4))
    numbers = live.wait_at_rest(10)
    assert numbers['verbatim_requests_ended_total{state="cancel"}'] == 2
    check_ledger(numbers)


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_resident_memory_is_flat_over_fifty_thousand_requests(serve: Any) -> None:
    live = serve(
        "--max-queue", "1000", "--kv-memory", "2M"
    )  # a cache that is soon full: its table of prefixes grows until then
    sizes = []
    for part in range(6):
        for seed in range(10):
            asyncio.run(storm(live.port, 840, 1000 * part + seed))
        live.wait_at_rest()
        sizes.append(resident(live.process.pid) + resident(live.engine_pid()))
    assert max(sizes[1:]) < sizes[0] + (8 << 20), sizes


def test_a_reader_that_does_not_read_is_cut_and_costs_bounded_memory(serve: Any) -> None:
    live = serve("--max-stream-bytes", "200000", "--max-output-tokens", "0", engine="pipeline")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", live.port))
    sock.sendall(request_bytes("/v1/completions", completion(1200, n=8, logprobs=20, explain=20)))
    answer = live.complete("neighbour")["choices"]
    end = time.monotonic() + 90
    name = 'verbatim_requests_ended_total{state="slow_reader"}'
    while live.metrics().get(name, 0) == 0:
        assert time.monotonic() < end, "the slow reader was not cut"
        time.sleep(0.2)
    assert live.complete("neighbour")["choices"] == answer
    live.wait_at_rest(40)
    sock.close()
    assert resident(live.process.pid) < 250 << 20


def test_a_slow_but_steady_reader_gets_everything(serve: Any) -> None:
    live = serve()

    async def slowly() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
        writer.write(request_bytes("/v1/completions", completion(20)))
        out = b""
        while piece := await reader.read(40):
            out += piece
            await asyncio.sleep(0.001)
        writer.close()
        return out

    assert b"data: [DONE]" in asyncio.run(slowly())


# ------------------------------------------------------------------------------------------------------ the engine dies


def kill_engine(live: Live, times: int) -> None:
    first = live.complete("probe", max_tokens=24)["choices"]
    for _ in range(times):

        async def under_load() -> list[Any]:
            running = [asyncio.create_task(stream(live.port, "/v1/completions", completion(2000))) for _ in range(16)]
            await asyncio.sleep(0.5)
            os.kill(live.engine_pid(), signal.SIGKILL)
            begun = time.monotonic()
            done = await asyncio.wait_for(asyncio.gather(*running), 30)
            assert time.monotonic() - begun < 5
            return done

        for got in asyncio.run(under_load()):
            assert got.status in (200, 503)
            assert got.errors
            assert got.errors[0]["code"] in ("engine_died", "unavailable")
        assert live.client.get("/health/live").status_code == 200  # HTTP was never down
        refused = live.post("/v1/completions", {"prompt": "x"})
        assert refused.status_code in (200, 503)
        assert refused.status_code == 200 or "retry-after" in refused.headers
        live.wait_ready()
        assert live.complete("probe", max_tokens=24)["choices"] == first


def test_a_killed_engine_costs_an_error_and_comes_back(serve: Any) -> None:
    live = serve("--backoff-seconds", "0.1", engine="hash,pause=0.01")
    kill_engine(live, 2)
    numbers = live.wait_at_rest()
    assert numbers["verbatim_engine_restarts_total"] == 2
    ended = sum(v for k, v in numbers.items() if k.startswith("verbatim_requests_ended_total"))
    assert ended == numbers["verbatim_requests_opened_total"]
    assert live.stop() == 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_an_engine_killed_fifty_times(serve: Any) -> None:
    live = serve("--backoff-seconds", "0.01", "--backoff-limit", "0.2", engine="hash,pause=0.01")
    kill_engine(live, 50)
    numbers = live.wait_at_rest()
    assert numbers["verbatim_engine_restarts_total"] == 50
    ended = sum(v for k, v in numbers.items() if k.startswith("verbatim_requests_ended_total"))
    assert ended == numbers["verbatim_requests_opened_total"]
    assert live.stop() == 0


def test_a_frozen_engine_is_noticed_killed_and_replaced(serve: Any) -> None:
    live = serve("--engine-silence-seconds", "2", "--backoff-seconds", "0.1", engine="hash,pause=0.01")
    frozen = live.engine_pid()
    os.kill(frozen, signal.SIGSTOP)
    got = asyncio.run(stream(live.port, "/v1/completions", completion(50)))
    assert got.errors[0]["code"] == "engine_died"
    live.wait_ready()
    assert live.engine_pid() != frozen
    assert live.complete()["choices"]


def test_no_engine_outlives_a_killed_server(serve: Any) -> None:
    live = serve()
    child = live.engine_pid()
    live.stop(signal.SIGKILL)
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text():
            return
        time.sleep(0.05)
    raise AssertionError("the engine process is still there")


# --------------------------------------------------------------------------------------------------------------- drain


def test_sigterm_with_200_streams_ends_each_and_leaves_no_child(serve: Any) -> None:
    live = serve("--max-queue", "400", engine="hash,pause=0.01")
    child = live.engine_pid()

    async def draining() -> tuple[list[Any], Any]:
        running = [asyncio.create_task(stream(live.port, "/v1/completions", completion(60))) for _ in range(200)]
        while live.metrics()["verbatim_http_open_requests"] < 200:
            await asyncio.sleep(0.05)
        os.kill(live.process.pid, signal.SIGTERM)
        await asyncio.sleep(0.2)
        late = await stream(live.port, "/v1/completions", completion(5))
        return await asyncio.gather(*running), late

    done, late = asyncio.run(draining())
    assert late.status == 503
    assert "retry-after: " in late.head.lower()
    assert all(g.status == 200 and g.finished and g.events[-1] == "[DONE]" and g.whole for g in done)
    assert live.process.wait(30) == 0, live.said()
    assert not Path(f"/proc/{child}").exists()


def test_a_drain_that_takes_too_long_ends_streams_with_an_error_event(serve: Any) -> None:
    live = serve("--drain-seconds", "0.5", engine="hash,pause=0.02")

    async def draining() -> list[Any]:
        running = [asyncio.create_task(stream(live.port, "/v1/completions", completion(3000))) for _ in range(20)]
        await asyncio.sleep(1)
        os.kill(live.process.pid, signal.SIGTERM)
        return await asyncio.gather(*running)

    for got in asyncio.run(draining()):
        assert got.errors[0]["code"] == "unavailable"
        assert got.events[-1] == "[DONE]"
        assert got.whole
    assert live.process.wait(30) == 0, live.said()


# ---------------------------------------------------------------------------------------------------------------- time


def test_requests_heads_and_silence_have_their_limits(serve: Any) -> None:
    live = serve(
        "--request-seconds",
        "1",
        "--header-seconds",
        "0.5",
        "--body-seconds",
        "0.5",
        "--keepalive-seconds",
        "0.2",
        engine="hash,pause=0.4",
    )
    got = asyncio.run(stream(live.port, "/v1/completions", completion(500)))
    assert got.errors[0]["code"] == "timeout"
    assert got.comments >= 1  # keep-alives in the silence between two steps
    late = live.post("/v1/completions", completion(500, stream=False))
    assert (late.status_code, late.json()["error"]["code"]) == (408, "timeout")
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: loc")
        assert sock.recv(100) == b""  # a head that does not come is not waited for
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        assert b" 408 " in sock.recv(1000)
    check_ledger(live.wait_at_rest())


# --------------------------------------------------------------------------------------------------------------- start


def run_serve(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "verbatim", "serve", "--port", "0", *words], capture_output=True, text=True, timeout=60
    )


def test_a_server_that_cannot_start_says_why_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00 and then nonsense")
    done = run_serve("--model", str(broken))
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith("verbatim: ")
    open_door = run_serve("--host", "0.0.0.0", "--test-engine", "hash")
    assert open_door.returncode == 2
    assert "key" in open_door.stderr
    (tmp_path / "empty").write_text("\n")
    assert run_serve("--api-key-file", str(tmp_path / "empty"), "--test-engine", "hash").returncode == 2
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        clash = run_serve("--port", str(taken.getsockname()[1]), "--test-engine", "hash")
    assert clash.returncode != 0
    assert "cannot listen" in clash.stderr
