"""Request bodies that are still arriving. They hold no place in the queue and are bounded apart
from it, so that clients that send half a request keep no other request out.

    time    body_seconds in all; after BODY_GRACE seconds also min_body_rate on average      408
    bytes   max_unfinished_bytes together, where each body counts as MIN_COST at least,
            which bounds their number; beyond it the oldest body of the tenant with most
            bytes is given up                                                                429

Pieces of a body come in; the whole body or a Problem goes out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from verbatim.server.problem import Problem
from verbatim.server.settings import Limits

BODY_GRACE = 10.0  # seconds; a slow link may need some for its first packets
MIN_COST = 64 * 1024  # bytes; covers the connection, task and parser of a body of one byte


@dataclass(eq=False, slots=True)
class _Body:
    tenant: str
    deadline: asyncio.Timeout
    data: bytearray = field(default_factory=bytearray)
    given_up: bool = False

    @property
    def cost(self) -> int:
        return max(len(self.data), MIN_COST)


class UnfinishedBodies:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bodies: dict[_Body, None] = {}  # the oldest first
        self._costs: Counter[str] = Counter()  # bytes per tenant
        self.given_up = 0  # bodies answered with 429

    def __len__(self) -> int:
        return len(self._bodies)

    async def read(self, tenant: str, pieces: AsyncIterator[bytes], limit: int) -> bytes:
        began = asyncio.get_running_loop().time()
        body = _Body(tenant, asyncio.timeout(None))
        try:
            async with body.deadline:
                self._add(body)
                self._set_deadline(body, began)
                async for piece in pieces:
                    if len(body.data) + len(piece) > limit:
                        raise Problem("body_too_large", f"the body is larger than {limit} bytes")
                    self._grow(body, piece)
                    self._set_deadline(body, began)
        except TimeoutError:
            raise self._problem(body) from None
        finally:
            self._drop(body)
        return bytes(body.data)

    def _set_deadline(self, body: _Body, began: float) -> None:
        if body.given_up:
            return
        seconds, rate = self._limits.body_seconds, self._limits.min_body_rate
        if rate:
            seconds = min(seconds, BODY_GRACE + len(body.data) / rate)
        body.deadline.reschedule(began + seconds)

    def _add(self, body: _Body) -> None:
        self._bodies[body] = None
        self._costs[body.tenant] += body.cost
        self._make_room()

    def _grow(self, body: _Body, piece: bytes) -> None:
        before = body.cost
        body.data += piece
        if body in self._bodies and body.cost > before:
            self._costs[body.tenant] += body.cost - before
            self._make_room()

    def _drop(self, body: _Body) -> None:
        if body in self._bodies:
            del self._bodies[body]
            self._costs[body.tenant] -= body.cost
            if not self._costs[body.tenant]:
                del self._costs[body.tenant]

    def _make_room(self) -> None:
        while self._costs.total() > self._limits.max_unfinished_bytes:
            [(tenant, _)] = self._costs.most_common(1)
            oldest = next(body for body in self._bodies if body.tenant == tenant)
            self._drop(oldest)
            oldest.given_up = True
            self.given_up += 1
            oldest.deadline.reschedule(asyncio.get_running_loop().time())

    def _problem(self, body: _Body) -> Problem:
        limits = self._limits
        if body.given_up:
            why = (
                f"the unfinished bodies have more than {limits.max_unfinished_bytes} bytes, which "
                "is this server's limit (--max-unfinished-bytes), and this one was the oldest of "
                "the key with most of them"
            )
            return Problem("overloaded", why, retry_after=1)
        why = (
            f"the body did not arrive in time: {len(body.data)} bytes came; it has "
            f"{limits.body_seconds:g} s (--body-seconds), and after {BODY_GRACE:g} s needs "
            f"{limits.min_body_rate} bytes per second (--min-body-rate)"
        )
        return Problem("timeout", why)
