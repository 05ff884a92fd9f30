"""The engine process: `python -m verbatim.server.engine_process FD [LOG_FORMAT]`. Jobs come in over one socket, deltas and answers go out.

It knows nothing of HTTP, keys or addresses. It ends when the socket closes, so no child outlives a killed parent.
Text is its business (templates, tokens, bytes), because here a hostile prompt can hurt no more than the engine, which is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from verbatim.server import wire
from verbatim.server.jobs import Jobs
from verbatim.server.logs import JsonLines
from verbatim.server.place import give_places, native_threads

if TYPE_CHECKING:
    from verbatim.engine.aio import AsyncEngine

BEAT_SECONDS = 0.25
log = logging.getLogger("verbatim.engine")


def open_engine(start: dict[str, Any]) -> AsyncEngine:
    """Blocking: reads the model. `test_engine` is a hidden flag of the tests and reaches nothing but verbatim.testing."""
    from verbatim.engine.aio import AsyncEngine

    if start["test_engine"]:
        from verbatim import testing

        return AsyncEngine.from_parts(testing.server_parts(start["test_engine"]), **start["engine"])
    before = native_threads()
    engine = AsyncEngine(start["model"], revision=start["revision"], offline=start["offline"], **start["engine"])
    info = engine.parts.backend.info
    log.info("backend %s %s", info.name, info.detail)
    if info.note:
        log.warning("%s", info.note)
    if give_places(engine, before):
        log.info("each of the engine's threads has a processor of its own")
    return engine


async def beat(engine: AsyncEngine, outbox: wire.Outbox, metrics_every: int = 4) -> None:
    """Tells the parent that this loop turns and what the engine has done; the parent decides what silence means. Ends when the engine failed."""
    count = 0
    bandwidth = Bandwidth(engine)
    while engine.error is None:
        message: wire.Message = {"t": "beat", "stats": engine.stats(), "alive": engine.alive}
        if count % metrics_every == 0:
            message["metrics"] = engine.metrics() + bandwidth.text(message["stats"]) + tasks_text()
        outbox.put(message)
        count += 1
        await asyncio.sleep(BEAT_SECONDS)
    log.error("the engine failed: %r", engine.error, exc_info=engine.error)


def tasks_text() -> str:
    name = "verbatim_engine_tasks"
    return f"# HELP {name} asyncio tasks of the engine process\n# TYPE {name} gauge\n{name} {len(asyncio.all_tasks())}\n"


class Bandwidth:
    """How much of the memory's speed the weights take: steps since the last look times their bytes, beside what `verbatim bench` measured."""

    def __init__(self, engine: AsyncEngine) -> None:
        from verbatim.observe.roofline import load_limits
        from verbatim.weights.catalog import cache_dir

        info = engine.parts.backend.info
        self._bytes = info.weight_bytes
        limits = load_limits(cache_dir()) if info.name != "cuda" else None  # which are the processor's
        self._limit = limits.read_bytes if limits is not None else None
        self._then, self._steps = time.monotonic(), 0

    def text(self, stats: dict[str, Any]) -> str:
        now, steps = time.monotonic(), int(stats.get("steps_total", 0))
        rate = (steps - self._steps) * self._bytes / max(now - self._then, 1e-6)
        self._then, self._steps = now, steps
        out = (
            "# HELP verbatim_weight_bytes_per_second weights read from memory\n# TYPE verbatim_weight_bytes_per_second gauge\n"
        )
        out += f"verbatim_weight_bytes_per_second {rate:.0f}\n"
        if self._limit:
            out += "# HELP verbatim_memory_bandwidth_share of the speed that verbatim bench measured here\n# TYPE verbatim_memory_bandwidth_share gauge\n"
            out += f"verbatim_memory_bandwidth_share {rate / self._limit:.4f}\n"
        return out


async def serve(fd: int) -> int:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # Ctrl-C goes to the whole group; the parent decides
    loop.add_signal_handler(signal.SIGTERM, lambda: None)
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd), limit=1 << 20)
    outbox = wire.Outbox(writer)
    start = await wire.read(reader)
    if start is None:
        return 0
    outbox.put({"t": "loading"})
    opening = asyncio.ensure_future(asyncio.to_thread(open_engine, start))
    try:
        engine = await opening
    except Exception as error:
        log.error("the engine could not start: %s", error)
        outbox.put({"t": "failed", "message": str(error)})
        await outbox.drain()
        return 3
    jobs = Jobs(engine, outbox, start)
    outbox.put({"t": "ready", **jobs.facts()})
    tasks = [asyncio.create_task(beat(engine, outbox)), asyncio.create_task(dispatch(reader, jobs))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        jobs.cancel()
        await asyncio.to_thread(engine.close)
        with contextlib.suppress(Exception):
            await outbox.drain()
            writer.close()
    return 0 if engine.error is None else 4


async def dispatch(reader: asyncio.StreamReader, jobs: Jobs) -> None:
    """Until the parent says close, or is gone."""
    while (message := await wire.read(reader)) is not None:
        match message["t"]:
            case "submit":
                jobs.submit(message)
            case "abort":
                jobs.abort(message["id"])
            case "close":
                return
            case other:
                raise AssertionError(f"no such message: {other!r}")


def die_with_parent() -> None:
    """Linux: the kernel kills this process when its parent dies, even while a step holds the interpreter."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


def main(argv: list[str]) -> int:
    die_with_parent()
    logging.basicConfig(
        level=os.environ.get("VERBATIM_LOG", "INFO"), format="%(levelname)s engine: %(message)s", stream=sys.stderr
    )
    if argv[2:] == ["json"]:  # one log, whichever process a line is from
        logging.getLogger().handlers[0].setFormatter(JsonLines())
    try:
        import uvloop
    except ImportError:
        return asyncio.run(serve(int(argv[1])))
    result: int = uvloop.run(serve(int(argv[1])))
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv))
