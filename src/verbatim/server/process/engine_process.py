"""The engine process: `python -m verbatim.server.process.engine_process FD [LOG_FORMAT]`.

Messages of the HTTP process (messages.py) come in over one socket; heartbeats, deltas and results
go out. This process knows no HTTP, keys or addresses. It ends when the socket closes, so it never
outlives a killed parent. Templates and tokenisation run here: a hostile prompt that crashes them
crashes only the engine process, which the supervisor restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from verbatim.base.errors import MAIN_MEMORY
from verbatim.observe.engine_metrics import Registry
from verbatim.server.logs import JsonLines
from verbatim.server.process import messages, wire
from verbatim.server.process.cpu_affinity import native_threads, pin_threads
from verbatim.server.process.engine_session import EngineSession
from verbatim.server.process.message_codec import WireError, decode_to_engine
from verbatim.server.process.results import cost_of
from verbatim.server.settings import EXECUTOR_THREADS

if TYPE_CHECKING:
    from verbatim.engine.calls.async_engine import AsyncEngine
    from verbatim.engine.loaded_model import EngineTokenizer

BEAT_SECONDS = 0.25  # heartbeat interval; also the age of the statistics in /metrics
METRICS_EVERY = 4  # heartbeats; every fourth has the text of the engine's metrics
log = logging.getLogger("verbatim.engine")


def open_engine(start: messages.Start, found: Callable[[], None]) -> AsyncEngine:
    """Load the model and set the key of its prefix cache; blocks."""
    engine = _load(start, found)
    if start.prefix_key and engine.core.disk_cache is None:  # a disk cache has its own key
        engine.core.scheduler.cache.set_prefix_key(start.prefix_key)
    return engine


def open_text(
    model: str, *, revision: str | None, offline: bool, test_engine: str
) -> tuple[EngineTokenizer, object]:
    """The tokenizer and the chat template (None: the model has none), without the weights."""
    from verbatim.engine.loading.model_info import load_text

    if test_engine:
        from verbatim.testing import fakes as testing

        loaded = testing.server_parts(test_engine)
        return loaded.tokenizer, loaded.template
    return load_text(model, revision=revision, offline=offline)


def _load(start: messages.Start, found: Callable[[], None]) -> AsyncEngine:
    """Load the model; blocks. Calls `found` when the name turns out to be a model's: its file
    exists, or the hub lists it. `test_engine` is a hidden flag for tests: a fake engine of
    verbatim.testing.fakes."""
    from verbatim.engine.calls.async_engine import AsyncEngine
    from verbatim.hub.catalog import LOOKING

    # Modules stay: collections need not visit them, nor do those at the exit. The engine is not
    # frozen, because nanobind reports a native object that the exit does not collect as a leak.
    gc.freeze()
    gc.enable()
    if start.test_engine:
        from verbatim.testing import fakes as testing

        found()
        return AsyncEngine.from_loaded(testing.server_parts(start.test_engine), **start.engine)
    before = native_threads()
    if os.path.exists(os.path.expanduser(start.model)):
        found()
    engine = AsyncEngine(
        start.model,
        revision=start.revision,
        offline=start.offline,
        progress=lambda text, *_: None if text.startswith(LOOKING) else found(),
        **start.engine,
    )
    info = engine.loaded.backend.info
    log.info("backend %s %s", info.name, info.detail)
    if info.note:
        log.warning("%s", info.note)
    if pin_threads(engine, before):
        log.info("each engine thread is pinned to a core of its own")
    return engine


class PrefillLog:
    """Log lines of long prefills: those in progress at a heartbeat, one line per tenth of the
    prompt."""

    def __init__(self) -> None:
        self._tenths: dict[str, int] = {}

    def add(self, prefills: Sequence[tuple[str, int, int]]) -> None:
        before, self._tenths = self._tenths, {}
        for request_id, computed, tokens in prefills:
            self._tenths[request_id] = computed * 10 // tokens
            if before.get(request_id, -1) < self._tenths[request_id]:
                log.info("request %s: prefill %d of %d tokens", request_id, computed, tokens)


async def beat(
    engine: AsyncEngine,
    outbox: wire.Outbox,
    bandwidth: Bandwidth,
    metrics_every: int,
    prefills: PrefillLog | None,
) -> None:
    """Send heartbeats until the engine fails. The supervisor kills this process when they stop."""
    for count in itertools.count(1):
        await asyncio.sleep(BEAT_SECONDS)
        if engine.error is not None or engine.loaded.failure():
            break
        if prefills is not None:
            from verbatim.engine.step.core_metrics import prefills as in_progress

            prefills.add(in_progress(list(engine.core.requests.values())))
        outbox.put(heartbeat(engine, bandwidth if count % metrics_every == 0 else None))
    error = engine.error or engine.loaded.failure()
    log.error("the engine failed: %r", error, exc_info=engine.error)


def heartbeat(engine: AsyncEngine, bandwidth: Bandwidth | None) -> messages.Heartbeat:
    """The engine's counters; given `bandwidth`, also its metrics as Prometheus text."""
    stats = engine.stats()
    if bandwidth is None:
        return messages.Heartbeat(stats, None)
    return messages.Heartbeat(stats, engine.metrics() + bandwidth.text(stats) + tasks_text())


