"""Decode latency of a stream while clients send new structures, and compile latency.

    python bench/grammar_compile.py [--model smollm2] [--seconds 4] [--rounds 3] [--loads ...]

For each load, windows with and without two clients alternate, because machines change their speed.
Reported: p50 and p99 of the time between two tokens of the stream, its throughput, what the clients
got (compiles and rejections per second, p50 and maximum of their latency), and the latency of a
compile in an idle engine. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from verbatim import SamplingParams
from verbatim.base.errors import VerbatimError
from verbatim.engine.calls.async_engine import AsyncEngine
from verbatim.server.process.cpu_affinity import native_threads, pin_threads

Make = Callable[[int], dict[str, Any]]
Figures = dict[str, list[float]]


def structures() -> dict[str, Make]:
    """By name: a function from a number to a structure that is not in the cache."""
    schema = {"type": "object", "required": ["id"], "additionalProperties": False}
    return {
        "hostile-schema": lambda i: {
            "json_schema": {"type": "integer", "multipleOf": 62_615_533 + 2 * i}
        },
        "large-schema": lambda i: {
            "json_schema": {"type": "integer", "multipleOf": 20_011 + 2 * (i % 5000)}
        },
        "choices": lambda i: {"choice": [f"{i}-{k * 7919 % 100003:05d}" for k in range(4000)]},
        "small-regex": lambda i: {"regex": f"[a-f]{{4,8}}-{i}-\\d{{3}}"},
        "small-schema": lambda i: {"json_schema": {**schema, "properties": {"id": {"const": i}}}},
    }


async def send(
    engine: AsyncEngine, make: Make, numbers: Any, found: Figures, tenant: str = ""
) -> None:
    params = SamplingParams(**make(next(numbers)), max_tokens=1, temperature=0)
    began = time.perf_counter()
    kind = "compiled"
    try:
        await (await engine.submit("x", params, tenant=tenant)).result()
    except VerbatimError as error:
        kind = f"refused {error.status}"
    found.setdefault(kind, []).append((time.perf_counter() - began) * 1e3)


async def window(
    engine: AsyncEngine, make: Make | None, numbers: Any, seconds: float, found: Figures
) -> list[float]:
    """Milliseconds between the tokens of a stream, beside two clients where `make` is given."""

    async def client(name: str) -> None:
        while make is not None:
            await send(engine, make, numbers, found, name)

    gaps: list[float] = []
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=4000, speculate="off")
    async with await engine.submit("Once upon a time", params) as stream:
        clients = [asyncio.create_task(client(name)) for name in "ab"]
        began = last = time.perf_counter()
        async for _ in stream:
            now = time.perf_counter()
            gaps.append((now - last) * 1e3)
            last = now
            if now - began > seconds:
                break
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return gaps[1:]


def percentile(values: list[float], share: float) -> float:
    return (
        sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")
    )


def summary(
    alone: list[float], beside: list[float], found: Figures, seconds: float
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, gaps in (("alone", alone), ("beside", beside)):
        out[f"p50_{name}_ms"], out[f"p99_{name}_ms"] = percentile(gaps, 0.5), percentile(gaps, 0.99)
        out[f"tokens_per_s_{name}"] = len(gaps) / max(sum(gaps) / 1e3, 1e-9)
    for kind, times in sorted(found.items()):
        out[kind] = {
            "per_s": len(times) / seconds,
            "p50_ms": percentile(times, 0.5),
            "max_ms": max(times),
        }
    return out


async def idle_latency(
    engine: AsyncEngine, kinds: dict[str, Make], numbers: Any
) -> dict[str, float]:
    """Median milliseconds of a compile in an idle engine: the request's latency less a plain
    one's."""
    every: dict[str, Make] = {"plain": lambda i: {}, **kinds}
    times: dict[str, list[float]] = {}
    for _, (name, make) in itertools.product(range(9), every.items()):
        found: Figures = {}
        await send(engine, make, numbers, found)
        times.setdefault(name, []).extend(*found.values())
    middle = {name: statistics.median(values) for name, values in times.items()}
    return {
        name: round(value - middle["plain"], 1) for name, value in middle.items() if name != "plain"
    }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    kinds = {name: structures()[name] for name in args.loads.split(",")}
    numbers = itertools.count(int(time.time()) % 100_000)
    before = native_threads()
    async with AsyncEngine(args.model, context=4096) as engine:
        pin_threads(engine, before)
        await window(engine, None, numbers, 1.0, {})
        idle = await idle_latency(engine, kinds, numbers)
        loads = {}
        for name, make in kinds.items():
            alone: list[float] = []
            beside: list[float] = []
            found: Figures = {}
            for _ in range(args.rounds):
                alone += await window(engine, None, numbers, args.seconds, {})
                beside += await window(engine, make, numbers, args.seconds, found)
            loads[name] = summary(alone, beside, found, args.seconds * args.rounds)
            print(name, json.dumps(loads[name], default=str), flush=True)
    return {"idle_ms": idle, "loads": loads}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", default=",".join(structures()))
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
