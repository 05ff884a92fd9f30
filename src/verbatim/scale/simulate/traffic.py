"""Arrivals of a simulated service. In: a rate and ranges of lengths, or a trace file. Out: Arrivals
in order of time. Invariant: the same arguments and seed give the same arrivals.

A prompt is a list of shared segments (a system prompt, an earlier conversation) followed by tokens
of its own. Two prompts with the same first segments share their prefix in the KV cache.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verbatim.base.errors import ParameterError

TRACE_BLOCK = 512  # tokens of one hash id in Mooncake's published traces
TRACE_KEYS = frozenset({"timestamp", "input_length", "output_length", "hash_ids", "tenant"})
OWN = 1 << 40  # token ids from here on belong to one request


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float  # seconds since the start
    prompt: int  # tokens, segments included
    output: int  # tokens until the request ends
    segments: tuple[tuple[int, int], ...] = ()  # (id, tokens) of the shared parts, in order
    tenant: str = ""

    def tokens(self, number: int) -> list[int]:
        """Token ids of the prompt. Only equality of prefixes matters, so a segment repeats one
        id. `number`: the request's, which makes the rest of the prompt its own."""
        ids: list[int] = []
        for segment, length in self.segments:
            ids += [segment] * length
        del ids[self.prompt :]
        return ids + [OWN + number] * (self.prompt - len(ids))


@dataclass(frozen=True, slots=True)
class Mix:
    """Poisson arrivals. Lengths are uniform in their ranges."""

    rate: float  # requests per second
    prompt: tuple[int, int]
    output: tuple[int, int]
    prefix: int = 0  # tokens of a shared prefix, part of the prompt
    prefixes: int = 1  # different shared prefixes, equally likely
    tenants: int = 1  # API keys, equally likely

    def arrivals(self, count: int, seed: int = 0) -> Iterator[Arrival]:
        r, at = random.Random(seed), 0.0
        for _ in range(count):
            at += r.expovariate(self.rate)
            prompt, output = r.randint(*self.prompt), r.randint(*self.output)
            shared = ((r.randrange(self.prefixes), self.prefix),) if self.prefix else ()
            yield Arrival(at, prompt, output, shared, f"key-{r.randrange(self.tenants)}")


def read_trace(path: Path, speed: float = 1.0) -> list[Arrival]:
    """Arrivals of a JSON-lines file in Mooncake's format: `timestamp` in ms, `input_length`,
    `output_length` and `hash_ids`, one id per 512 tokens of the prompt. `tenant` may name an API
    key. `speed` 2 sends the same requests in half the time."""
    out = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if line.strip():
            out.append(_trace_line(line, f"{path.name}, line {number}", speed))
    if not out:
        raise ParameterError("trace", f"{path} has no requests")
    return sorted(out, key=lambda arrival: arrival.at)


def _trace_line(line: str, place: str, speed: float) -> Arrival:
    try:
        entry = json.loads(line)
        if unknown := sorted(set(entry) - TRACE_KEYS):
            raise ParameterError(
                "trace", f"{place}: unknown key {unknown[0]!r}; known are {sorted(TRACE_KEYS)}"
            )
        at, prompt, output = (entry[key] for key in ("timestamp", "input_length", "output_length"))
        ids = [int(i) for i in entry.get("hash_ids", ())]
        arrival = Arrival(
            float(at) / 1000 / speed,
            int(prompt),
            int(output),
            tuple((i, TRACE_BLOCK) for i in ids),
            str(entry.get("tenant", "")),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ParameterError("trace", f"{place} is not a request: {error!r}") from None
    if arrival.at < 0 or arrival.prompt < 1 or arrival.output < 1:
        raise ParameterError("trace", f"{place}: lengths must be at least 1, times at least 0")
    return arrival
