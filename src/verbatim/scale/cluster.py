"""The gateway's side of the replicas: the Supervisor of the HTTP process, with engines on Ray.

A handler submits a Work message and gets a Running request, as with one engine process. Here a task
per request sends the message to the replica that the router chooses and relays what comes back.
When a replica dies, its running requests fail with an error; the others and the service go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from verbatim.base.errors import VerbatimError
from verbatim.observe.engine_metrics import Registry
from verbatim.observe.merge_metrics import merge
from verbatim.scale.prompt_hashes import PromptHashes
from verbatim.scale.routing import Route
from verbatim.server.api.api_errors import Problem
from verbatim.server.process.message_codec import decode_from_engine, encode
from verbatim.server.process.messages import Refused, Work
from verbatim.server.process.running import Running, Signal
from verbatim.server.process.supervisor import EngineState, Supervisor
from verbatim.server.settings import Settings

log = logging.getLogger("verbatim.scale")
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

    async def facts(self) -> bytes: ...

    def run(self, frame: bytes, route: Route) -> Any:
        """An async iterator over encoded messages, with cancel()."""

    def reports(self) -> dict[str, dict[str, Any]]:
        """The newest report of each replica that is alive."""

    def routing(self) -> dict[str, int]:
        """Counts by the names of ROUTER_HELP."""

    def stop(self) -> None: ...


class Cluster(Supervisor):
    def __init__(
        self, settings: Settings, clock: Callable[[], float] = time.monotonic, *, service: Service
    ) -> None:
        super().__init__(settings, clock)
        self._service = service
        self._hashes: PromptHashes | None = None
        self._relays: dict[str, asyncio.Task[None]] = {}
        self._reports: dict[str, dict[str, Any]] = {}

    # ------------------------------------------------------------------------------------ requests

    def submit(self, message: Work, signal: Signal | None = None) -> Running:
        if not self.ready.is_set():
            raise Problem("unavailable", "no replica is ready; try again shortly", retry_after=2)
        frame = encode(message)  # may raise, so it comes before any bookkeeping
        request_id, max_bytes = message.request_id, self.settings.limits.max_stream_bytes
        running = Running(request_id, message.tenant, self.abort, max_bytes, signal or Signal())
        self._running[request_id] = running
        self.ledger.open(request_id)
        self._relays[request_id] = asyncio.create_task(self._relay(message, frame))
        return running

    def abort(self, running: Running) -> None:
        """Stop the relay; the replica then aborts the request in its engine."""
        if (task := self._relays.get(running.id)) is not None:
            task.cancel()

    async def _relay(self, message: Work, frame: bytes) -> None:
        """Run one request on a replica. It ends in exactly one state, whatever happens."""
        stream: Any = None
        try:
            route = Route() if self._hashes is None else await self._hashes.route(message)
            stream = self._service.run(frame, route)
            async for part in stream:
                self._handle(decode_from_engine(part))
        except asyncio.CancelledError:
            if stream is not None:
                stream.cancel()
            self._end_aborted(message.request_id)
        except Exception as error:
            # Ray has many errors for an actor that is gone; none is the client's fault.
            log.warning("request %s lost its replica: %s", message.request_id, _first_line(error))
        finally:
            del self._relays[message.request_id]
            if (running := self._running.pop(message.request_id, None)) is not None:
                running.fail(DIED)
                self.ledger.close(running.id, "engine_died")

    def _end_aborted(self, request_id: str) -> None:
        if (running := self._running.pop(request_id, None)) is not None:
            code = running.problem.code if running.problem is not None else ""
            self.ledger.close(request_id, code if code in ("timeout", "slow_reader") else "cancel")

    def _refused(self, message: Refused) -> None:
        if message.code != "engine_died":
            super()._refused(message)
            return
        running = self._running.pop(message.request_id)
        running.fail(message.problem())
        self.ledger.close(running.id, "engine_died")

    # ------------------------------------------------------------------------------- start, close

    async def _supervise(self) -> None:
        log.info("starting the replicas on Ray")
        try:
            self._hashes = await asyncio.to_thread(self._service.start)
            self._handle(decode_from_engine(await self._service.facts()))
        except Exception as error:
            if not isinstance(error, VerbatimError):
                log.debug("the replicas could not start", exc_info=error)
            self.fatal.set_result(str(error))
        while not self._closing.is_set() and not self.fatal.done():
            self._read_reports()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), POLL_SECONDS)
        for task in list(self._relays.values()):
            task.cancel()
        await asyncio.to_thread(self._service.stop)

    async def close(self) -> None:
        self._closing.set()
        self.ready.clear()
        if self._task is not None:
            await self._task

    def _read_reports(self) -> None:
        """Take the replicas' reports. A service without a replica answers 503 until Serve has
        replaced one."""
        reports = self._service.reports()
        if reports != self._reports:
            self._reports = reports
            self.reports += 1
        texts = {name: report.get("metrics", "") for name, report in reports.items()}
        self.metrics = merge("replica", texts) + self._router_text()
        alive = any(report.get("up", True) for report in reports.values())
        if alive != self.ready.is_set():
            (self.ready.set if alive else self.ready.clear)()
            if not alive:
                log.error("no replica is ready; requests get 503 until Ray has started one")

    def engines(self) -> list[tuple[dict[str, str], EngineState]]:
        return [
            (
                {"replica": name},
                EngineState(
                    report.get("waiting", 0), report.get("restarts", 0), report.get("up", True)
                ),
            )
            for name, report in sorted(self._reports.items())
        ]

    def _router_text(self) -> str:
        registry = Registry()
        for name, count in self._service.routing().items():
            registry.number(f"verbatim_router_{name}_total", ROUTER_HELP[name]).value = count
        registry.number("verbatim_replicas", "replicas that are alive").value = len(self._reports)
        return registry.render()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
