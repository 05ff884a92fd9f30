"""What a stream loses beside clients that send new structures, one after another: windows alone and beside them in turns, because machines change their speed.

    python bench/grammar_pace.py [--model smollm2] [--seconds 5] [--rounds 3] [--settle 1.5] [--loads hostile-schema,choices,...]

First how long each kind takes to compile in an engine that does nothing else. Then for each load the stream's pace, the longest gap between two tokens, and what the
clients got: structures compiled a second, refusals and the slowest of them. A window begins `--settle` seconds after its stream and its clients: by then those who send
without end have used up what turns.py grants at once (`burst`: the pace in that time), and what is left is what they take for good. `plain` sends as many requests as small-regex got through, without a structure: what the
answers themselves cost. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from verbatim import SamplingParams
from verbatim.base.errors import VerbatimError
from verbatim.base.records import Delta
from verbatim.engine.aio import AsyncEngine
from verbatim.server.place import give_places, native_threads

Structure = dict[str, Any]
PLAIN = "plain"


def structures() -> dict[str, Callable[[int], Structure]]:
    """By name: a structure that nobody asked for before, from a number."""
    schema = {"type": "object", "required": ["id"], "additionalProperties": False}
    return {
        "hostile-schema": lambda i: {"json_schema": {"type": "integer", "multipleOf": 62_615_533 + 2 * i}},
        "hostile-regex": lambda i: {"regex": "|".join(f".*{chr(97 + k % 26)}.{{{k + 1}}}{i}" for k in range(200))},
        "choices": lambda i: {"choice": [f"{i}-{k * 7919 % 100003:05d}" for k in range(4000)]},
        "small-regex": lambda i: {"regex": f"[a-f]{{4,8}}-{i}-\\d{{3}}"},
        "small-schema": lambda i: {"json_schema": {**schema, "properties": {"id": {"const": i}, "ok": {"type": "boolean"}}}},
    }


@dataclass
class Tally:
    compiled: int = 0
    refused: int = 0
    slowest: float = 0.0  # refusal, in seconds
    messages: set[str] = field(default_factory=set)


@asynccontextmanager
async def clients(engine: AsyncEngine, make: Callable[[], Structure] | None, tally: Tally, pause: float) -> AsyncIterator[None]:
    """Two clients that send one request after another while the block runs; `make` None: nobody comes."""

    async def one() -> None:
        assert make is not None
        while True:
            asked = SamplingParams(**make(), max_tokens=1, temperature=0)
            began = time.perf_counter()
            try:
                await (await engine.submit("x", asked)).result()
                tally.compiled += 1
            except VerbatimError as error:
                tally.refused += 1
                tally.slowest = max(tally.slowest, time.perf_counter() - began)
                tally.messages.add(str(error)[:90])
            await asyncio.sleep(pause)

    running = [asyncio.create_task(one()) for _ in range(2 if make else 0)]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class Pace:
    """Tokens a second of a stream, and the longest time between two of its tokens, in milliseconds."""

    def __init__(self) -> None:
        self.tokens, self.gap, self.began, self.last = 0, 0.0, 0.0, 0.0

    def add(self, tokens: int, now: float) -> float:
        """A delta came at `now`; the seconds since the first one."""
        if self.began:
            self.tokens += tokens
            self.gap = max(self.gap, now - self.last)
        self.began, self.last = self.began or now, now
        return now - self.began

    @property
    def rate(self) -> float:
        return self.tokens / max(self.last - self.began, 1e-9)


async def window(stream: AsyncIterator[Any], seconds: float) -> Pace:
    """So many seconds of a stream."""
    pace = Pace()
    async for item in stream:
        if not isinstance(item, Delta) or pace.add(len(item.token_ids), time.perf_counter()) > seconds:
            break
    return pace


async def beside(
    engine: AsyncEngine, make: Callable[[], Structure] | None, asked: argparse.Namespace, pause: float
) -> dict[str, Any]:
    tally = Tally()
    long = SamplingParams(temperature=0, ignore_eos=True, max_tokens=4000)
    async with await engine.submit("Once upon a time", long) as stream, clients(engine, make, tally, pause):
        burst = await window(stream, asked.settle)
        began, compiled, refused = time.perf_counter(), tally.compiled, tally.refused
        pace = await window(stream, asked.seconds)
        spent = time.perf_counter() - began
    got = {"compiled": (tally.compiled - compiled) / spent, "refused": (tally.refused - refused) / spent}
    paces = {"pace": pace.rate, "longest": pace.gap * 1e3, "burst": burst.rate, "burst_longest": burst.gap * 1e3}
    return {**paces, "slowest": tally.slowest, "messages": sorted(tally.messages), **got}


async def idle_times(engine: AsyncEngine, kinds: dict[str, Callable[[int], Structure]], numbers: Any) -> dict[str, float]:
    """Milliseconds from asking to the first token's end, nothing else running, less those of a request without a structure."""
    times: dict[str, list[float]] = {name: [] for name in (PLAIN, *kinds) if not name.startswith("hostile")}
    for _ in range(15):
        for name, found in times.items():
            params = SamplingParams(max_tokens=1, temperature=0, **(kinds[name](next(numbers)) if name in kinds else {}))
            began = time.perf_counter()
            await (await engine.submit("x", params)).result()
            found.append((time.perf_counter() - began) * 1e3)
    middle = {name: statistics.median(found) for name, found in times.items()}
    return {name: value - middle[PLAIN] for name, value in middle.items() if name != PLAIN}


