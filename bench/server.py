"""What the server costs and how it behaves under load, on this machine: `python bench/server.py [--model MODEL] [--tokens N]`.

    1  tokens/s of 16 streams: the bare engine (AsyncEngine, in a process of its own) and over HTTP, in turns; the share that HTTP costs
    2  a long prompt that arrives among 16 streams: their time between tokens, with and without it, beside the time of one chunk
    3  ten times as many requests as there is room for: how fast a 429 comes, and what the accepted ones get done

The limit is printed before the result: over HTTP nothing can be faster than the bare engine. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "server"))

PROMPT = "Tell me a long story about a lighthouse keeper and the sea. "
STREAMS = 16

BARE = """
import asyncio, json, sys, time
from verbatim.base.params import SamplingParams
from verbatim.engine.aio import AsyncEngine

async def main(model, prompt, streams, tokens):
    async with AsyncEngine(model, speculate="off") as engine:
        async def one(seed):
            stream = await engine.submit(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed))
            async for _ in stream:
                pass
        await one(0)
        print("ready", flush=True)
        for line in sys.stdin:
            begun = time.perf_counter()
            await asyncio.gather(*(one(s) for s in range(streams)))
            print(streams * tokens / (time.perf_counter() - begun), flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
"""


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


async def follow(port: int, body: dict[str, Any]) -> tuple[int, float, list[float]]:
    """(status, seconds to the status line, times at which pieces arrived). No JSON is parsed: the client must not be the limit."""
    from streams import request_bytes

    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(request_bytes("/v1/completions", body))
    head = await reader.readuntil(b"\r\n\r\n")
    answered = time.perf_counter() - begun
    times: list[float] = []
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    writer.close()
    return int(head.split(b" ", 2)[1]), answered, times


def completion(tokens: int, seed: int = 0, prompt: str = PROMPT) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": seed, "stream": True}


async def wave(port: int, count: int, tokens: int) -> list[tuple[int, float, list[float]]]:
    return await asyncio.gather(*(follow(port, completion(tokens, s)) for s in range(count)))


def rate(port: int, tokens: int) -> float:
    begun = time.perf_counter()
    asyncio.run(wave(port, STREAMS, tokens))
    return STREAMS * tokens / (time.perf_counter() - begun)


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
    for _ in range(rounds):  # in turns, so that a busy moment of the machine hits both
        bare.stdin.write("go\n")
        bare.stdin.flush()
        rates["bare"].append(float(bare.stdout.readline()))
        rates["http"].append(rate(port, tokens))
    bare.stdin.close()
    bare.wait()
    best = {name: max(values) for name, values in rates.items()}
    return {"bare_tokens_s": best["bare"], "http_tokens_s": best["http"], "http_cost": 1 - best["http"] / best["bare"]}


async def with_long_prompt(port: int, tokens: int, long: int) -> tuple[list[float], float]:
    """Gaps between tokens of 16 streams while a prompt of `long` tokens (0: none) is computed, and how long that took."""
    streams = [asyncio.create_task(follow(port, completion(tokens, s))) for s in range(STREAMS)]
    await asyncio.sleep(1.0)
    begun, took = time.perf_counter(), 0.0
    if long:
        await follow(port, completion(1, prompt="sea " * long))
        took = time.perf_counter() - begun
    gaps: list[float] = []
    for _, _, times in await asyncio.gather(*streams):
        late = [t for t in times if t >= begun and (not took or t <= begun + took)]
        gaps += [b - a for a, b in pairwise(late)]
    return gaps, took


async def flood(port: int, capacity: int, tokens: int, seconds: float) -> dict[str, float]:
    """Ten clients for each place, each asking again as soon as it was answered."""
    refused: list[float] = []
    written = 0
    end = time.perf_counter() + seconds

    async def client(seed: int) -> None:
        nonlocal written
        while time.perf_counter() < end:
            status, answered, times = await follow(port, completion(tokens, seed))
            if status == 429:
                refused.append(answered)
                await asyncio.sleep(0.25)
            else:
                written += len(times)

    begun = time.perf_counter()
    await asyncio.gather(*(client(s) for s in range(10 * capacity)))
    return {
        "tokens_s": written / (time.perf_counter() - begun),
        "refused": len(refused),
        "refusal_p99_s": quantile(refused, 0.99),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=int, default=6000)
    args = parser.parse_args()
    from live_server import Live

    live = Live("--model", args.model, "--speculate", "off", "--max-queue", str(STREAMS + 4), engine=None).wait_ready()
    try:
        made = {"overhead": overhead(args.model, live.port, args.tokens, args.rounds)}
        o = made["overhead"]
        print(
            f"16 streams: bare engine {o['bare_tokens_s']:.0f} tokens/s (the limit), over HTTP {o['http_tokens_s']:.0f}: HTTP costs {o['http_cost']:.1%}"
        )
        calm, _ = asyncio.run(with_long_prompt(live.port, args.tokens, 0))
        stirred, took = asyncio.run(with_long_prompt(live.port, max(args.tokens, 400), args.long))
        chunk = took * 512 / args.long
        made["long_prompt"] = {"calm_p99_s": quantile(calm, 0.99), "stirred_p99_s": quantile(stirred, 0.99), "chunk_s": chunk}
        print(
            f"a prompt of {args.long} tokens among them: p99 between tokens {quantile(calm, 0.99) * 1e3:.0f} ms, then {quantile(stirred, 0.99) * 1e3:.0f} ms; one chunk takes {chunk * 1e3:.0f} ms"
        )
        peak = max(rate(live.port, args.tokens) for _ in range(2))
        made["overload"] = {"peak_tokens_s": peak, **asyncio.run(flood(live.port, STREAMS + 4, args.tokens, 10))}
        v = made["overload"]
        print(
            f"10 x capacity: {v['tokens_s']:.0f} tokens/s of a peak of {peak:.0f}; {v['refused']} refused, p99 {v['refusal_p99_s'] * 1e3:.0f} ms"
        )
    finally:
        live.stop()
    print(json.dumps({"bench": "server", "model": args.model, **made}))


if __name__ == "__main__":
    main()
