"""Load, disconnects, engine crashes, drain and timeouts: no request is lost and nothing leaks.
Sizes fit two busy cores; the soak tests are larger."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from live_server import (
    NEVER,
    Gate,
    Live,
    check_ledger,
    check_log,
    has_ended,
    report,
    resident,
    uncounted_usage,
)
from streams import request_bytes, stream

from eventually import HANG_SECONDS, eventually, eventually_async

pytestmark = pytest.mark.server


def completion(tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt": "hello",
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": 7,
        "stream": True,
        **more,
    }


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


@contextlib.contextmanager
def frozen_engine(live: Live) -> Iterator[int]:
    """The engine process is stopped (SIGSTOP) in the context: no request can end."""
    engine = live.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        yield engine
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, signal.SIGCONT)


async def until_done(tasks: Iterable[asyncio.Task[Any]], count: int) -> None:
    async def enough() -> bool:
        return sum(task.done() for task in tasks) >= count

    await eventually_async(enough, f"fewer than {count} requests have ended")


async def until_metric(live: Live, name: str, value: float) -> None:
    await asyncio.to_thread(live.wait_for, name, value)


def inside(pid: int) -> tuple[int, int]:
    """(open files, threads) of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


# -------------------------------------------------------------------------------------------- load


async def many(live: Live, count: int, tokens: int) -> Counter[str]:
    """The engine is frozen until every stream has its head, so all are open at once and the socket
    between the processes is full. Returns the usage reported to clients."""
    opened, all_open = 0, asyncio.Event()
    # waiting for their head; stays below the kernel's backlog of 4,096 connections
    gate = asyncio.Semaphore(1000)

    def head_came() -> None:
        nonlocal opened
        opened += 1
        gate.release()
        if opened == count:
            all_open.set()

    async def one(i: int) -> Any:
        await gate.acquire()
        body = completion(tokens, seed=i % 7, stream_options={"include_usage": True})
        got = await stream(live.port, "/v1/completions", body, on_head=head_came)
        if not got.head:
            gate.release()
        return got

    with frozen_engine(live):
        running = [asyncio.create_task(one(i)) for i in range(count)]
        await asyncio.wait(
            (asyncio.ensure_future(all_open.wait()), *running), return_when=asyncio.FIRST_COMPLETED
        )
    texts, used = set(), Counter[str]()
    for i, got in enumerate(await asyncio.gather(*running)):
        assert got.status == 200, got.head
        assert got.events[-1] == "[DONE]"
        assert got.whole
        assert not got.errors
        texts.add((i % 7, got.text))
        usage = got.events[-2]["usage"]
        used.update(prompt=usage["prompt_tokens"], output=usage["completion_tokens"])
    assert opened == count
    assert len(texts) == 7  # the same request gives the same answer at any load
    return used


def check_many(serve: Any, count: int) -> None:
    room = ("--max-queue", str(2 * count), "--max-waiting", str(2 * count))
    live = serve(*room, "--keepalive-seconds", "0.4", "--engine-silence-seconds", "600")
    used = uvloop.run(many(live, count, 12))
    report(f"{count} streams open at once, none dropped")
    numbers = live.wait_at_rest()
    check_ledger(numbers)
    assert {kind: numbers[f"verbatim_{kind}_tokens_total"] for kind in used} == used
    assert numbers['verbatim_requests_ended_total{state="length"}'] == count
    assert live.stop() == 0


def test_three_hundred_streams_at_once_lose_nothing(serve: Any) -> None:
    check_many(serve, 300)


@pytest.mark.soak
def test_a_thousand_streams_at_once_lose_nothing(serve: Any) -> None:
    check_many(serve, 1000)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ten_thousand_streams_at_once_lose_nothing(serve: Any) -> None:
    check_many(serve, 10_000)


def test_a_full_queue_answers_429_with_retry_after_and_serves_the_admitted(serve: Any) -> None:
    live = serve("--max-queue", "8", "--max-per-key", "0")

    async def flood() -> list[Any]:
        with frozen_engine(live):  # so that none of the first 8 ends
            asked = [
                asyncio.create_task(stream(live.port, "/v1/completions", completion(40)))
                for _ in range(80)
            ]
            await until_done(asked, 72)
        return await asyncio.gather(*asked)

    done = asyncio.run(flood())
    served = [g for g in done if g.status == 200]
    refused = [g for g in done if g.status == 429]
    assert (len(served), len(refused)) == (8, 72)
    assert all(
        "retry-after: " in g.head.lower() and g.errors[0]["code"] == "overloaded" for g in refused
    )
    assert all(g.events[-1] == "[DONE]" and g.finished for g in served)
    check_ledger(live.wait_at_rest())


