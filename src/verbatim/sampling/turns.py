"""How much of a processor compiling may take from answers that are being written, and whose turn it is.

    with turns.turn(had, until, share) as turn:      # None: it was nobody's turn before `until`
        ...                                          # compile for a while
        turn.used = seconds                          # of a processor

`share()` says what may be taken now: None, all of it (nothing else runs), or a part of one processor. Then there is one turn at a time, and an account: it fills with
`share` seconds a second up to BURST, a turn begins when it is above zero, and what the turn used is taken off.
So the average holds whatever a single turn costs, and somebody who sends a large structure now and then is not refused for those who send them without end: they
empty the account once, and have the share from then on. The next turn is for the structure that `had` the least so far: what is cheap passes what is not.

Why an account, and no low priority: all threads of a step wait for each other hundreds of times a step, and what runs for a moment on one of their processors
delays them all, however low its priority. Measured on two processors (docs/adr/0012): a second of compiling costs a stream 0.9 seconds, as SCHED_IDLE as well;
and in pieces of a millisecond or two at an ordinary priority two to four, because the system moves threads about each time.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHARE = 0.02  # of one processor, beside answers that want all of them
BURST = 0.2  # seconds: a large structure once in a while, or a hundred small ones, without a wait
SCARCE = 0.025  # seconds: with less in the account, what takes long makes way for everything else
LOOK = 0.1  # seconds between two looks at `share`, which nobody announces

Share = Callable[[], float | None]


def alone() -> None:
    """The share of whoever compiles with nothing beside him."""


class Turn:
    __slots__ = ("metered", "scarce", "used")

    def __init__(self, metered: bool, scarce: bool = False) -> None:
        self.metered = metered
        self.scarce = scarce  # the account is all but empty: somebody asks for much
        self.used = 0.0


class Turns:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int]] = []  # (had, number): a heap
        self._numbers = itertools.count()
        self._taken = False
        self._account = BURST
        self._filled = clock()

    @contextmanager
    def turn(self, had: float, until: float, share: Share) -> Iterator[Turn | None]:
        found = self._await(had, until, share)
        try:
            yield found
        finally:
            if found is not None and found.metered:
                with self._changed:
                    self._account -= found.used
                    self._taken = False
                    self._changed.notify_all()

    def _await(self, had: float, until: float, share: Share) -> Turn | None:
        ticket = (had, next(self._numbers))
        with self._changed:
            heapq.heappush(self._waiting, ticket)
            try:
                while True:
                    rate = share()
                    if rate is None:
                        return Turn(metered=False)
                    now = self._clock()
                    self._account = min(BURST, self._account + rate * (now - self._filled))
                    self._filled = now
                    if self._account > 0 and not self._taken and self._waiting[0] == ticket:
                        self._taken = True
                        return Turn(metered=True, scarce=self._account < SCARCE)
                    if now >= until:
                        return None
                    short = max(0.001, -self._account / rate) if rate and not self._taken else LOOK
                    self._changed.wait(min(LOOK, short, until - now))
            finally:
                self._waiting.remove(ticket)
                heapq.heapify(self._waiting)
                self._changed.notify_all()
