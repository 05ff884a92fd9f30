"""The ledger: every accepted request ends in exactly one state, and its usage is added once.

The supervisor calls open(id) when it sends a request to the engine, and close(id, state, usage)
when the request ends. Invariant: opened = open now + the sum of the states. `/metrics` shows the
counts, and the tests compare them with the engine's own counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import astuple

from verbatim.base.records import Usage

STATES = (
    *("stop", "length", "loop", "cancel", "error", "refused", "engine_died", "timeout"),
    *("slow_reader", "done"),
)
USAGE = ("prompt", "output", "cached", "drafted", "accepted", "reasoning")


class Ledger:
    def __init__(self) -> None:
        self.opened = 0
        self.states: Counter[str] = Counter()
        self.usage: Counter[str] = Counter()
        self._open: dict[str, Callable[[], object] | None] = {}  # what on_close() was given

    def open(self, request_id: str) -> None:
        assert request_id not in self._open, f"{request_id} opened twice"
        self._open[request_id] = None
        self.opened += 1

    def on_close(self, request_id: str, callback: Callable[[], object]) -> bool:
        """Call `callback` when the request ends. False: it has ended already."""
        if request_id in self._open:
            self._open[request_id] = callback
        return request_id in self._open

    def close(self, request_id: str, state: str, usage: Usage | None = None) -> None:
        assert state in STATES, state
        assert request_id in self._open, f"{request_id} ended twice, or never began"
        callback = self._open.pop(request_id)
        self.states[state] += 1
        if usage is not None:
            self.add(usage)
        if callback is not None:
            callback()

    def add(self, usage: Usage) -> None:
        for name, count in zip(USAGE, astuple(usage), strict=True):
            self.usage[name] += count

    @property
    def running(self) -> int:
        return len(self._open)

    def balanced(self) -> bool:
        return self.opened == len(self._open) + sum(self.states.values())