def test_max_per_key_leaves_capacity_for_other_keys(serve: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first-key-1\nsecond-key-2\n")
    live = serve("--max-per-key", "4", "--api-key-file", str(tmp_path / "keys"))
    live.client.headers["authorization"] = "Bearer second-key-2"

    async def both() -> tuple[list[Any], Any]:
        def ask(key: str) -> asyncio.Task[Any]:
            return asyncio.create_task(
                stream(live.port, "/v1/completions", completion(60), key=key)
            )

        with frozen_engine(live):
            greedy = [ask("first-key-1") for _ in range(12)]
            await until_done(greedy, 8)
            other = ask("second-key-2")
            await until_metric(live, "verbatim_http_open_requests", 5)
        return await asyncio.gather(*greedy), await other

    greedy, other = asyncio.run(both())
    assert other.status == 200
    assert other.finished
    codes = [g.errors[0]["code"] for g in greedy if g.status == 429]
    assert codes == ["key_overloaded"] * 8
    assert sum(g.finished for g in greedy) == 4


# ------------------------------------------------------------------------------------- disconnects


async def storm(port: int, count: int, seed: int) -> int:
    """Clients that disconnect before the answer, after some events, in a whole answer, or never.
    Returns the number of disconnects."""
    rng = random.Random(seed)
    left = 0
    gate = asyncio.Semaphore(64)

    async def one() -> None:
        nonlocal left
        async with gate:
            kind = rng.randrange(6)
            left += kind != 5
            body = completion(
                rng.randrange(1, 60),
                prompt="x" * rng.randrange(1, 400),
                seed=rng.randrange(50),
                n=rng.choice([1, 1, 3]),
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
    return left


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


TASKS = ("verbatim_http_tasks", "verbatim_engine_tasks")


def check_disconnects(live: Live, count: int, each: int) -> None:
    """Storms of `each` clients until `count` have disconnected."""
    pids = (live.process.pid, live.engine_pid())
    asyncio.run(storm(live.port, each // 4, 0))  # warm up pools and caches
    calm = live.wait_at_rest()
    before, left, seed = [inside(pid) for pid in pids], 0, 0
    while left < count:
        seed += 1
        left += asyncio.run(storm(live.port, each, seed))
    numbers = live.wait_at_rest()
    check_ledger(numbers)
    lines = check_log(live)
    assert numbers["verbatim_blocks_used"] == 0
    assert [numbers[name] for name in TASKS] == [calm[name] for name in TASKS]

    def nothing_left() -> list[tuple[int, int]] | None:
        """No more open files than before. More threads are allowed: asyncio's pool may still grow
        to 32."""
        after = [inside(pid) for pid in pids]
        leaked = any(
            now[0] > was[0] or now[1] > was[1] + 32 for was, now in zip(before, after, strict=True)
        )
        return None if leaked else after

    after = eventually(
        nothing_left, lambda: f"{before} before, {[inside(pid) for pid in pids]} after"
    )
    report(
        f"{left} disconnects, {lines} lines in the log: "
        f"blocks used {numbers['verbatim_blocks_used']:.0f} of {numbers['verbatim_blocks']:.0f}; "
        f"(files, threads) of HTTP and engine {before} before, {after} after; "
        f"tasks {[numbers[name] for name in TASKS]}, as before"
    )


def test_disconnects_at_random_phases_leak_nothing(serve: Any) -> None:
    live = serve("--max-queue", "1000", engine="hash,pause=0.001")
    check_disconnects(live, 160, 200)
    assert live.stop() == 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_disconnects_leak_nothing(serve: Any) -> None:
    live = serve("--max-queue", "1000", engine="hash,pause=0.001")
    check_disconnects(live, 10_000, 1000)
    assert live.stop() == 0


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.timeout(3600)
def test_a_thousand_disconnects_from_a_model_leak_nothing(serve: Any, default_model: Path) -> None:
    live = serve("--max-queue", "1000", "--model", str(default_model), engine=None)
    check_disconnects(live, 1000, 300)
    assert live.stop() == 0


def test_a_disconnect_frees_the_request_at_once_streamed_or_not(serve: Any, tmp_path: Path) -> None:
    """The gate allows steps for two tokens and then one more, so both requests end by the
    disconnect."""
    gate = Gate(tmp_path / "steps")
    live = serve(engine=f"hash,gate={gate.path}")

    async def leave_one(streamed: bool) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", live.port)
        writer.write(request_bytes("/v1/completions", completion(3000, stream=streamed)))
        await until_metric(live, "verbatim_requests_open", 1)
        gate.allow(2)
        writer.transport.abort()

    for left, streamed in enumerate((True, False), 1):
        asyncio.run(leave_one(streamed))
        gate.wait_until_left(live, left)
    check_ledger(live.wait_at_rest())


def test_embeddings_are_scheduled_fairly_and_aborted_on_disconnect(
    serve: Any, tmp_path: Path
) -> None:
    """128 embeddings of one key: another key's request runs between them, and all are aborted when
    their client disconnects."""
    (tmp_path / "keys").write_text("first-key-1\nsecond-key-2\n")
    gate = Gate(tmp_path / "steps")
    live = serve(
        "--api-key-file",
        str(tmp_path / "keys"),
        "--max-running",
        "4",
        engine=f"hash,gate={gate.path}",
    )
    live.client.headers["authorization"] = "Bearer second-key-2"
    opened = "verbatim_requests_opened_total"

    async def leave_one() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", live.port)
        writer.write(request_bytes("/v1/embeddings", {"input": ["x" * 60] * 128}, "first-key-1"))
        await until_metric(live, opened, 128)
        other = asyncio.create_task(
            stream(live.port, "/v1/completions", completion(1), key="second-key-2")
        )
        await until_metric(live, opened, 129)
        await asyncio.to_thread(live.barrier)
        gate.allow(6)  # of the 32 or so that the embeddings need
        assert (await asyncio.wait_for(other, HANG_SECONDS)).finished
        writer.transport.abort()

    asyncio.run(leave_one())
    eventually(
        lambda: live.metrics()["verbatim_http_open_requests"] == 0,
        "HTTP does not notice that the client left",
    )
    live.barrier()
    gate.open()
    numbers = live.wait_at_rest()
    assert numbers['verbatim_requests_ended_total{state="cancel"}'] > 64
    check_ledger(numbers)


@pytest.fixture(scope="module")
def limited() -> Iterator[Live]:
    """A server with a manual clock and every timeout set."""
    live = Live(
        *("--request-seconds", "600", "--header-seconds", "20"),
        *("--body-seconds", "60", "--keepalive-seconds", "15"),
        engine="hash",
        clock=True,
    ).wait_ready()
    yield live
    assert live.stop() == 0, live.log_text()


def test_embeddings_obey_the_request_timeout(limited: Live) -> None:
    live, answers = limited, list[Any]()

    def ask() -> None:
        answers.append(live.post("/v1/embeddings", {"input": ["x" * 500] * 128}))

    with httpx.Client(base_url=live.url, timeout=HANG_SECONDS) as other, frozen_engine(live):
        asking = threading.Thread(target=ask)
        asking.start()
        eventually(
            lambda: "\nverbatim_requests_open 128\n" in other.get("/metrics").text,
            "the embeddings do not begin",
        )
        live.advance(600 - 0.1)
        assert "\nverbatim_http_open_requests 1\n" in other.get("/metrics").text
        live.advance(0.2)
        asking.join()
    (late,) = answers
    assert (late.status_code, late.json()["error"]["code"]) == (408, "timeout")
    check_ledger(live.wait_at_rest())


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_resident_memory_is_flat_over_fifty_thousand_requests(serve: Any) -> None:
    # a small KV cache: its prefix table grows until the cache is full
    live = serve("--max-queue", "1000", "--kv-memory", "2M")
    sizes: list[list[int]] = []
    for part in range(6):  # the first 10,000 fill the bounded tables
        for seed in range(10):
            asyncio.run(storm(live.port, 1000, 1000 * part + seed))
        check_ledger(live.wait_at_rest())
        sizes.append([resident(live.process.pid), resident(live.engine_pid())])
        report(
            f"after {10_000 * (part + 1)} requests HTTP holds {sizes[-1][0] >> 10} KB, "
            f"the engine {sizes[-1][1] >> 10} KB"
        )
    for process in (0, 1):
        grown = max(each[process] for each in sizes[1:]) - sizes[0][process]
        assert grown < 4 << 20, sizes
    check_log(live)
    assert live.stop() == 0


def test_a_client_that_does_not_read_is_aborted_within_bounded_memory(serve: Any) -> None:
    live = serve("--max-stream-bytes", "200000", "--max-output-tokens", "0", engine="pipeline")
    answer = live.complete("neighbour")["choices"]
    before = resident(live.process.pid)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", live.port))
    sock.sendall(request_bytes("/v1/completions", completion(1200, n=8, logprobs=20, explain=20)))
    assert live.complete("neighbour")["choices"] == answer
    live.wait_for('verbatim_requests_ended_total{state="slow_reader"}', 1)
    assert live.complete("neighbour")["choices"] == answer
    live.wait_at_rest()
    sock.close()
    assert resident(live.process.pid) < before + (64 << 20)


def test_a_slow_but_steady_reader_gets_everything(fake: Live) -> None:
    async def slowly() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", fake.port)
        writer.write(request_bytes("/v1/completions", completion(20)))
        out = b""
        while piece := await reader.read(40):
            out += piece
            await asyncio.sleep(0.001)
        writer.close()
        return out

    assert b"data: [DONE]" in asyncio.run(slowly())


# ---------------------------------------------------------------------------------- engine crashes


class LivenessProbe:
    """Polls /health/live on new connections, to see whether HTTP was ever down."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.asked = 0
        self.failed: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        while not self._over.wait(0.02):
            try:
                with socket.create_connection(
                    ("127.0.0.1", self.port), timeout=HANG_SECONDS
                ) as sock:
                    sock.sendall(
                        b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                    )
                    said = sock.recv(100)
                if b" 200 " not in said[:20]:
                    self.failed.append(repr(said))
            except OSError as error:
                self.failed.append(repr(error))
            self.asked += 1

    def __enter__(self) -> LivenessProbe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


async def kill_under_load(live: Live, after: int, victim: Callable[[Live], int]) -> list[Any]:
    """Run 16 streams and kill a process when `after` of them have started. Returns their
    results."""
    heads = 0

    def head_came() -> None:
        nonlocal heads
        heads += 1

    async def enough() -> bool:
        return heads >= after

    body = completion(3000)
    running = [
        asyncio.create_task(stream(live.port, "/v1/completions", body, on_head=head_came))
        for _ in range(16)
    ]
    await eventually_async(enough, "the streams do not begin")
    os.kill(victim(live), signal.SIGKILL)
    return await asyncio.wait_for(asyncio.gather(*running), HANG_SECONDS)


def kill_engine(live: Live, times: int, victim: Callable[[Live], int] = Live.engine_pid) -> None:
    """Kill the engine, or another process without which it ends."""
    rng, first = random.Random(1), live.complete("probe", max_tokens=24)["choices"]
    cut, lost = 0, {}
    calm = (inside(live.process.pid), live.wait_at_rest()["verbatim_http_tasks"])
    with LivenessProbe(live.port) as pulse:
        for _ in range(times):
            engine = live.engine_pid()
            for got in asyncio.run(kill_under_load(live, rng.randint(1, 16), victim)):
                assert got.status in (200, 503)
                codes = [e["code"] for e in got.errors]
                done = not codes and got.finished  # before the kill
                assert done or codes in (["engine_died"], ["unavailable"])
                assert got.status == 503 or got.events[-1] == "[DONE]"
                assert got.whole
                cut += got.status == 200 and not done
            eventually(lambda pid=engine: has_ended(pid), "the engine does not end")  # type: ignore[misc]
            lost = uncounted_usage(live.metrics())  # before any request to the next engine
            refused = live.post("/v1/completions", {"prompt": "x", "seed": 1})
            assert refused.status_code in (200, 503)
            assert refused.status_code == 200 or "retry-after" in refused.headers
            live.wait_ready()
            assert live.complete("probe", max_tokens=24)["choices"] == first
    assert pulse.failed == []  # HTTP was never down
    assert cut >= times
    numbers = live.wait_at_rest()
    report(
        f"{times} kills, {cut} streams cut; /health/live asked {pulse.asked} times; ended: "
        + ", ".join(
            f"{k.split(chr(34))[1]} {v:.0f}"
            for k, v in numbers.items()
            if k.startswith("verbatim_requests_ended_total")
        )
    )
    check_ledger(numbers, times, lost)

    def nothing_left() -> bool:
        return (inside(live.process.pid), live.metrics()["verbatim_http_tasks"]) == calm

    eventually(nothing_left, "a life that ended leaves something behind")
    check_log(live)
    assert live.stop() == 0


def test_a_killed_engine_fails_its_requests_and_is_restarted(serve: Any) -> None:
    kill_engine(serve("--backoff-seconds", "0.1", engine="hash,pause=0.01", fresh=True), 2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_an_engine_killed_fifty_times(serve: Any) -> None:
    kill_engine(
        serve("--backoff-seconds", "0.01", "--backoff-limit", "0.2", engine="hash,pause=0.01"), 50
    )


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.timeout(3600)
def test_an_engine_with_a_model_killed_fifty_times(serve: Any, default_model: Path) -> None:
    kill_engine(
        serve(
            "--backoff-seconds",
            "0.01",
            "--backoff-limit",
            "0.2",
            "--model",
            str(default_model),
            engine=None,
        ),
        50,
    )


SILENCE = 60.0  # seconds


def test_a_frozen_engine_is_detected_killed_and_replaced(serve: Any) -> None:
    live = serve(
        *("--engine-silence-seconds", str(SILENCE), "--backoff-seconds", "1"),
        clock=True,
        fresh=True,
    )
    frozen, answers = live.engine_pid(), []

    def ask() -> None:
        answers.append(asyncio.run(stream(live.port, "/v1/completions", completion(50))))

    os.kill(frozen, signal.SIGSTOP)
    asking = threading.Thread(target=ask)
    asking.start()
    live.wait_for("verbatim_requests_open", 1)
    live.advance(SILENCE - 1)
    assert (live.engine_pid(), live.metrics()["verbatim_engine_restarts_total"]) == (frozen, 0)
    advance_until(
        live, SILENCE / 2, lambda: not asking.is_alive(), "the frozen engine is not noticed"
    )
    assert answers[0].errors[0]["code"] == "engine_died"
    advance_until(
        live, 1, lambda: live.client.get("/health").status_code == 200, "no engine takes its place"
    )
    assert live.engine_pid() != frozen
    assert live.complete()["choices"]


def advance_until(live: Live, seconds: float, condition: Any, what: str, times: int = 100) -> None:
    """Move the clock repeatedly, at most `times` times: a message in flight may reset a timeout."""
    moves = iter(range(times))

    def moved() -> bool:
        if condition():
            return True
        if next(moves, None) is not None:
            live.advance(seconds)
        return bool(condition())

    eventually(moved, what)


def test_a_server_in_restart_backoff_stops_at_once(serve: Any) -> None:
    """The back-off is 1000 s; the server stops within 10 s of its own clock."""
    live = serve("--backoff-seconds", "1000", "--backoff-limit", "1000", clock=True, fresh=True)
    os.kill(live.engine_pid(), signal.SIGKILL)
    eventually(lambda: "starting it again in 1000" in live.log_text(), live.log_text)
    live.process.send_signal(signal.SIGTERM)
    with contextlib.suppress(
        BrokenPipeError, ValueError
    ):  # it ended between the check and the command
        advance_until(
            live, 0.1, lambda: live.process.poll() is not None, "the server waits for its engine"
        )
    assert live.process.wait(HANG_SECONDS) == 0


def test_no_engine_outlives_a_killed_server(serve: Any) -> None:
    live = serve(fresh=True)
    child = live.engine_pid()
    live.stop(signal.SIGKILL)
    eventually(lambda: has_ended(child), "the engine process is still there")


def test_ctrl_c_in_a_terminal_does_not_reach_the_engine(fake: Live) -> None:
    assert os.getpgid(fake.process.pid) == os.getpgid(0), "the server can be a foreground job"
    assert os.getpgid(fake.engine_pid()) != os.getpgid(fake.process.pid)


# ------------------------------------------------------------------------------------------- drain


def test_sigterm_with_200_streams_ends_each_and_leaves_no_child(serve: Any) -> None:
    live = serve("--max-queue", "400", "--drain-seconds", NEVER, fresh=True)
    child = live.engine_pid()

    async def draining() -> tuple[list[Any], Any]:
        with frozen_engine(live):  # no stream ends before the signal
            running = [
                asyncio.create_task(stream(live.port, "/v1/completions", completion(60)))
                for _ in range(200)
            ]
            await until_metric(live, "verbatim_http_open_requests", 200)
            os.kill(live.process.pid, signal.SIGTERM)
            await asyncio.to_thread(
                eventually, lambda: "draining 200 requests" in live.log_text(), live.log_text
            )
            late = await stream(live.port, "/v1/completions", completion(5))
        return await asyncio.gather(*running), late

    done, late = asyncio.run(draining())
    assert late.status == 503
    assert "retry-after: " in late.head.lower()
    assert all(
        g.status == 200 and g.finished and g.events[-1] == "[DONE]" and g.whole for g in done
    )
    assert live.process.wait(HANG_SECONDS) == 0, live.log_text()
    assert has_ended(child)


@pytest.mark.parametrize("name", ["SIGHUP", "SIGTERM", "SIGINT"])
def test_every_signal_to_end_drains_and_is_logged(serve: Any, name: str) -> None:
    """SIGHUP: the terminal of the server was closed."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    try:
        live = serve("--drain-seconds", NEVER)
    finally:
        signal.signal(signal.SIGHUP, before)

    async def draining() -> Any:
        with frozen_engine(live):  # the stream does not end before the signal
            running = asyncio.create_task(stream(live.port, "/v1/completions", completion(9)))
            await until_metric(live, "verbatim_http_open_requests", 1)
            os.kill(live.process.pid, signal.Signals[name])
            await asyncio.to_thread(
                eventually, lambda: f"{name}: draining 1 request" in live.log_text(), live.log_text
            )
        return await running

    done = asyncio.run(draining())
    assert done.finished
    assert done.whole
    assert live.process.wait(HANG_SECONDS) == 0, live.log_text()


def test_a_server_under_nohup_ignores_sighup(serve: Any) -> None:
    """nohup starts a program with SIGHUP ignored, so that it outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        live = serve()
    finally:
        signal.signal(signal.SIGHUP, before)
    os.kill(live.process.pid, signal.SIGHUP)
    live.complete()
    assert live.stop() == 0
    assert "SIGHUP" not in live.log_text()


def test_a_drain_that_takes_too_long_ends_streams_with_an_error_event(serve: Any) -> None:
    live = serve("--drain-seconds", "30", clock=True)

    async def draining() -> list[Any]:
        with frozen_engine(live):
            running = [
                asyncio.create_task(stream(live.port, "/v1/completions", completion(3000)))
                for _ in range(20)
            ]
            await until_metric(live, "verbatim_http_open_requests", 20)
            os.kill(live.process.pid, signal.SIGTERM)
            await asyncio.to_thread(
                eventually, lambda: "draining 20 requests" in live.log_text(), live.log_text
            )
            live.advance(29.9)
            assert live.metrics()["verbatim_http_open_requests"] == 20
            live.advance(0.2)
            return await asyncio.wait_for(asyncio.gather(*running), HANG_SECONDS)

    for got in asyncio.run(draining()):
        assert got.errors[0]["code"] == "unavailable"
        assert got.status == 503 or got.events[-1] == "[DONE]"
        assert got.whole
    assert live.stop() == 0, live.log_text()


# ---------------------------------------------------------------------------------------- timeouts


def test_request_head_and_keepalive_timeouts(limited: Live) -> None:
    live = limited

    async def two_limits() -> tuple[Any, Any]:
        with frozen_engine(live):
            streamed = asyncio.create_task(stream(live.port, "/v1/completions", completion(500)))
            whole = asyncio.create_task(
                stream(live.port, "/v1/completions", completion(500, stream=False))
            )
            await until_metric(live, "verbatim_requests_open", 2)
            for _ in range(4):
                live.advance(15.1)  # one keep-alive each time: the engine sends nothing
            live.advance(600 - 4 * 15.1 - 0.1)
            assert live.metrics()["verbatim_http_open_requests"] == 2
            live.advance(0.2)
            return await asyncio.wait_for(asyncio.gather(streamed, whole), HANG_SECONDS)

    streamed, whole = asyncio.run(two_limits())
    assert streamed.errors[0]["code"] == "timeout"
    assert streamed.comments >= 2
    assert (whole.status, whole.errors[0]["code"]) == (408, "timeout")
    with socket.create_connection(("127.0.0.1", live.port), timeout=HANG_SECONDS) as sock:
        live.send_and_wait(sock, b"POST /v1/completions HTTP/1.1\r\nHost: loc")
        live.advance(20.1)
        assert sock.recv(100) == b""  # the header timeout closed it
    with socket.create_connection(("127.0.0.1", live.port), timeout=HANG_SECONDS) as sock:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\n"
        )
        live.send_and_wait(sock, head + b"Content-Length: 100\r\n\r\n{")
        live.advance(60.1)
        assert b" 408 " in sock.recv(1000)
    check_ledger(live.wait_at_rest())


STREAMS = {
    "/v1/completions": {"prompt": "x" * 400, "max_tokens": 2},
    "/completion": {"prompt": "x" * 400, "n_predict": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 2},
    "/v1/responses": {"input": "x" * 400, "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 2},
}


def test_a_stream_that_waits_for_its_first_token_gets_keep_alives(
    serve: Any, tmp_path: Path
) -> None:
    """A prefill takes 13 steps or more and stops after four. Every protocol with events sends a
    comment each time its stream was silent for a keep-alive interval; Anthropic's has an event for
    it. --verbose logs the prefill."""
    gate = Gate(tmp_path / "gate")
    live = serve(
        *("--step-tokens", "32", "--keepalive-seconds", "15", "--verbose"),
        engine=f"hash,gate={gate.path}",
        clock=True,
    )

    async def slow() -> list[Any]:
        heads = [asyncio.Event() for _ in STREAMS]
        running = [
            asyncio.create_task(stream(live.port, path, {**body, "stream": True}, on_head=head.set))
            for head, (path, body) in zip(heads, STREAMS.items(), strict=True)
        ]
        gate.allow(4)
        for head in heads:
            await asyncio.wait_for(head.wait(), HANG_SECONDS)
        logged = re.compile(r"request req_\w+: prefill (\d+) of (\d+) tokens")
        found = await asyncio.to_thread(
            eventually, lambda: logged.findall(live.log_text()), live.log_text
        )
        assert all(0 < int(done) <= 128 and 400 < int(tokens) < 600 for done, tokens in found)
        for _ in range(3):
            await asyncio.to_thread(live.advance, 15.1)
        gate.open()
        return await asyncio.wait_for(asyncio.gather(*running), HANG_SECONDS)

    for path, got in zip(STREAMS, asyncio.run(slow()), strict=True):
        assert (got.status, got.whole) == (200, True), path
        pings = [e for e in got.events if e != "[DONE]" and e.get("type") == "ping"]
        assert (got.comments, len(pings)) == ((0, 3) if path == "/v1/messages" else (3, 0)), path
    check_ledger(live.wait_at_rest())


# ------------------------------------------------------------------------------------------- start


def run_serve(*words: str) -> subprocess.CompletedProcess[str]:
    port = () if "--port" in words else ("--port", "0")
    return subprocess.run(
        [sys.executable, "-m", "verbatim", "serve", *port, *words],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00 and then nonsense")
    return path


def test_a_server_that_cannot_start_prints_one_line(broken: Path) -> None:
    done = run_serve("--model", str(broken), "--log-format", "json")
    assert done.returncode == 3
    *logged, last = done.stderr.splitlines()
    assert last.startswith("verbatim: ")
    assert done.stderr.count("metadata count") == 1
    # whatever is logged before the last line is JSON
    assert {json.loads(line)["logger"] for line in logged} <= {"verbatim.server"}


def test_a_server_without_a_key_or_a_free_port_does_not_start(tmp_path: Path) -> None:
    open_door = run_serve("--host", "0.0.0.0", "--test-engine", "hash")
    assert open_door.returncode == 2
    assert "key" in open_door.stderr
    (tmp_path / "empty").write_text("\n")
    assert (
        run_serve("--api-key-file", str(tmp_path / "empty"), "--test-engine", "hash").returncode
        == 2
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        clash = run_serve("--port", str(taken.getsockname()[1]), "--test-engine", "hash")
    assert clash.returncode == 2
    assert "cannot listen" in clash.stderr


def test_a_server_with_a_wrong_certificate_does_not_start(tmp_path: Path, broken: Path) -> None:
    lost = run_serve(
        "--tls-cert", str(broken), "--tls-key", str(tmp_path / "nowhere"), "--test-engine", "hash"
    )
    assert lost.returncode == 2
    assert lost.stderr.startswith("verbatim: --tls-key: cannot read ")
    junk = run_serve("--tls-cert", str(broken), "--tls-key", str(broken), "--test-engine", "hash")
    assert junk.returncode == 2
    assert junk.stderr.startswith("verbatim: --tls-cert: ")
