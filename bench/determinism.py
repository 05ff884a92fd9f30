"""Copies of one request among other traffic, on any server with OpenAI's API: distinct answers.

    python bench/determinism.py --url http://127.0.0.1:8000/v1 --model smollm2
    python bench/determinism.py --url … --model … --copies 200 --tokens 100    # a CPU

Start the server first, for example `verbatim serve --backend cuda`, `vllm serve MODEL` or
`llama-server -m FILE`. The copies have one prompt and one seed; the other requests have random
prompts and lengths, so that batches keep changing. Both are sent in one random order, `--open` at a
time: first with temperature 0, then with temperature 1. A server whose answers do not depend on
the batch has 1 distinct answer in each. The texts are compared, because not every server tells
token ids. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
from collections import Counter
from typing import Any

import httpx

PROMPT = "The keeper of the lighthouse wrote in his diary:"
WORDS = ("sea", "wind", "lamp", "stone", "gull", "night", "storm", "glass", "rope", "bread")
LENGTHS = (3, 60, 700)  # words of another prompt
SIZES = (5, 100, 300)  # tokens of another answer, at most
SEED = 7
TIMEOUT = httpx.Timeout(None, connect=60)  # a queued request waits as long as it must


def traffic(copies: int, others: int, tokens: int, temperature: float) -> list[dict[str, Any]]:
    """Bodies of all requests in random order. A copy is a body with PROMPT."""
    r = random.Random(SEED)
    same = {"prompt": PROMPT, "max_tokens": tokens, "seed": SEED, "temperature": temperature}
    bodies: list[dict[str, Any]] = [dict(same) for _ in range(copies)]
    for number in range(others):
        words = " ".join(r.choices(WORDS, k=r.choice(LENGTHS)))
        size = min(tokens, r.choice(SIZES))
        bodies.append({"prompt": words, "max_tokens": size, "seed": number, "temperature": 1.0})
    r.shuffle(bodies)
    return [{**body, "ignore_eos": True} for body in bodies]


async def answers(
    client: httpx.AsyncClient, model: str, bodies: list[dict[str, Any]], open_at_once: int
) -> list[str]:
    """The texts of the copies."""
    slots = asyncio.Semaphore(open_at_once)

    async def one(body: dict[str, Any]) -> str:
        async with slots:
            response = await client.post("completions", json={"model": model, **body})
        if response.status_code != 200:
            raise RuntimeError(f"{response.url}: {response.status_code} {response.text:.500}")
        return str(response.json()["choices"][0]["text"])

    texts = await asyncio.gather(*(one(body) for body in bodies))
    return [text for text, body in zip(texts, bodies, strict=True) if body["prompt"] == PROMPT]


def summary(texts: list[str]) -> dict[str, int]:
    counts = Counter(texts).most_common()
    columns = zip(*(text for text, _ in counts), strict=False)  # as long as the shortest
    shared = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
    return {
        "copies": len(texts),
        "distinct": len(counts),
        "most_frequent": counts[0][1],
        "characters": max(map(len, texts)),
        "equal_characters": shared,
    }


async def run(
    args: argparse.Namespace, transport: httpx.AsyncBaseTransport | None = None
) -> dict[str, dict[str, int]]:
    headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"}
    limits = httpx.Limits(max_connections=args.open)
    out = {}
    async with httpx.AsyncClient(
        base_url=args.url, headers=headers, timeout=TIMEOUT, limits=limits, transport=transport
    ) as client:
        for temperature in (0.0, 1.0):
            bodies = traffic(args.copies, args.others, args.tokens, temperature)
            found = summary(await answers(client, args.model, bodies, args.open))
            name = f"temperature {temperature:g}"
            out[name] = found
            print(
                f"{name}: {found['copies']} copies, {found['distinct']} distinct answers (the most "
                f"frequent: {found['most_frequent']} copies; equal in all: the first "
                f"{found['equal_characters']} of {found['characters']} characters)",
                flush=True,
            )
    return out


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--copies", type=int, default=1000)
    parser.add_argument("--others", type=int, default=250)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--open", type=int, default=256, help="requests at once")
    return parser.parse_args(words)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(arguments()))))