def tasks_text() -> str:
    registry = Registry()
    tasks = registry.number("verbatim_engine_tasks", "asyncio tasks of the engine process")
    tasks.value = len(asyncio.all_tasks())
    return registry.render()


class Bandwidth:
    """Memory bandwidth used to read the weights, in bytes per second (steps since the last call
    times the bytes of a step with their mean number of rows), and its share of the bandwidth that
    `verbatim bench` measured."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._card, limits = cost_of(engine)
        self._limit = limits.read_bytes if limits is not None else None
        self._last, self._steps, self._rows = time.monotonic(), 0, 0

    def text(self, stats: dict[str, Any]) -> str:
        now, steps = time.monotonic(), int(stats.get("steps_total", 0))
        rows, made = int(stats.get("computed_tokens_total", 0)), steps - self._steps
        read = made * self._card.read_bytes((rows - self._rows) / made) if made else 0.0
        rate = read / max(now - self._last, 1e-6)
        self._last, self._steps, self._rows = now, steps, rows
        registry = Registry()
        weights = registry.number("verbatim_weight_bytes_per_second", "weights read from memory")
        weights.value = round(rate)
        if self._limit:
            share = registry.number(
                "verbatim_memory_bandwidth_share", "share of the measured bandwidth"
            )
            share.value = round(rate / self._limit, 4)
        return registry.render()


async def open_session(
    start: messages.Start, outbox: wire.Outbox
) -> tuple[AsyncEngine, EngineSession, messages.Ready]:
    loop, once = asyncio.get_running_loop(), itertools.count()

    def found() -> None:  # in the thread that loads the model
        if next(once) == 0:
            loop.call_soon_threadsafe(outbox.put, messages.Loading())

    engine = await asyncio.to_thread(open_engine, start, found)
    session = EngineSession(engine, outbox, start)
    return engine, session, messages.Ready(session.facts())


async def serve(fd: int) -> int:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(EXECUTOR_THREADS, "verbatim-server"))
    # A service manager may signal every process; the parent decides when this process ends.
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    loop.add_signal_handler(signal.SIGTERM, lambda: None)
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd), limit=1 << 20)
    outbox = wire.Outbox(writer)
    start = await wire.read(reader, decode_to_engine)
    if start is None:
        return 0
    assert isinstance(start, messages.Start), f"the first message is a {type(start).__name__}"
    try:
        engine, session, ready = await open_session(start, outbox)
    except Exception as error:
        no_memory = isinstance(error, MemoryError) or str(error) == "can't start new thread"
        text = MAIN_MEMORY if no_memory else str(error)
        outbox.put(messages.Failed(text))  # the HTTP process reports it
        await outbox.drain()
        return messages.NOT_LOADED
    bandwidth = Bandwidth(engine)
    outbox.put(heartbeat(engine, bandwidth))  # before Ready: /metrics is then complete at once
    outbox.put(ready)
    every = 1 if start.test_engine else METRICS_EVERY  # tests wait for the next metrics
    prefills = PrefillLog() if start.verbose else None
    heartbeats = asyncio.create_task(beat(engine, outbox, bandwidth, every, prefills))
    dispatcher = asyncio.create_task(dispatch(reader, session))
    tasks, failed = (heartbeats, dispatcher), False
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if dispatcher.done() and (failure := dispatcher.exception()) is not None:
            log.error("the engine process ends: %s", failure, exc_info=failure)
            return 5
        failed = heartbeats.done()
    finally:
        for task in tasks:
            task.cancel()
        session.cancel()
        await asyncio.to_thread(engine.close)
        with contextlib.suppress(Exception):
            outbox.put(heartbeat(engine, bandwidth))  # the counters at the end
            await outbox.drain()
            writer.close()
    return 4 if failed or engine.error is not None else 0


async def dispatch(reader: asyncio.StreamReader, session: EngineSession) -> None:
    """Handle the parent's messages until it sends Close or closes the socket."""
    while (message := await wire.read(reader, decode_to_engine)) is not None:
        match message:
            case messages.Abort():
                session.abort(message.request_id)
            case messages.Close():
                return
            case messages.Start():
                raise WireError("a second Start")
            case _:
                session.submit(message)


async def serve_or_exit(fd: int) -> int:
    """serve(). A process whose model is not loaded exits at once: to end its threads and native
    objects may need memory that it does not have."""
    code = await serve(fd)
    if code == messages.NOT_LOADED:
        os._exit(code)
    return code


def die_with_parent() -> None:
    """Linux: the kernel kills this process when its parent dies, even while a step holds the
    GIL."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


def main(argv: list[str]) -> int:
    gc.disable()  # until the modules are imported
    die_with_parent()
    logging.basicConfig(
        level=os.environ.get("VERBATIM_LOG", "INFO"),
        format="%(levelname)s engine: %(message)s",
        stream=sys.stderr,
    )
    if argv[2:] == ["json"]:  # the parent's log format
        logging.getLogger().handlers[0].setFormatter(JsonLines())
    try:
        import uvloop
    except ImportError:
        return asyncio.run(serve_or_exit(int(argv[1])))
    result: int = uvloop.run(serve_or_exit(int(argv[1])))
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv))
