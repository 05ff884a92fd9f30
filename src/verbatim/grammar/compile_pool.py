"""Compile pool: grammar compiles of untrusted structures in expendable subprocesses.

llguidance bounds most of its work, but not all: the product of two hundred patterns, or a
`multipleOf` of eight digits, takes minutes and gigabytes. A thread cannot be killed, a process can.
In: a structure field of a request. Out: llguidance's grammar text, known to compile, and for a JSON
schema what the text does not enforce (Translation).

    with pool.slot(deadline):                      # at most SIZE compiles at once
        translation = pool.translate(field, value, deadline)
        ...                                        # the second compile, in this process

Each worker (compile_worker.py) runs at a low priority, with limits on memory and CPU time
per compile; the pool kills a worker that exceeds the wall-clock timeout. A worker is reused:
only the first compile, and the one after a kill, pay for interpreter start-up.

A worker never outlives this process, and no wait here is without a deadline. A waiting worker reads
end-of-input when this process ends; a computing one is killed by the kernel (Linux: parent-death
signal; everywhere: the CPU limit) or by its watcher thread. Workers are never stopped (SIGSTOP), so
every signal takes effect.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from verbatim.base.errors import ParameterError, UnsupportedError
from verbatim.grammar.translate import Translation

MEMORY = 1 << 30  # bytes of address space per worker; a compile within the limits uses about 50 MB
# Per compile, and more for a long text (compile_worker.py). Ordinary schemas take 0.5 to 3 ms, one
# of 70 KB 160 ms, one of 800 KB 1 s.
CPU_SECONDS = 0.75
# Wall-clock seconds per compile. The CPU limit is the real bound: on a loaded machine 0.75 s of CPU
# time may take ten times as long, and an ordinary compile must not time out.
TIMEOUT = 20.0
# Concurrent compiles. A tenant has one (engine/calls/fair_pool.py), so an expensive grammar of one
# tenant does not block the compiles of another.
SIZE = 2
# Until a process that died or was killed is reaped. Only a hang reaches it; on a loaded machine an
# exit may take seconds, and its code says why the compile is refused.
EXIT_SECONDS = 120.0

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from verbatim.grammar.compile_worker import main
main(**json.loads(sys.argv[2]))
"""
# SIGPROF: the CPU timer of one compile. SIGXCPU: RLIMIT_CPU, the backstop.
_CPU_SIGNALS = {getattr(signal, name, None) for name in ("SIGPROF", "SIGXCPU")}


class TooExpensive(Exception):
    """The compile exceeds the CPU or memory limit. Does not depend on load: a retry cannot help."""


class PoolBusy(Exception):
    """The structure was not compiled before its deadline. A retry may succeed."""


