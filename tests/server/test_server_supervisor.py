"""Supervisor: the start, the end and the metrics of engine processes, without HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from eventually import eventually_async
from verbatim.server.process.messages import Ready
from verbatim.server.process.supervisor import Supervisor
from verbatim.server.settings import Settings


async def test_an_engine_that_was_just_spawned_is_closed_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """close() runs between the start of the process and the connection to it."""
    supervisor = Supervisor(Settings(model="m", test_engine="pipeline"))
    connect, closing = asyncio.open_connection, []

    async def closed() -> bool:
        return supervisor.closed

    async def connect_late(**options: Any) -> Any:
        closing.append(asyncio.ensure_future(supervisor.close()))
        await eventually_async(closed)
        return await connect(**options)

    monkeypatch.setattr(asyncio, "open_connection", connect_late)
    supervisor.start()

    async def began() -> bool:
        return bool(closing)

    await eventually_async(began)
    await closing[0]
    assert "does not end" not in caplog.text
    assert supervisor.facts is None


async def test_a_closed_supervisor_does_not_become_ready() -> None:
    supervisor = Supervisor(Settings())
    await supervisor.close()
    facts: Any = SimpleNamespace(name="m", context=1, fingerprint="f")
    supervisor._handle(Ready(facts))
    assert not supervisor.ready.is_set()


async def test_an_engine_that_dies_has_ended_until_the_next_is_ready() -> None:
    settings = Settings(model="m", test_engine="pipeline", backoff_seconds=0.01)
    supervisor = Supervisor(settings)
    supervisor.start()
    await supervisor.ready.wait()
    assert not supervisor.ended.is_set()
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    await supervisor.ended.wait()
    assert not supervisor.ready.is_set()
    await supervisor.ready.wait()
    assert not supervisor.ended.is_set()
    await supervisor.close()
    assert supervisor.ended.is_set()
