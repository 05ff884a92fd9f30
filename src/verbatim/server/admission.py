"""Admission control: queue limits, and the 429 and 503 of a request above them.

Admission.admit(tenant) returns a context manager or raises a 429 or 503. Admission is decided at
once in the HTTP process, without a message to the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator

from verbatim.server.http.api_keys import ApiKeys
from verbatim.server.problem import Problem, shutting_down
from verbatim.server.settings import Limits
from verbatim.server.unfinished_bodies import UnfinishedBodies

# Concurrent requests with explain_rows. Each holds up to 64 rows of logits: 17 MB at a vocabulary
# of 49,152, in three places (engine, socket, response).
MAX_ROWS = 4


class Admission:
    """Admission control: counts the open requests of all models, accepts or rejects a new one.
    A request is open once its body has arrived.

    When max_queue requests are open, a tenant is rejected unless it has fewer than max_queue / n of
    them, where n tenants have requests open, this one included. So k keys have at most
    max_queue * (1 + 1/2 + ... + 1/k) requests open, each term rounded up. No request that was
    admitted is given up for another: its response may have begun.
    """

    def __init__(
        self,
        limits: Limits,
        keys: ApiKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self._keys = ApiKeys() if keys is None else keys
        self._clock = clock
        # (tenant, limit per minute) -> what was spent of it, and when that was true
        self._spent: dict[tuple[str, str], tuple[float, float]] = {}
        self.bodies = UnfinishedBodies(limits)
        self.draining = asyncio.Event()
        self.open = 0
        self._refused = 0  # answers 429 of this class
        self._with_rows = 0
        self._per_tenant: Counter[str] = Counter()

    @property
    def refused(self) -> int:
        """Requests answered with 429 here, for the metrics."""
        return self._refused + self.bodies.given_up

    def count_refused(self, status: int) -> None:
        self._refused += status == 429

    def rejection(self, tenant: str) -> Problem | None:
        """The 429 or 503 for one more request of this tenant; None: it is admitted."""
        if self.draining.is_set():
            return shutting_down()
        problem = self._overload(tenant)
        self._refused += problem is not None
        return problem

    def _overload(self, tenant: str) -> Problem | None:
        count = self._per_tenant.get(tenant, 0)
        share = self.limits.max_queue / (len(self._per_tenant) + (count == 0))
        if self.open >= self.limits.max_queue and count >= share:
            why = f"{self.open} requests are open, which is this server's limit"
            why += f", {count} of them of this key" if count < self.open else ""
            return Problem("overloaded", why, retry_after=1)
        own = self._keys.limits_of(tenant)
        most = own.max_open or self.limits.max_per_key
        if most and count >= most:
            why = f"this key has {count} requests open, which is its limit"
            return Problem("key_overloaded", why + " (max_open)" * bool(own.max_open), None, 1)
        for name in ("requests_per_minute", "tokens_per_minute"):
            limit = getattr(own, name)
            over = self._left_to_refill(tenant, name) + 1 - limit if limit else 0
            if over > 0:
                why = f"this key has used its {limit} {name.replace('_', ' ')} ({name})"
                return Problem("key_overloaded", why, None, over * 60 / limit)
        return None

    def _left_to_refill(self, tenant: str, name: str) -> float:
        """What a tenant has spent of a limit per minute and has not got back since."""
        spent, when = self._spent.get((tenant, name), (0.0, 0.0))
        limit: int = getattr(self._keys.limits_of(tenant), name)
        return max(0.0, spent - (self._clock() - when) * limit / 60)

    def spend(self, tenant: str, name: str, amount: float) -> None:
        """Count requests or tokens against a limit per minute, which comes back evenly. Tokens are
        known at the end of a request, so the last one admitted may overdraw the limit; the next one
        then waits for longer."""
        if getattr(self._keys.limits_of(tenant), name):
            spent = self._left_to_refill(tenant, name) + amount
            self._spent[tenant, name] = (spent, self._clock())

    @contextlib.contextmanager
    def admit_rows(self) -> Iterator[None]:
        if self._with_rows >= MAX_ROWS:
            self._refused += 1
            why = f"{self._with_rows} requests with rows are open, which is this server's limit"
            raise Problem("overloaded", f"explain_rows: {why}", "explain_rows", retry_after=1)
        self._with_rows += 1
        try:
            yield
        finally:
            self._with_rows -= 1

    @contextlib.contextmanager
    def admit(self, tenant: str) -> Iterator[None]:
        """Count one request as open for the duration of the context. Raises its rejection."""
        problem = self.rejection(tenant)
        if problem is not None:
            raise problem
        self.spend(tenant, "requests_per_minute", 1)
        self.open += 1
        self._per_tenant[tenant] += 1
        try:
            yield
        finally:
            self.open -= 1
            self._per_tenant[tenant] -= 1
            if not self._per_tenant[tenant]:
                del self._per_tenant[tenant]