class WorkerDied(Exception):
    """The worker process ended during a compile. `code`: as of subprocess, -N is signal N."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"compile worker ended with {code}")
        self.code = code


class CompileWorker:
    """A worker process and the socket to it: one line of JSON each way per compile.

    A dedicated thread starts the process and reaps it. Linux sends the parent-death signal when the
    forking *thread* ends, so that thread must live exactly as long as the worker."""

    def __init__(self, command: list[str]) -> None:
        self._socket, theirs = socket.socketpair()
        self._buffer = b""
        self._ready = False
        self.process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, args=(command, theirs), daemon=True)
        self._thread.start()

    def _run(self, command: list[str], theirs: socket.socket) -> None:
        null = subprocess.DEVNULL
        with theirs, contextlib.suppress(OSError):  # fork failed: the socket closes
            # A separate process group: Ctrl-C in the terminal must not kill a compile.
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=null, stderr=null, process_group=0
            )
        if self.process is not None:
            self.process.wait()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self._socket.fileno() != -1

    def wait_ready(self, deadline: float) -> None:
        """Wait for start-up; TimeoutError if it is not done before `deadline`."""
        try:
            self._ready = self._ready or bool(self._receive(deadline))
        except WorkerDied:
            raise TimeoutError from None

    def call(self, message: Any, deadline: float) -> dict[str, Any]:
        """One compile. Raises TimeoutError at `deadline` (clock: time.monotonic), or WorkerDied."""
        self._set_timeout(deadline)
        with contextlib.suppress(ConnectionError):  # _receive() reports it
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        return self._receive(deadline)

    def kill(self) -> None:
        """Kill and reap. A worker that is still starting exits when it finds its socket closed."""
        if self.process is not None:
            self.process.kill()
            self._thread.join(EXIT_SECONDS)
        self._socket.close()

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            self._set_timeout(deadline)
            chunk = b""
            with contextlib.suppress(ConnectionError):
                chunk = self._socket.recv(1 << 16)
            if not chunk:
                self._thread.join(EXIT_SECONDS)
                raise WorkerDied(self.process.returncode if self.process else None)
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _set_timeout(self, deadline: float) -> None:
        self._socket.settimeout(max(deadline - time.monotonic(), 0.001))


def worker_command(limits: Mapping[str, Any], memory: int, cpu_seconds: float) -> list[str]:
    path = [*sys.path, str(Path(__file__).parents[2])]  # an editable install may not be on the path
    bounds = {"memory": memory, "cpu_seconds": cpu_seconds, "limits": dict(limits)}
    options = {"parent": os.getpid(), **bounds}
    return [sys.executable, "-c", _PROGRAM, json.dumps(path), json.dumps(options)]


class CompilePool:
    """At most `size` concurrent compiles. `spawn` and `clock` are replaced by tests."""

    def __init__(
        self,
        limits: Mapping[str, Any],
        *,
        memory: int = MEMORY,
        cpu_seconds: float = CPU_SECONDS,
        timeout: float = TIMEOUT,
        size: int = SIZE,
        spawn: Callable[[], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        command = worker_command(limits, memory, cpu_seconds)
        self._spawn = spawn or (lambda: CompileWorker(command))
        self._cpu_seconds, self._timeout = cpu_seconds, timeout
        self._size, self._clock = size, clock
        self._changed = threading.Condition()
        self._active = 0  # slots in use
        self._idle: list[CompileWorker] = []  # the last one used is the first one reused
        self._closed = False
        atexit.register(self.close)

    @contextlib.contextmanager
    def slot(self, deadline: float) -> Iterator[None]:
        """Hold one of `size` compile slots. Raises PoolBusy at the deadline, on the pool's
        clock."""
        with self._changed:
            while self._active >= self._size:
                left = deadline - self._clock()
                if left <= 0:
                    raise PoolBusy
                self._changed.wait(left)
            self._active += 1
        try:
            yield
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify()

    def translate(self, field: str, value: Any, deadline: float) -> Translation:
        """A structure as llguidance's grammar text. Raises ParameterError or UnsupportedError if
        it does not compile, TooExpensive, or PoolBusy at the deadline. Call it inside slot()."""
        for last in (False, True):
            try:
                answer = self._call([field, value], deadline)
                break
            except WorkerDied as death:
                # SIGKILL from outside (the OOM killer?), perhaps of an idle worker: try again.
                if last or death.code != -signal.SIGKILL:
                    raise self._refusal(death) from None
        if "grammar" in answer:
            warnings = tuple(answer.get("warnings", ()))
            return Translation(answer["grammar"], answer.get("check"), warnings)
        kind = UnsupportedError if answer["error"] == "UnsupportedError" else ParameterError
        raise kind(answer["param"], answer["message"])

    def close(self) -> None:
        """Kill all idle workers; a worker in use is killed when its compile ends."""
        with self._changed:
            self._closed, idle, self._idle = True, self._idle, []
        for worker in idle:
            worker.kill()
        atexit.unregister(self.close)

    def _call(self, message: Any, deadline: float) -> dict[str, Any]:
        worker = self._checkout()
        try:
            worker.wait_ready(deadline)
            return dict(worker.call(message, min(deadline, self._clock() + self._timeout)))
        except TimeoutError:
            worker.kill()
            raise PoolBusy from None
        except BaseException:
            worker.kill()
            raise
        finally:
            self._checkin(worker)

    def _checkout(self) -> Any:
        with self._changed:
            if self._closed:
                raise PoolBusy
            while self._idle:
                worker = self._idle.pop()
                if worker.alive:
                    return worker
                worker.kill()
        return self._spawn()

    def _checkin(self, worker: Any) -> None:
        """Replace a dead worker at once, so that the next compile does not wait for start-up."""
        with self._changed:
            if not self._closed:
                self._idle.append(worker if worker.alive else self._spawn())
                return
        worker.kill()

    def _refusal(self, death: WorkerDied) -> TooExpensive:
        if death.code is not None and -death.code in _CPU_SIGNALS:
            seconds = f"{self._cpu_seconds:g} seconds of CPU time"
            return TooExpensive(f"takes more than {seconds} to compile")
        if death.code in (-signal.SIGABRT, -signal.SIGKILL):
            return TooExpensive("takes too much memory to compile")
        return TooExpensive("made the grammar compiler crash")
