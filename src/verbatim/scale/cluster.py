"""The gateway's side of the replicas: the Supervisor of the HTTP process, with engines on Ray.

A handler submits a Work message and gets a Running request, as with one engine process. Here a task
per request sends the message to the replica that the router chooses. What comes back arrives on one
channel per replica, the messages of all its requests together (channel.py); on the request's own
call, if the gateway does not listen to that replica yet. When a replica dies, its running requests
fail with an error; the others and the service go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from verbatim.base.errors import VerbatimError
from verbatim.base.json_io import JsonObject
from verbatim.observe.engine_metrics import Registry
from verbatim.observe.merge_metrics import merge
from verbatim.scale.routes.prompt_hashes import PromptHashes
from verbatim.scale.routes.routing import Route
from verbatim.server.problem import Problem
from verbatim.server.process import wire
from verbatim.server.process.message_codec import decode_from_engine, encode
from verbatim.server.process.messages import Generated, Refused, Result, Work
from verbatim.server.process.running import Running, Signal
from verbatim.server.process.supervisor import EngineState, Supervisor
from verbatim.server.settings import Settings

log = logging.getLogger("verbatim.scale")
PROGRESS_SECONDS = 10.0  # interval of log lines while the replicas start
POLL_SECONDS = 0.5  # interval at which the gateway reads the replicas' reports
ROUTER_HELP = {
    "requests": "requests sent to replicas",
    "prefix_possible": "requests of which a replica had a part of the prefix",
    "prefix_found": "of these, requests sent to such a replica",
}
DIED = Problem(
    "engine_died",
    "the replica that ran this request died; send the request again for the same answer",
    retry_after=1,
)


class Service(Protocol):
    """The replicas, as the gateway starts and calls them (deploy.py; a fake in tests)."""

    def start(self) -> PromptHashes | None:
        """Deploy the replicas and wait until they are ready; blocks. Returns the means to route by
        prefix; None: route by load."""

    def progress(self) -> str:
        """How far start() is, in words; empty: unknown. Blocks shortly."""

    async def facts(self) -> bytes: ...

    def run(self, frame: bytes, gateway: str, route: Route) -> object:
        """An async iterator with cancel(): Replica.run() of the replica that the router chooses."""

    def listen(self, gateway: str, channel: str, replica: str) -> object:
        """An async iterator with cancel(): Replica.listen() of one replica."""

    def reports(self) -> dict[str, JsonObject]:
        """The newest report of each replica that is alive."""

    def routing(self) -> dict[str, int]:
        """Counts by the names of ROUTER_HELP."""

    def stop(self) -> None:
        """Delete the replicas; blocks. A start() that still runs in another thread ends soon."""


@dataclass(slots=True)
class Listener:
    """A channel from one replica to this gateway."""

    replica: str
    requests: set[str] = field(default_factory=set)  # whose messages it carries
    polls_gone: int = 0  # reads of the reports since the replica is missing there
    task: asyncio.Task[None] | None = None


class Cluster(Supervisor):
    def __init__(
        self, settings: Settings, clock: Callable[[], float] = time.monotonic, *, service: Service
    ) -> None:
        super().__init__(settings, clock)
        self._service = service
        self._hashes: PromptHashes | None = None
        self._id = secrets.token_hex(8)
        self._relays: dict[str, asyncio.Task[None]] = {}
        self._listeners: dict[str, Listener] = {}  # by the name of its channel
        self._reports: dict[str, JsonObject] = {}
        self._replicas_text = ""  # the replicas' metrics
        self._starting: asyncio.Task[PromptHashes | None]

    # ------------------------------------------------------------------------------------ requests

    def submit(self, message: Work, signal: Signal | None = None) -> Running:
        if not self.ready.is_set():
            raise Problem("unavailable", "no replica is ready; try again shortly", retry_after=2)
        frame = encode(message)  # may raise, so it comes before any bookkeeping
        running, request_id = self._open(message, signal), message.request_id
        task = self._relays[request_id] = asyncio.create_task(self._relay(message, frame))
        task.add_done_callback(lambda done: self._relayed(request_id, done))
        return running

    def abort(self, running: Running) -> None:
        """Stop the relay; the replica then aborts the request in its engine."""
        if (task := self._relays.get(running.id)) is not None:
            task.cancel()

    async def _relay(self, message: Work, frame: bytes) -> None:
        """Run one request on a replica. It ends in exactly one state, whatever happens."""
        stream: Any = None
        request_id, on_channel = message.request_id, False
        try:
            route = Route() if self._hashes is None else await self._hashes.route(message)
            stream = self._service.run(frame, self._id, route)
            async for part in stream:
                if isinstance(part, bytes):
                    self._receive(part)
                elif (listener := self._listeners.get(part)) is None:
                    raise ConnectionError("its channel is closed")
                else:
                    listener.requests.add(request_id)
                    on_channel = True
        except asyncio.CancelledError:
            if stream is not None:
                stream.cancel()
            self._end_aborted(request_id)
        except Exception as error:
            # Ray has many errors for an actor that is gone; none is the client's fault.
            log.warning("request %s lost its replica: %s", request_id, _first_line(error))
            on_channel = False
        finally:
            if not on_channel:  # otherwise its last message may still be on its way
                self._lose(request_id)

    def _relayed(self, request_id: str, task: asyncio.Task[None]) -> None:
        del self._relays[request_id]
        if task.cancelled():  # before its first step: not a line of _relay() has run
            self._end_aborted(request_id)

    async def _listen(self, name: str, listener: Listener) -> None:
        stream: Any = None
        try:
            stream = self._service.listen(self._id, name, listener.replica)
            async for batch in stream:
                self._receive(batch)
        except asyncio.CancelledError:
            if stream is not None:
                stream.cancel()
        except Exception as error:
            log.debug("the channel of replica %s broke: %s", listener.replica, _first_line(error))
        finally:
            del self._listeners[name]
            for request_id in listener.requests:
                self._lose(request_id)

    def _receive(self, batch: bytes) -> None:
        for body in wire.split(batch):
            self._handle(decode_from_engine(body))

    def _lose(self, request_id: str) -> None:
        """End a request whose replica is gone, if it is still open."""
        if (running := self._running.pop(request_id, None)) is not None:
            running.fail(DIED)
            self.ledger.close(request_id, "engine_died")
            self.abort(running)

    def _end_aborted(self, request_id: str) -> None:
        if (running := self._running.pop(request_id, None)) is not None:
            code = running.problem.code if running.problem is not None else ""
            self.ledger.close(request_id, code if code in ("timeout", "slow_reader") else "cancel")

    # The last message of a request that was aborted here may still come: only its usage counts.

    def _refused(self, message: Refused) -> None:
        if message.request_id not in self._running:
            return
        if message.code != "engine_died":
            super()._refused(message)
            return
        running = self._running.pop(message.request_id)
        running.fail(message.problem())
        self.ledger.close(running.id, "engine_died")

    def _finished(self, result: Result) -> None:
        if result.request_id in self._running:
            super()._finished(result)
        elif isinstance(result, Generated):
            self.ledger.add(result.usage)

    # ------------------------------------------------------------------------------- start, close

    async def _supervise(self) -> None:
        log.info("starting the replicas on Ray")
        try:
            self._hashes = await self._start_replicas()
            if not self._closing.is_set():
                self._handle(decode_from_engine(await self._service.facts()))
        except Exception as error:
            if not isinstance(error, VerbatimError):
                log.debug("the replicas could not start", exc_info=error)
            self.fatal.set_result(str(error))
        while not self._closing.is_set() and not self.fatal.done():
            self._read_reports()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), POLL_SECONDS)
        listening = [one.task for one in self._listeners.values() if one.task is not None]
        tasks = [*self._relays.values(), *listening]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._service.stop)
        await asyncio.gather(self._starting, return_exceptions=True)

    async def _start_replicas(self) -> PromptHashes | None:
        """A model may take any time to download and load: wait without a deadline, and log how far
        it is. close() ends the wait."""
        starting = asyncio.create_task(asyncio.to_thread(self._service.start))
        self._starting = starting
        closing = asyncio.create_task(self._closing.wait())
        began = self._clock()
        while True:
            ends = (starting, closing)
            await asyncio.wait(ends, timeout=PROGRESS_SECONDS, return_when="FIRST_COMPLETED")
            if closing.done():
                return None
            if starting.done():
                closing.cancel()
                return starting.result()
            with contextlib.suppress(Exception):  # Serve itself is being started
                if progress := await asyncio.to_thread(self._service.progress):
                    log.info("replicas after %.0f s: %s", self._clock() - began, progress)

    async def close(self) -> None:
        self._closing.set()
        self.ready.clear()
        if self._task is not None:
            await self._task

    def _read_reports(self) -> None:
        """Take the replicas' reports. A service without a replica answers 503 until Serve has
        replaced one."""
        reports = self._service.reports()
        self._keep_listeners(reports)
        if reports != self._reports:
            if reports.keys() != self._reports.keys():
                log.info(
                    "replicas: %d, before: %d; open requests: %d, of which the engines queue %d",
                    len(reports),
                    len(self._reports),
                    self.open_requests,
                    sum(report.get("waiting", 0) for report in reports.values()),
                )
            self._reports = reports
            self.reports += 1
            texts = {name: report.get("metrics", "") for name, report in reports.items()}
            self._replicas_text = merge("replica", texts)
        self.metrics = self._replicas_text + self._router_text()
        alive = any(report.get("up", True) for report in reports.values())
        if alive != self.ready.is_set():
            (self.ready.set if alive else self.ready.clear)()
            if not alive:
                log.error("no replica is ready; requests get 503 until Ray has started one")

    def _keep_listeners(self, reports: Collection[str]) -> None:
        """Listen to every replica; to one that leaves, until its last request has ended: Serve
        stops it when no call is open."""
        for listener in self._listeners.values():
            listener.requests.intersection_update(self._running)
            listener.polls_gone = 0 if listener.replica in reports else listener.polls_gone + 1
            # In the second poll every request that was routed there is known.
            if listener.polls_gone > 1 and not listener.requests and listener.task is not None:
                listener.task.cancel()
        for replica in set(reports) - {listener.replica for listener in self._listeners.values()}:
            name, listener = secrets.token_hex(8), Listener(replica)
            self._listeners[name] = listener
            listener.task = asyncio.create_task(self._listen(name, listener))

    def engines(self) -> list[tuple[dict[str, str], EngineState]]:
        found = []
        for name, report in sorted(self._reports.items()):
            waiting, restarts = report.get("waiting", 0), report.get("restarts", 0)
            state = EngineState(waiting, restarts, report.get("up", True))
            found.append(({"replica": name}, state))
        return found

    def _router_text(self) -> str:
        registry = Registry()
        for name, count in self._service.routing().items():
            registry.number(f"verbatim_router_{name}_total", ROUTER_HELP[name]).value = count
        registry.number("verbatim_replicas", "replicas that are alive").value = len(self._reports)
        return registry.render()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