async def measure(asked: argparse.Namespace) -> dict[str, Any]:
    kinds = {name: make for name, make in structures().items() if name in asked.loads.split(",")}
    numbers = itertools.count(int(time.time()) % 100_000)
    rows: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    before = native_threads()
    async with AsyncEngine(asked.model, context=4096) as engine:
        placed = not asked.no_places and give_places(engine, before)
        print(
            f"{engine.parts.backend.info.threads} threads, {'each with a place of its own' if placed else 'where the system puts them'}"
        )
        await asyncio.wrap_future(engine._compilers.submit("", lambda: None))
        await beside(engine, None, asked, 0.0)
        idle = await idle_times(engine, kinds, numbers)
        print("idle engine, ms to compile:", ", ".join(f"{name} {value:.1f}" for name, value in idle.items()))
        for turn in range(asked.rounds):
            for name in asked.loads.split(","):
                pause, make = 0.0, None
                if name == PLAIN:
                    rate = rows.get("small-regex", [({}, {"compiled": 10.0})])[-1][1]["compiled"]
                    pause, make = 2 / max(rate, 1.0), dict
                else:
                    make = lambda name=name: kinds[name](next(numbers))  # noqa: E731
                pair = [await beside(engine, way, asked, pause) for way in ((None, make) if turn % 2 else (make, None))]
                alone, with_them = pair if turn % 2 else pair[::-1]
                rows.setdefault(name, []).append((alone, with_them))
    return {"idle_ms": idle, "loads": {name: summary(found) for name, found in rows.items()}}


def summary(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    middle = statistics.median
    out = {
        "alone": middle(a["pace"] for a, _ in pairs),
        "beside": middle(b["pace"] for _, b in pairs),
        "ratio": middle(b["pace"] / a["pace"] for a, b in pairs),
        "burst_ratio": middle(b["burst"] / a["burst"] for a, b in pairs),
        "burst_longest_ms": max(b["burst_longest"] for _, b in pairs),
        "longest_alone_ms": middle(a["longest"] for a, _ in pairs),
        "longest_ms": middle(b["longest"] for _, b in pairs),
        "compiled_a_second": middle(b["compiled"] for _, b in pairs),
        "refused_a_second": middle(b["refused"] for _, b in pairs),
        "slowest_refusal_s": max(b["slowest"] for _, b in pairs),
    }
    windows = [(round(a["pace"]), round(b["pace"])) for a, b in pairs]
    messages = sorted({m for _, b in pairs for m in b["messages"]})
    return {**{k: round(v, 3) for k, v in out.items()}, "windows": windows, "messages": messages}


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--model", default="smollm2")
    ask.add_argument("--seconds", type=float, default=5.0)
    ask.add_argument("--rounds", type=int, default=3)
    ask.add_argument("--settle", type=float, default=1.5)
    ask.add_argument(
        "--no-places", action="store_true", help="do not give each thread of the engine a processor, as the server does"
    )
    ask.add_argument("--loads", default=",".join((*structures(), PLAIN)))
    asked = ask.parse_args()
    known = (*structures(), PLAIN)
    if wrong := [name for name in asked.loads.split(",") if name not in known]:
        ask.error(f"--loads: {', '.join(wrong)} is none of {', '.join(known)}")
    result = asyncio.run(measure(asked))
    print(
        f"{'load':16} {'alone':>7} {'beside':>7} {'ratio':>6} {'burst':>6}  {'longest gap, ms':>15}  {'done/s':>7} {'refused/s':>9} {'slowest':>8}"
    )
    for name, row in result["loads"].items():
        gaps = f"{row['longest_alone_ms']:.0f} -> {row['longest_ms']:.0f}"
        print(
            f"{name:16} {row['alone']:7.0f} {row['beside']:7.0f} {row['ratio']:6.2f} {row['burst_ratio']:6.2f}  {gaps:>15}  {row['compiled_a_second']:7.1f}"
            f" {row['refused_a_second']:9.1f} {row['slowest_refusal_s']:7.2f}s"
        )
    for name, row in result["loads"].items():
        for message in row.pop("messages"):
            print(f"  {name}: {message}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
