"""`verbatim serve` with a manual clock in its HTTP process: a test reaches a timeout at once, and
never by accident.

Every timer of the HTTP process (the event loop's, and `clock` of serve()) reads the same clock,
which does not run by itself. Commands are lines on stdin; each is answered by one line on stdout
after the due timers have run.

    advance SECONDS    move the clock
    received           print how many bytes of clients the HTTP protocol has read
    run                let the clock run in real time from now on (for a clean shutdown)

The engine process runs in real time.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from verbatim.cli.main import main
from verbatim.server import http_process as server
from verbatim.server.http.connection import HttpProtocol
from verbatim.server.logs import set_up_logs
from verbatim.server.settings import Settings

ITERATIONS = 20  # event loop iterations: enough for timer callbacks and the tasks they wake


class ManualClock(asyncio.SelectorEventLoop):
    """The standard event loop with a manual clock (uvloop's timers cannot be replaced)."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.running_since: float | None = None
        super().__init__()

    def time(self) -> float:
        return (
            self.now
            if self.running_since is None
            else self.now + time.monotonic() - self.running_since
        )


class CountingProtocol(HttpProtocol):
    received = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        CountingProtocol.received += len(data)


async def execute(loop: ManualClock, command: str, *values: str) -> None:
    for _ in range(ITERATIONS):  # first read what arrived before the command
        await asyncio.sleep(0)
    if command == "advance":
        loop.now += float(values[0])
    elif command == "run":
        loop.running_since = time.monotonic()
    for _ in range(ITERATIONS):
        await asyncio.sleep(0)
    os.write(1, b"%d\n" % CountingProtocol.received)


def run(settings: Settings) -> int:
    set_up_logs(settings)
    server.raise_file_limit()
    loop = ManualClock()
    tasks: set[asyncio.Task[None]] = set()

    def on_command() -> None:
        line = os.read(0, 1000).decode()
        if not line:
            loop.remove_reader(0)
        else:
            tasks.add(loop.create_task(execute(loop, *line.split())))

    async def serve() -> int:
        loop.add_reader(0, on_command)
        return await server.serve(settings, loop.time)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(serve())


def start() -> None:
    patched: Any = server
    patched.run, patched.HttpProtocol = run, CountingProtocol
    main()


if __name__ == "__main__":
    start()
