"""`verbatim simulate` against real replicas: `python bench/simulation.py [--threads T]`.

Measures the costs of one replica, then sends the same random traffic to 1, 2 and 4 real engines
(processes with T threads each, behind the gateway's Decider) and to the simulation, and prints the
error of throughput, time to first token and time per token. The traffic of a run is chosen from the
costs, so that the replicas compute `--load` of the time. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from verbatim import LLM, AsyncEngine, SamplingParams
from verbatim.bench.measure import Ours
from verbatim.scale.routes.routing import Candidate, Decider, Route
from verbatim.scale.simulate.costs import ReplicaCosts, measure_costs
from verbatim.scale.simulate.fleet import Served
from verbatim.scale.simulate.fleet_report import percentile, simulate
from verbatim.scale.simulate.traffic import Arrival, Mix

FIGURES = ("tokens/s", "TTFT p50", "TTFT p99", "per token p50", "per token p99")


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    settings = {"backend": "cpu", "threads": args.threads, "speculate": "off"}
    return {**settings, "context": 2048, "max_running": 64}


def replica(model: str, settings: dict[str, Any], pipe: Connection) -> None:
    """One engine process: (number, ids, tokens) in; (number, first, last) out, in clock seconds."""

    async def serve() -> None:
        loop, tasks = asyncio.get_running_loop(), set()
        async with AsyncEngine(model, **settings) as engine:

            async def answer(number: int, ids: list[int], tokens: int) -> None:
                params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
                first = 0.0
                async for _ in engine.stream(ids, params):
                    first = first or time.monotonic()
                pipe.send((number, first, time.monotonic()))

            await answer(-1, [1, 2, 3], 4)  # warm: the parent waits for this message
            while (got := await loop.run_in_executor(None, pipe.recv)) is not None:
                task = asyncio.create_task(answer(*got))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    asyncio.run(serve())


async def real(
    args: argparse.Namespace, replicas: int, arrivals: Sequence[Arrival], vocab: int
) -> list[Served]:
    """Serve the arrivals with real engines, at their times."""
    spawn = multiprocessing.get_context("spawn")
    loop = asyncio.get_running_loop()
    ends = [spawn.Pipe() for _ in range(replicas)]
    processes = [
        spawn.Process(target=replica, args=(args.model, engine_settings(args), theirs))
        for _, theirs in ends
    ]
    for process in processes:
        process.start()
    pipes = [ours for ours, _ in ends]
    for pipe in pipes:
        await loop.run_in_executor(None, pipe.recv)
    decider, names = Decider(), [f"{i:06}" for i in range(replicas)]
    for name in names:
        decider.prefixes.report(name, ())
    served: list[Served] = []
    open_of = [0] * replicas
    start = time.monotonic()

    async def read(i: int, count: asyncio.Semaphore) -> None:
        while True:
            number, first, last = await loop.run_in_executor(None, pipes[i].recv)
            served[number].first, served[number].last = first - start, last - start
            open_of[i] -= 1
            count.release()

    finished = asyncio.Semaphore(0)
    readers = [asyncio.create_task(read(i, finished)) for i in range(replicas)]
    for number, arrival in enumerate(arrivals):
        await asyncio.sleep(max(0.0, start + arrival.at - time.monotonic()))
        route = Route((), arrival.prompt, arrival.output)
        i = int(
            decider.rank(route, [Candidate(n, o) for n, o in zip(names, open_of, strict=True)])[0]
        )
        decider.routed(route, names[i], names)
        served.append(Served(arrival, i))
        open_of[i] += 1
        ids = [(number * 7919 + at * 31) % (vocab - 300) + 100 for at in range(arrival.prompt)]
        pipes[i].send((number, ids, arrival.output))
    for _ in arrivals:
        await finished.acquire()
    for pipe in pipes:
        pipe.send(None)
    for reader in readers:
        reader.cancel()
    for process in processes:
        process.kill()
    return served


def figures(served: Sequence[Served]) -> tuple[float, ...]:
    waits = [s.wait for s in served]
    between = [b for s in served if (b := s.between) is not None]
    seconds = max(s.last for s in served) - served[0].arrival.at
    return (
        sum(s.arrival.output for s in served) / seconds,
        *(1000 * percentile(waits, p) for p in (50, 99)),
        *(1000 * percentile(between, p) for p in (50, 99)),
    )


def traffic(costs: ReplicaCosts, replicas: int, load: float, requests: int) -> list[Arrival]:
    """Arrivals that keep the replicas busy `load` of the time at a batch of eight."""
    prompt, output = (50, 400), (20, 80)
    each = sum(prompt) / 2 * costs.prompt + sum(output) / 2 * costs.rows_seconds(8) / 8
    return list(Mix(load * replicas / each, prompt, output).arrivals(requests * replicas))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=1, help="of each replica")
    parser.add_argument("--replicas", default="1,2,4")
    parser.add_argument("--requests", type=int, default=100, help="per replica")
    parser.add_argument(
        "--load", default="0.5,0.9", help="shares of the time that replicas compute"
    )
    args = parser.parse_args()
    with LLM(args.model, prefix_cache=False, **engine_settings(args)) as llm:
        vocab = llm.tokenizer.vocab_size
        costs = measure_costs(llm, Ours(llm))
    print(json.dumps({"costs": costs.rows, "prompt": costs.prompt, "position": costs.position}))
    rows = []
    for load in map(float, args.load.split(",")):
        for replicas in map(int, args.replicas.split(",")):
            arrivals = traffic(costs, replicas, load, args.requests)
            true = figures(asyncio.run(real(args, replicas, arrivals, vocab)))
            report, served = simulate(costs, replicas, arrivals)
            found = figures(served)
            errors = [f / t - 1 for f, t in zip(found, true, strict=True)]
            rows.append({"load": load, "replicas": replicas, "real": true, "simulated": found})
            print(f"load {load:g}, {replicas} replicas, busy {report.busy:.0%}")
            for name, t, f, error in zip(FIGURES, true, found, errors, strict=True):
                print(f"  {name:14} real {t:10.1f}  simulated {f:10.1f}  {error:+.1%}", flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
