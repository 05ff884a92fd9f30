"""Concurrent clients of one AsyncEngine: they arrive at any time, some abort, all share the steps.

python examples/async_clients.py [--model smollm2] [--clients 8]
"""

from __future__ import annotations

import argparse
import asyncio

from verbatim import AsyncEngine, SamplingParams
from verbatim.base.records import Completion


async def client(engine: AsyncEngine, number: int, max_tokens: int) -> Completion:
    """One client. Every third one aborts after three pieces."""
    await asyncio.sleep(0.05 * number)
    stream = await engine.submit(
        f"Fact number {number}:",
        SamplingParams(max_tokens=max_tokens, seed=number),
        tenant=f"client-{number % 2}",
    )
    pieces = 0
    async for item in stream:
        if isinstance(item, Completion):
            print(
                f"client {number}: {item.finish_reason:6} after {item.usage.output_tokens:2} "
                f"tokens: {item.text[:50]!r}"
            )
            return item
        pieces += 1
        if number % 3 == 2 and pieces == 3:
            engine.abort(stream.request_id)
    raise AssertionError("every stream ends with its Completion")


async def serve(model: str, clients: int, max_tokens: int) -> list[Completion]:
    async with AsyncEngine(model) as engine:
        done = await asyncio.gather(*(client(engine, i, max_tokens) for i in range(clients)))
        stats = engine.stats()
        print(
            f"{stats['steps_total']} steps computed {stats['computed_tokens_total']} tokens for "
            f"{stats['requests_total']} requests"
        )
        await engine.drain()
    return list(done)


def main(arguments: list[str] | None = None) -> list[Completion]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args(arguments)
    return asyncio.run(serve(options.model, options.clients, options.max_tokens))


if __name__ == "__main__":
    main()
