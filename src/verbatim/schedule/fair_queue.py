"""Fair queue: round robin over tenants; within a tenant by priority, then first in, first out.

In: add(item, tenant=...), release(entry). Out: take() returns the next entry that may start, or
None. A tenant with ten thousand waiting entries delays another tenant's single entry by one turn.
The thread pools of the engine (engine/calls/fair_pool.py) admit their work items through it, and
the server the requests of each tenant to the engine, whose scheduler shares the steps. Not
thread-safe: callers hold their own lock.

    width   slots an entry occupies while it runs; `slots` bounds their sum
    claim   tokens an entry may need; the running entries of one tenant claim at most `share` of
            `tokens`, but one entry per tenant may always run
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any


@dataclass(order=True)
class Waiting:
    priority: int
    number: int
    tenant: str = field(compare=False)
    width: int = field(compare=False)
    claim: int = field(compare=False)
    item: Any = field(compare=False)
    gone: bool = field(default=False, compare=False)


class FairQueue:
    def __init__(self, slots: int, tokens: int, share: float = 1.0) -> None:
        self.slots = slots
        self.tokens = tokens
        self.share = share
        self.used = 0  # slots of running entries
        self.running: Counter[str] = Counter()  # entries per tenant
        self.claimed: Counter[str] = Counter()  # tokens per tenant
        self._queues: OrderedDict[str, list[Waiting]] = OrderedDict()  # the first tenant is next
        self._numbers = itertools.count()

    def add(
        self, item: object, *, tenant: str = "", priority: int = 0, width: int = 1, claim: int = 0
    ) -> Waiting:
        entry = Waiting(priority, next(self._numbers), tenant, width, claim, item)
        heapq.heappush(self._queues.setdefault(tenant, []), entry)
        return entry

    def take(self) -> Waiting | None:
        """The next entry of the first tenant that may start one; the tenant moves to the end of the
        round."""
        for tenant in list(self._queues):
            queue = self._queues[tenant]
            while queue and queue[0].gone:
                heapq.heappop(queue)
            if not queue:
                del self._queues[tenant]
                continue
            entry = queue[0]
            if self._over_share(entry):
                continue
            if self.used and self.used + entry.width > self.slots:
                return None  # a wide entry waits for slots; overtaken, it would starve
            heapq.heappop(queue)
            self._queues.move_to_end(tenant)
            self.used += entry.width
            self.running[tenant] += 1
            self.claimed[tenant] += entry.claim
            return entry
        return None

    def _over_share(self, entry: Waiting) -> bool:
        if self.share >= 1 or not self.running[entry.tenant]:
            return False
        return self.claimed[entry.tenant] + entry.claim > self.share * self.tokens

    def clear(self) -> list[Waiting]:
        """Remove and return every entry that has not started."""
        entries = [entry for queue in self._queues.values() for entry in queue]
        self._queues.clear()
        return entries

    def release(self, entry: Waiting) -> None:
        self.used -= entry.width
        self.claimed[entry.tenant] -= entry.claim
        self.running[entry.tenant] -= 1
        if not self.running[entry.tenant]:
            del self.running[entry.tenant], self.claimed[entry.tenant]
