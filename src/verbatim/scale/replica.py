"""One replica on Ray Serve: a supervisor and its engine process, without HTTP.

Encoded Work messages (server/process/messages.py) come in; Accepted, Deltas and exactly one result
per request go out, as batches of frames (channel.py). An engine that dies is restarted by the
supervisor; check_health fails when that does not help, and Serve then replaces the whole replica.
The engine process ends with this process: its socket closes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator

from verbatim.scale.channel import Channel
from verbatim.scale.ray_start import has_token_authentication
from verbatim.scale.routes.routing import HASH_BYTES, MAX_HASHES, REPORT_SECONDS, Route
from verbatim.scale.start_error import did_not_start
from verbatim.server.problem import Problem
from verbatim.server.process import wire
from verbatim.server.process.message_codec import decode_to_engine, encode
from verbatim.server.process.messages import Inspect, Inspected, Ready, Refused, Work
from verbatim.server.process.supervisor import Supervisor
from verbatim.server.settings import Settings

log = logging.getLogger("verbatim.scale")
RESTART_SECONDS = 120.0  # an engine that does not restart within this time: replace the replica
LOG_FORMAT = "%(levelname)s replica: %(message)s"


class Replica:
    async def __init__(self, settings: Settings, on_gpu: bool) -> None:  # type: ignore[misc]
        """Returns when the model is loaded: Serve sends no request before."""
        logging.basicConfig(level=os.environ.get("VERBATIM_LOG", "INFO"), format=LOG_FORMAT)
        if not on_gpu:  # the backend `auto` must not find a GPU that belongs to another actor
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._supervisor = Supervisor(settings)
        self._down_since: float | None = None
        self._probes = 0
        self._probe: asyncio.Task[bytes] | None = None
        self._hashes = b""
        self._open = 0  # requests of clients
        self._channels: dict[str, Channel] = {}  # one per listening gateway
        self._supervisor.start()
        if why := await self._supervisor.load_error():
            raise did_not_start(why)

    async def facts(self) -> bytes:
        assert self._supervisor.facts is not None
        return encode(Ready(self._supervisor.facts))

    async def has_token_authentication(self) -> bool:
        return has_token_authentication()

    async def run(
        self, frame: bytes, gateway: str = "", route: Route | None = None
    ) -> AsyncIterator[bytes | str]:
        """Run one request. If its gateway listens, the only item is the name of the channel that
        carries the messages, and the call ends after the last of them has left. Otherwise the items
        are the batches. A caller that cancels the call aborts the request. `route` is for the
        router alone."""
        message: Work = decode_to_engine(frame)  # type: ignore[assignment]
        shared = self._channels.get(gateway)
        channel = shared or Channel()
        try:
            running = self._supervisor.submit(message, channel.signal)
        except Problem as problem:
            yield wire.pack(Refused.of(message.request_id, problem))
            return
        left = channel.add(running)
        self._open += 1
        try:
            if shared is not None:
                yield shared.name
                await left
                return
            async for batch in channel.batches():
                yield batch
        finally:
            self._open -= 1
            running.close()
            if shared is None:
                channel.remove(running)
            # Otherwise the channel still carries the result of an aborted request: the gateway
            # counts its usage.

    async def listen(self, gateway: str, name: str, replica: str = "") -> AsyncIterator[bytes]:
        """The batches of all requests that a gateway sends from now on, until it cancels this call.
        `replica` is for the router alone."""
        if gateway in self._channels:
            return
        channel = self._channels[gateway] = Channel(name)
        try:
            async for batch in channel.batches(forever=True):
                yield batch
        finally:
            del self._channels[gateway]
            channel.close()

    # ------------------------------------------------------------------------ called by Ray Serve

    async def check_health(self) -> None:
        """Raises when the engine cannot be restarted."""
        if self._supervisor.fatal.done():
            raise RuntimeError(self._supervisor.fatal.result())
        if self._supervisor.ready.is_set():
            self._down_since = None
        elif self._down_since is None:
            self._down_since = time.monotonic()
        elif time.monotonic() - self._down_since > RESTART_SECONDS:
            raise RuntimeError(f"the engine is down for more than {RESTART_SECONDS:g} seconds")

    def record_replica_metadata(self) -> dict[str, object]:
        """Report the replica's facts to Ray Serve, which calls this once, when it is ready."""
        assert self._supervisor.facts is not None
        return {"fingerprint": self._supervisor.facts.fingerprint}

    async def record_routing_stats(self) -> dict[str, object]:
        """The report that reaches the router of every gateway."""
        up = self._supervisor.ready.is_set()
        [(_, state)] = self._supervisor.engines()
        return {
            "up": up,
            "hashes": await self._prefix_hashes() if up else b"",
            "metrics": self._supervisor.metrics,
            "waiting": state.waiting,
            "restarts": state.restarts,
            "pid": os.getpid(),
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        [(_, state)] = self._supervisor.engines()
        usage = self._supervisor.stats.get("kv_cache_usage_ratio", 0.0)
        return {
            # Serve's own count includes the calls of listen().
            "open": float(self._open),
            "waiting": float(state.waiting),
            "kv_cache_usage": float(usage),
        }

    async def _prefix_hashes(self) -> bytes:
        """An engine in a long step answers late: the report then has the hashes of the last one."""
        if self._probe is None:
            self._probe = asyncio.create_task(self._ask_prefix_hashes())
        done, _ = await asyncio.wait((self._probe,), timeout=REPORT_SECONDS)
        if done:
            self._hashes, self._probe = self._probe.result(), None
        return self._hashes

    async def _ask_prefix_hashes(self) -> bytes:
        self._probes += 1
        question = Inspect(f"prefix-{self._probes}", "", "prefix", {"limit": MAX_HASHES})
        try:
            answer = await self._supervisor.submit(question).result()
        except Problem:  # the engine is being restarted: its cache is empty
            return b""
        assert isinstance(answer, Inspected)
        return b"".join(block_hash[:HASH_BYTES] for block_hash in answer.data["hashes"])
