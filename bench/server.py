"""Server cost and behaviour under load: `python bench/server.py [--model MODEL] [--tokens N]
[--only PART]`.

    overhead  throughput of 16 streams, interleaved: the bare engine (AsyncEngine, in its own
              process) and over HTTP; the share that HTTP costs
    prompt    a long prompt arrives during 16 streams: their time between tokens, with and without
              it, compared with the time of one prefill chunk
    overload  requests arrive at ten times the rate that can be served: latency of a 429, and the
              throughput of the accepted requests

The limit is printed before the result: HTTP cannot be faster than the bare engine. The client
shares the machine with the server, so it does as little as possible (prebuilt requests, events
only counted), and its CPU use is printed too. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "server"))

T = TypeVar("T")
PROMPT = "Tell me a long story about a lighthouse keeper and the sea. "
STREAMS = 16
CHUNK = 512  # tokens per step, the engine's default

BARE = """
import asyncio, json, sys, time
from verbatim.base.params import SamplingParams
from verbatim.engine.calls.async_engine import AsyncEngine
from verbatim.server.process.cpu_affinity import pin_threads, native_threads

async def main(model, prompt, streams, tokens):
    before = native_threads()
    async with AsyncEngine(model, speculate="off") as engine:
        pin_threads(engine, before)  # as the server's engine has it
        async def one(seed):
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed)
            stream = await engine.submit(prompt, params)
            async for _ in stream:
                pass
        await one(0)
        print("ready", flush=True)
        for line in sys.stdin:
            began = time.perf_counter()
            await asyncio.gather(*(one(s) for s in range(streams)))
            print(streams * tokens / (time.perf_counter() - began), flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
"""


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


# --- client


class Exchange:
    """One request: the times of its status and of its events."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.status = 0
        self.answered = 0.0  # seconds to the status line
        self.times: list[float] = []
        self.over: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()


class Client:
    """Plain sockets, reused after a response like the connection pool of a real client. Only the
    status is parsed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[socket.socket] = []
        self._loop = asyncio.get_running_loop()

    def send(self, data: bytes) -> asyncio.Future[Exchange]:
        exchange = Exchange()
        sock = self._idle.pop() if self._idle else self._connect()
        sock.send(data)
        self._loop.add_reader(sock, self._read, sock, exchange)
        return exchange.over

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self._port))
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def _read(self, sock: socket.socket, exchange: Exchange) -> None:
        data, now = sock.recv(1 << 16), time.perf_counter()
        if not data:
            self._loop.remove_reader(sock)
            exchange.over.set_exception(ConnectionError("the server closed a connection"))
            return
        if not exchange.status:
            exchange.status, exchange.answered = int(data[9:12]), now - exchange.began
        exchange.times += [now] * data.count(b"data: {")
        if data.endswith(b"}}" if exchange.status != 200 else b"0\r\n\r\n"):
            self._loop.remove_reader(sock)
            self._idle.append(sock)
            exchange.over.set_result(exchange)

    def close(self) -> None:
        for sock in self._idle:
            sock.close()


def request(tokens: int, seed: int = 0, prompt: str = PROMPT, **more: Any) -> bytes:
    from streams import request_bytes

    body = {
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": seed,
        "stream": True,
        **more,
    }
    return request_bytes("/v1/completions", body).replace(b"Connection: close\r\n", b"")


def run(port: int, work: Callable[[Client], Awaitable[T]]) -> T:
    async def main() -> T:
        client = Client(port)
        try:
            return await work(client)
        finally:
            client.close()

    return uvloop.run(main())


def cpu_seconds(pid: int) -> float:
    """CPU time of a process; 0 without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- overhead


def rate(port: int, tokens: int) -> float:
    async def wave(client: Client) -> float:
        began = time.perf_counter()
        await asyncio.gather(*(client.send(request(tokens, s)) for s in range(STREAMS)))
        return STREAMS * tokens / (time.perf_counter() - began)

    return run(port, wave)


def overhead(model: str, port: int, tokens: int, rounds: int) -> dict[str, float]:
    bare = subprocess.Popen(
        [sys.executable, "-c", BARE, model, PROMPT, str(STREAMS), str(tokens)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert bare.stdin is not None
    assert bare.stdout is not None
    bare.stdout.readline()
    rate(port, 8)
    rates: dict[str, list[float]] = {"bare": [], "http": []}
    for _ in range(rounds):  # interleaved, so that a busy moment affects both
        bare.stdin.write("go\n")
        bare.stdin.flush()
        rates["bare"].append(float(bare.stdout.readline()))
        rates["http"].append(rate(port, tokens))
    bare.stdin.close()
    bare.wait()
    made = {f"{name}_tokens_s": median(values) for name, values in rates.items()}
    made["http_cost"] = 1 - median(
        http / bare for bare, http in zip(rates["bare"], rates["http"], strict=True)
    )
    print(
        f"16 streams: bare engine {made['bare_tokens_s']:.0f} tokens/s (the limit), "
        f"over HTTP {made['http_tokens_s']:.0f}: "
        f"HTTP costs {made['http_cost']:.1%} (at most 10 %)"
    )
    return made


# --- long prompt


SALT = "chunk"
# Each is one token, as "sea" is.
TAILS = ("sky", "sun", "boat", "wind", "night", "storm", "rain", "sand")


async def chunk_seconds(client: Client, long: int, turn: int) -> float:
    """Seconds of the last chunk of a long prompt alone, the most expensive one. All before it is
    a prefix hit; the first word of the chunk makes it new."""
    words = "sea " * (long - CHUNK) + TAILS[turn % len(TAILS)] + " " + "sea " * (CHUNK - 2)
    began = time.perf_counter()
    await client.send(request(1, prompt=words, cache_salt=SALT))
    return time.perf_counter() - began


async def gaps_around(client: Client, tokens: int, long: int) -> tuple[list[float], list[float]]:
    """Times between the tokens of 16 streams, before a prompt of `long` tokens arrives and
    during its prefill."""
    streams = [client.send(request(tokens, s)) for s in range(STREAMS)]
    await asyncio.sleep(1.0)
    began = time.perf_counter()
    await client.send(request(1, prompt="sea " * long, cache_salt=str(began)))
    end = time.perf_counter()
    # Without the first token, which waits for the prefill of the others.
    pairs = [
        pair for exchange in await asyncio.gather(*streams) for pair in pairwise(exchange.times[1:])
    ]
    calm = [b - a for a, b in pairs if b < began]
    return calm, [b - a for a, b in pairs if a < end and b >= began]


def long_prompt(port: int, tokens: int, long: int, rounds: int) -> dict[str, Any]:
    """A chunk alone and the same chunks among streams, interleaved, because the machine's speed
    changes."""

    async def turns(client: Client) -> list[tuple[float, float, float]]:
        await client.send(request(1, prompt="sea " * (long - CHUNK), cache_salt=SALT))
        found = []
        for turn in range(rounds):
            chunk = await chunk_seconds(client, long, turn)
            calm, stirred = await gaps_around(client, max(tokens, 200), long)
            found.append((chunk, quantile(calm, 0.99), quantile(stirred, 0.99)))
        return found

    found = run(port, turns)
    chunk, calm, stirred = (median(column) for column in zip(*found, strict=True))
    share = median((s - c) / k for k, c, s in found)
    print(
        f"a prompt of {long} tokens among them: its last chunk alone takes {chunk * 1e3:.0f} ms "
        f"(the limit of the rise); p99 between tokens {calm * 1e3:.0f} ms before it, "
        f"{stirred * 1e3:.0f} ms during its prefill: a rise of {share:.1%} of that chunk"
    )
    return {
        "calm_p99_s": calm,
        "stirred_p99_s": stirred,
        "chunk_s": chunk,
        "rise_share_of_chunk": share,
        "turns": [[round(value, 4) for value in each] for each in found],
    }


# --- overload


class Crowd:
    """STREAMS closed-loop clients, each sending a request as soon as its last one is answered:
    the capacity. While `flood` is above 0, `flood` requests per second arrive besides, at random
    times and whatever becomes of the earlier ones."""

    def __init__(self, client: Client, tokens: int) -> None:
        self.flood = 0.0
        self.found: list[Exchange] = []
        self._client = client
        self._bodies = itertools.cycle([request(tokens, seed) for seed in range(64)])
        self._open = True
        self._tasks = [asyncio.create_task(self._slot()) for _ in range(STREAMS)]
        self._tasks.append(asyncio.create_task(self._arrivals()))

    def _send(self) -> asyncio.Future[Exchange]:
        future = self._client.send(next(self._bodies))
        future.add_done_callback(lambda done: self.found.append(done.result()))
        return future

    async def _slot(self) -> None:
        while self._open:
            if (await self._send()).status == 429:
                await asyncio.sleep(0.05)

    async def _arrivals(self) -> None:
        rng, due = random.Random(7), time.perf_counter()
        while self._open:
            due = max(due + rng.expovariate(self.flood or 20.0), time.perf_counter() - 0.1)
            await asyncio.sleep(due - time.perf_counter())
            if self.flood:
                self._send()

    async def close(self) -> None:
        self._open = False
        await asyncio.gather(*self._tasks)


async def in_turns(
    client: Client, tokens: int, rounds: int, seconds: float, pids: dict[str, int]
) -> dict[str, Any]:
    """Calm and flood interleaved, so that changes of the machine's speed affect both."""
    crowd = Crowd(client, tokens)
    await asyncio.sleep(3)  # until every slot is taken
    windows: list[tuple[float, float]] = []
    cores: dict[str, list[float]] = {name: [] for name in pids}
    for turn in range(2 * rounds):
        served = (
            sum(len(a.times) for a in crowd.found) / (time.perf_counter() - crowd.found[0].began)
            if crowd.found
            else 300.0
        )
        crowd.flood = 10 * served / tokens if turn % 2 else 0.0
        before, began = {n: cpu_seconds(pid) for n, pid in pids.items()}, time.perf_counter()
        await asyncio.sleep(seconds)
        windows.append((began, time.perf_counter()))
        for name, pid in pids.items():
            cores[name].append((cpu_seconds(pid) - before[name]) / seconds)
    crowd.flood = 0.0
    await crowd.close()
    rates = [
        sum(a <= t < b for exchange in crowd.found for t in exchange.times) / (b - a)
        for a, b in windows
    ]
    refused = [exchange.answered for exchange in crowd.found if exchange.status == 429]
    return {
        "calm_tokens_s": median(rates[::2]),
        "flooded_tokens_s": median(rates[1::2]),
        "share": median(flooded / calm for calm, flooded in batched(rates)),
        "refused_s": len(refused) / (rounds * seconds),
        "refusal_p50_s": quantile(refused, 0.5),
        "refusal_p99_s": quantile(refused, 0.99),
        "calm_cores": {name: median(values[::2]) for name, values in cores.items()},
        "flooded_cores": {name: median(values[1::2]) for name, values in cores.items()},
        "rates": [round(r) for r in rates],
    }


def batched(values: list[float]) -> list[tuple[float, float]]:
    return list(zip(values[::2], values[1::2], strict=True))


def overload(
    port: int, tokens: int, pids: dict[str, int], seconds: float, rounds: int
) -> dict[str, Any]:
    made = run(port, lambda client: in_turns(client, tokens, rounds, seconds, pids))
    cores = [
        ", ".join(f"{n} {c:.2f}" for n, c in made[f"{when}_cores"].items())
        for when in ("calm", "flooded")
    ]
    print(
        f"10 x capacity ({10 * made['calm_tokens_s'] / tokens:.0f} requests/s): "
        f"{made['flooded_tokens_s']:.0f} tokens/s after a calm of {made['calm_tokens_s']:.0f}: "
        f"{made['share']:.1%} (at least 95 %); {made['refused_s']:.0f} rejected per second, "
        f"p50 {made['refusal_p50_s'] * 1e3:.1f} ms, p99 {made['refusal_p99_s'] * 1e3:.1f} ms "
        f"(at most 50 ms); cores: {cores[0]}, then {cores[1]}"
    )
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--rounds", type=int, default=8, help="turns that each figure is the median of"
    )
    parser.add_argument("--long", type=int, default=6000)
    parser.add_argument("--long-rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--only", choices=["overhead", "prompt", "overload"], default=None)
    args = parser.parse_args()
    made: dict[str, Any] = {}
    if args.only in (None, "overhead", "prompt"):
        with serving(args.model, STREAMS + 1) as live:
            if args.only != "prompt":
                made["overhead"] = overhead(args.model, live.port, args.tokens, args.rounds)
            if args.only != "overhead":
                made["long_prompt"] = long_prompt(
                    live.port, args.tokens, args.long, args.long_rounds
                )
    if args.only in (None, "overload"):
        with serving(args.model, STREAMS) as live:
            pids = {"http": live.process.pid, "engine": live.engine_pid(), "client": os.getpid()}
            made["overload"] = overload(live.port, args.tokens, pids, args.seconds, args.rounds)
    print(json.dumps({"bench": "server", "model": args.model, **made}))


@contextlib.contextmanager
def serving(model: str, slots: int) -> Iterator[Any]:
    from live_server import Live

    live = Live(
        "--model", model, "--speculate", "off", "--max-queue", str(slots), engine=None
    ).wait_ready()
    try:
        yield live
    finally:
        live.stop()


if __name__ == "__main__":
    main()
