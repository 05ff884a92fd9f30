"""The last steps of the engine, for the Lens' timeline. In: one entry per step while a page
watches. Out: plain dicts with the parts of one tenant.

Recording costs time per sequence and step, so it is on only for WATCH_SECONDS after the last
read. Invariant: a tenant sees the parts of its own requests; the rest is one number of tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from verbatim.base.json_io import JsonObject

STEPS = 4096  # steps kept; about two minutes of decode at 30 ms per step
WATCH_SECONDS = 15.0  # several polling intervals of the page


class StepPart(NamedTuple):
    """One sequence in one step: `tokens` computed from position `start` on; `draws` is 1 plus the
    number of drafts, 0 inside a prompt; `drawn` is the number of output tokens it gained."""

    request: str
    tenant: str
    start: int
    tokens: int
    draws: int
    drawn: int
    source: str  # proposer of the drafts
    arrival: float = 0.0  # request's arrival, on the clock of the log
    preemptions: int = 0  # request's preemptions so far

    def report(self) -> JsonObject:
        drafts = max(self.draws - 1, 0)
        return {
            "request": self.request,
            "start": self.start,
            "tokens": self.tokens,
            "kind": "decode" if self.draws == self.tokens else "prefill",
            "drafts": drafts,
            "accepted": min(max(self.drawn - 1, 0), drafts),
            "source": self.source,
            "arrival": self.arrival,
            "preemptions": self.preemptions,
        }


class StepLog:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._until = 0.0
        self._numbers = count(1)
        # number, start and end on the clock, parts
        self._steps: deque[tuple[int, float, float, tuple[StepPart, ...]]] = deque(maxlen=STEPS)

    @property
    def watched(self) -> bool:
        return self._until > 0.0 and self._clock() < self._until

    def add(self, started: float, ended: float, parts: tuple[StepPart, ...]) -> None:
        self._steps.append((next(self._numbers), started, ended, parts))

    def read(self, tenant: str, after: int = 0) -> list[JsonObject]:
        """The steps with a number above `after`, and WATCH_SECONDS more of recording."""
        self._until = self._clock() + WATCH_SECONDS
        out = []
        for number, started, ended, parts in self._steps:
            if number <= after:
                continue
            own = [part for part in parts if part.tenant == tenant]
            step: JsonObject = {"step": number, "at": started, "seconds": ended - started}
            step["parts"] = [part.report() for part in own]
            step["others"] = sum(p.tokens for p in parts) - sum(p.tokens for p in own)
            out.append(step)
        return out
