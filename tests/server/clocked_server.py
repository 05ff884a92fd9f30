"""`verbatim serve` whose HTTP process has a clock that a test moves: a time limit is reached at once, and never by accident.

Every timer of the HTTP process (the event loop's, and `clock` of serve()) reads the same clock, which stands still from the
start. Commands are lines on stdin; each is answered by one line on stdout after the timers that are due have run.

    advance SECONDS    move the clock
    received           how many bytes clients have sent that the HTTP protocol has read
    run                let the clock run in real time from now on (for an orderly end)

The engine process is an ordinary one and keeps real time.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

from verbatim.cli.main import main
from verbatim.server import http_process as server
from verbatim.server.http.connection import HttpProtocol
from verbatim.server.logs import set_up_logs
from verbatim.server.settings import Settings

TURNS = 20  # of the event loop, for the callbacks of timers and the tasks that they wake


class ManualClock(asyncio.SelectorEventLoop):
    """The standard event loop: uvloop keeps its timers out of reach."""

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


async def obey(loop: ManualClock, command: str, *values: str) -> None:
    for _ in range(TURNS):  # what came before the command is read first
        await asyncio.sleep(0)
    if command == "advance":
        loop.now += float(values[0])
    elif command == "run":
        loop.running_since = time.monotonic()
    for _ in range(TURNS):
        await asyncio.sleep(0)
    os.write(1, b"%d\n" % CountingProtocol.received)


def run(settings: Settings) -> int:
    set_up_logs(settings)
    server.raise_file_limit()
    loop = ManualClock()
    tasks: set[asyncio.Task[None]] = set()

    def hear() -> None:
        line = os.read(0, 1000).decode()
        if not line:
            loop.remove_reader(0)
        else:
            tasks.add(loop.create_task(obey(loop, *line.split())))

    async def serve() -> int:
        loop.add_reader(0, hear)
        return await server.serve(settings, loop.time)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(serve())


if __name__ == "__main__":
    patched: Any = server
    patched.run, patched.HttpProtocol = run, CountingProtocol
    sys.exit(main())
