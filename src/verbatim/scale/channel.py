"""The way from a replica to a gateway: the messages of many requests in one batch of frames.

Running requests come in; batches of frames (server/process/wire.py) go out: all that is new since
the last batch. One engine step thus costs one message of Ray, and not one per stream. In a batch
the messages of a request are in order: Accepted, Deltas, the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from verbatim.server.process import wire
from verbatim.server.process.messages import Accepted, Deltas, Message, Refused, WireDelta
from verbatim.server.process.running import Running, Signal


class Channel:
    def __init__(self, name: str = "") -> None:
        self.name = name
        self.signal = Signal()  # wakes batches(); every request of the channel shares it
        self._open: dict[Running, asyncio.Future[None]] = {}
        self._accepted: set[Running] = set()

    def add(self, running: Running) -> asyncio.Future[None]:
        """The future is done when the last message of the request has left, or the channel is
        closed."""
        left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open[running] = left
        return left

    def remove(self, running: Running) -> None:
        self._accepted.discard(running)
        left = self._open.pop(running, None)
        if left is not None and not left.done():
            left.set_result(None)

    def close(self) -> None:
        for running in list(self._open):
            self.remove(running)

    async def batches(self, forever: bool = False) -> AsyncIterator[bytes]:
        """Ends when no request is open, unless `forever`."""
        while True:
            batch = self._collect()
            if batch:
                yield batch
            elif self._open or forever:
                await self.signal.wait()
            else:
                return

    def _collect(self) -> bytes:
        first: list[Message] = []
        deltas: list[WireDelta] = []
        last: list[Message] = []
        for running in list(self._open):
            if running.accepted and running not in self._accepted:
                self._accepted.add(running)
                first.append(Accepted(running.id, running.text, running.prompt_tokens))
            deltas += running.take()
            if running.problem is not None:
                last.append(Refused.of(running.id, running.problem))
            elif running.done is not None:
                last.append(running.done)
            if running.ended:
                self.remove(running)
        middle = [Deltas(deltas)] if deltas else []
        return b"".join(wire.pack(message) for message in (*first, *middle, *last))
