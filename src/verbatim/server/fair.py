"""Whose turn it is: requests of several keys wait here, and are let into the engine one key after another.

In: add(tenant, ...), release(tenant, ...). Out: take() gives the next that may go, or None. The engine itself serves what it has in order of arrival,
so it is given hardly more than it can run; a key with ten thousand requests waiting delays another key's single one by one turn.

    width   sequences a request runs; `slots` bounds their sum
    claim   cache tokens it may come to need; a key's running requests may claim at most `share` of `tokens`, but one always runs
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
        self.used = 0  # slots
        self.running: Counter[str] = Counter()  # requests of each tenant
        self.claimed: Counter[str] = Counter()  # tokens of each tenant
        self._queues: OrderedDict[str, list[Waiting]] = OrderedDict()  # the first tenant is next
        self._numbers = itertools.count()

    def add(self, item: Any, *, tenant: str = "", priority: int = 0, width: int = 1, claim: int = 0) -> Waiting:
        entry = Waiting(priority, next(self._numbers), tenant, width, claim, item)
        heapq.heappush(self._queues.setdefault(tenant, []), entry)
        return entry

    def take(self) -> Waiting | None:
        """The next request of the first tenant in turn that may run; that tenant goes to the end of the line."""
        for tenant in list(self._queues):
            queue = self._queues[tenant]
            while queue and queue[0].gone:
                heapq.heappop(queue)
            if not queue:
                del self._queues[tenant]
                continue
            entry = queue[0]
            if self.used and self.used + entry.width > self.slots:
                return None  # the widest in turn waits for room; nobody overtakes it, or it would wait for ever
            if self._over_share(entry):
                continue
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

    def release(self, entry: Waiting) -> None:
        self.used -= entry.width
        self.claimed[entry.tenant] -= entry.claim
        self.running[entry.tenant] -= 1
        if not self.running[entry.tenant]:
            del self.running[entry.tenant], self.claimed[entry.tenant]
