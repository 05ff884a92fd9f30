"""Replicas in this process: the engines, the gateway and the routing of `verbatim serve --ray`
without Ray. A replica can be killed as Ray would see it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

from verbatim.scale.cluster import Cluster
from verbatim.scale.replica import Replica
from verbatim.scale.routes.prompt_hashes import PromptHashes
from verbatim.scale.routes.routing import HASH_BYTES, Candidate, Decider, Route
from verbatim.server.app import make_app
from verbatim.server.batch_requests import call
from verbatim.server.process.engine_process import open_text
from verbatim.server.process.supervisor import Supervisor
from verbatim.server.server_state import State
from verbatim.server.settings import Settings

KEY = b"k" * 32


class ActorDied(Exception):
    pass


class Call:
    """What a DeploymentHandle returns for a streaming method."""

    def __init__(self, parts: AsyncIterator[Any], died: asyncio.Event) -> None:
        self._parts, self._died = parts, died
        self.cancelled = False

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        part = asyncio.ensure_future(anext(self._parts, None))
        died = asyncio.ensure_future(self._died.wait())
        try:
            await asyncio.wait((part, died), return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                raise ActorDied("the actor is dead")
            frame = await part
        finally:
            died.cancel()
            if not part.done():
                part.cancel()
        if frame is None:
            raise StopAsyncIteration
        return frame

    def cancel(self) -> None:
        self.cancelled = True


class LocalService:
    """The Service of a Cluster over Replica objects."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.replicas: dict[str, Replica] = {}
        self.died: dict[str, asyncio.Event] = {}
        self.open: dict[str, int] = {}
        self.decider = Decider()
        self.latest: dict[str, dict[str, Any]] = {}
        self.stopped = False
        self.batches = 0  # messages on the channels

    async def add(self, name: str) -> None:
        replica = Replica.__new__(Replica)
        await replica.__init__(self.settings, False)  # type: ignore[misc]
        self.replicas[name], self.died[name], self.open[name] = replica, asyncio.Event(), 0
        self.latest = {**self.latest, name: {}}

    def supervisor(self, name: str) -> Supervisor:
        return self.replicas[name]._supervisor

    async def kill(self, name: str) -> None:
        """SIGKILL the engine and break every call, as when the actor's process is killed."""
        replica = self.replicas.pop(name)
        pid = replica._supervisor.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.died[name].set()
        self.latest = {n: report for n, report in self.latest.items() if n != name}
        self.decider.prefixes.keep(self.replicas)
        await replica._supervisor.close()

    async def report(self) -> None:
        for name, replica in self.replicas.items():
            report = await replica.record_routing_stats()
            self.latest = {**self.latest, name: report}
            joined = report["hashes"]
            self.decider.prefixes.report(
                name, {joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)}
            )

    async def close(self) -> None:
        for replica in self.replicas.values():
            await replica._supervisor.close()

    # -------------------------------------------------------------- what a Cluster calls

    def start(self) -> PromptHashes | None:
        s = self.settings
        tokenizer, template = open_text(
            s.model, revision=None, offline=True, test_engine=s.test_engine
        )
        return PromptHashes(tokenizer, template, s.prefix_key)

    def progress(self) -> str:
        return ""

    async def facts(self) -> bytes:
        return await next(iter(self.replicas.values())).facts()

    def run(self, frame: bytes, gateway: str, route: Route) -> Call:
        candidates = [Candidate(name, self.open[name]) for name in self.replicas]
        name = self.decider.rank(route, candidates)[0]
        self.decider.routed(route, name, list(self.replicas))
        return Call(self._counted(name, frame, gateway), self.died[name])

    def listen(self, gateway: str, channel: str, replica: str) -> Call:
        return Call(self._listen(replica, gateway, channel), self.died[replica])

    async def _listen(self, replica: str, gateway: str, channel: str) -> AsyncIterator[bytes]:
        async with contextlib.aclosing(self.replicas[replica].listen(gateway, channel)) as batches:
            async for batch in batches:
                self.batches += 1
                yield batch

    async def _counted(self, name: str, frame: bytes, gateway: str) -> AsyncIterator[Any]:
        self.open[name] += 1
        try:
            async for part in self.replicas[name].run(frame, gateway):
                yield part
        finally:
            self.open[name] -= 1

    def reports(self) -> dict[str, dict[str, Any]]:
        return self.latest

    def routing(self) -> dict[str, int]:
        d = self.decider
        return {"requests": d.routed_total, "prefix_possible": d.possible, "prefix_found": d.found}

    def stop(self) -> None:
        self.stopped = True


class Gateway:
    """The HTTP application over the replicas, called without a socket."""

    def __init__(self, settings: Settings, service: LocalService) -> None:
        self.service = service
        self.cluster = Cluster(settings, service=service)
        self.state = State(settings, self.cluster)
        self.app = make_app(self.state)

    async def start(self) -> Gateway:
        self.cluster.start()
        await self.cluster.ready.wait()
        return self

    async def complete(self, prompt: Any, **more: Any) -> tuple[int, dict[str, Any]]:
        body = {"model": "m", "prompt": prompt, "max_tokens": 8, "seed": 7, **more}
        status, _, answer = await call(self.app, "/v1/completions", body, {})
        return status, answer

    async def close(self) -> None:
        await self.cluster.close()
        await self.service.close()
        assert self.cluster.ledger.balanced()


def settings_of(**more: Any) -> Settings:
    return Settings(
        model="m", test_engine="pipeline", prefix_key=KEY, **{"engine": {"threads": 1}, **more}
    )
