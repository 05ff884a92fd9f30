"""Supervisor: the start, the end and the metrics of engine processes, without HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from eventually import eventually_async
from verbatim.server.api.common.request_context import EventStream, RequestContext
from verbatim.server.api.openai.protocol import PROTOCOL
from verbatim.server.process import engine_process, wire
from verbatim.server.process.message_codec import decode_from_engine
from verbatim.server.process.messages import Failed, Ready, Tokenize, Tokenized
from verbatim.server.process.supervisor import Supervisor
from verbatim.server.server_state import State
from verbatim.server.settings import EXECUTOR_THREADS, Settings


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


async def engine_that_fails(monkeypatch: pytest.MonkeyPatch, error: Exception) -> str:
    """The message of an engine process whose model cannot be loaded, run in this process."""

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(engine_process, "open_engine", fail)
    ours, theirs = socket.socketpair()
    ours.sendall(wire.pack(Supervisor(Settings(model="m"))._start_message()))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        assert await engine_process.serve(theirs.detach()) == 3
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, handler)
    reader, writer = await asyncio.open_connection(sock=ours)
    message = await wire.read(reader, decode_from_engine)
    writer.close()
    assert isinstance(message, Failed)
    return message.message


def test_a_long_prefill_is_logged_once_per_tenth(caplog: pytest.LogCaptureFixture) -> None:
    prefills = engine_process.PrefillLog()
    with caplog.at_level("INFO"):
        for computed in (10, 100, 150, 199, 200, 950):
            prefills.add([("req_a", computed, 1000)])
        prefills.add([])
        prefills.add([("req_a", 500, 1000)])  # preempted, and started again
    found = [record.getMessage().split()[3] for record in caplog.records]
    assert found == ["10", "100", "200", "950", "500"]


async def test_an_engine_without_memory_names_kv_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native code only says std::bad_alloc."""
    message = await engine_that_fails(monkeypatch, MemoryError("std::bad_alloc"))
    assert "--kv-memory" in message


async def test_the_threads_of_a_process_do_not_grow_with_its_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """asyncio's own pool has one thread per CPU and four more, up to 32."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    await engine_that_fails(monkeypatch, ValueError("no model"))
    submitted = threading.Event()

    def name() -> str:
        submitted.wait()
        return threading.current_thread().name

    named = asyncio.gather(*(asyncio.to_thread(name) for _ in range(50)))
    await asyncio.sleep(0)
    submitted.set()
    assert len(set(await named)) == EXECUTOR_THREADS


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


@pytest.mark.parametrize(("ready", "crashes"), [(False, 1), (True, 3)])
async def test_an_engine_that_crashes_again_and_again_names_kv_memory(
    ready: bool, crashes: int
) -> None:
    """A limit on the memory kills every engine process, before it is ready or shortly after."""
    supervisor = Supervisor(Settings(model="m", test_engine="pipeline", backoff_seconds=0.01))
    supervisor.start()
    for _ in range(crashes):
        if ready:
            await supervisor.ready.wait()
        while supervisor.pid is None:
            await asyncio.sleep(0)
        assert not supervisor.fatal.done()
        os.kill(supervisor.pid, signal.SIGABRT)
        await supervisor.ended.wait()
    assert "--kv-memory" in await supervisor.fatal
    await supervisor.close()


async def test_a_context_that_the_cache_reduces_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    supervisor = Supervisor(Settings(model="m", test_engine="pipeline", engine={"kv_blocks": 4}))
    engine = engine_process.open_engine(supervisor._start_message(), lambda: None)
    engine.close()
    assert "holds 65 tokens of one sequence" in caplog.text


def ready_supervisor() -> Supervisor:
    """A supervisor whose engine is ready and answers nothing."""
    supervisor = Supervisor(Settings())
    outbox: Any = SimpleNamespace(put=lambda message: None, put_frame=lambda frame: None)
    supervisor._outbox = outbox
    supervisor.ready.set()
    return supervisor


def new_call(supervisor: Supervisor) -> RequestContext:
    own = {"verbatim.id": "r", "verbatim.tenant": "", "verbatim.arrived": 0.0}
    request = Request({"type": "http", "method": "POST", "headers": [], **own})
    state = State(Settings(), supervisor, lambda: 0.0)
    return RequestContext(request, state, PROTOCOL.routes[0], PROTOCOL)


async def test_the_engine_may_die_after_a_stream_has_ended() -> None:
    """The engine dies before it has answered the abort of a request whose client disconnected."""
    supervisor = ready_supervisor()
    call = new_call(supervisor)
    running = call.submit(Tokenize("r", "", text="a"))

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    async def events() -> Any:
        while not running.closed:
            await call.signal.wait()
        return
        yield b""

    await EventStream(call, events())({}, receive, send)
    assert supervisor.open_requests == 1
    call._failed()  # a finished timeout is not rescheduled
    supervisor._fail_running()
    assert supervisor.open_requests == 0


async def test_an_error_while_one_request_fails_does_not_stop_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    supervisor = ready_supervisor()
    first, second = (supervisor.submit(Tokenize(name, "", text="a")) for name in "ab")

    def broken() -> None:
        raise RuntimeError("a broken handler")

    first.on_fail = broken
    supervisor._fail_running()
    assert first.problem is not None
    assert second.problem is not None
    assert supervisor.ledger.states == {"engine_died": 2}
    assert "a broken handler" in caplog.text


async def test_a_message_that_cannot_be_aborted_is_counted_until_the_engine_answers() -> None:
    """It may still queue in the engine after its client has disconnected."""
    supervisor = ready_supervisor()
    call = new_call(supervisor)
    admission = call.state.admission
    call.admission.enter_context(admission.admit(call.tenant))
    ids = [call.submit(Tokenize(call.next_id(), "", text="a")).id for _ in range(2)]
    call.close()
    for request_id in ids:
        assert admission.open == 1
        supervisor._handle(Tokenized(request_id, [], [], ()))

    async def released() -> bool:
        return admission.open == 0

    await eventually_async(released)
