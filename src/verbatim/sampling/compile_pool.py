"""Compile pool: grammar compiles of untrusted structures in expendable subprocesses.

llguidance bounds most of its work, but not all: the product of two hundred patterns, or a
`multipleOf` of eight digits, takes minutes and gigabytes. A thread cannot be killed, a process can.
In: a structure field of a request. Out: llguidance's grammar text, known to compile.

    with pool.slot(deadline, engine_busy):         # one at a time while the engine runs requests
        text = pool.translate(field, value, deadline)
        ...                                        # the second compile, in this process

Each worker (compile_worker.py) runs at a low priority, with a limit on memory and on CPU time
per compile; the pool kills a worker that exceeds the wall-clock timeout. A worker is reused, so only
the first compile and the one after a kill pay for interpreter start-up.

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
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from verbatim.base.errors import ParameterError, UnsupportedError

MEMORY = 1 << 30  # bytes of address space per worker; llguidance's limits allow some 50 MB
CPU_SECONDS = 0.75  # per compile; ordinary schemas take 0.5 to 3 ms, one of 70 KB 160 ms
TIMEOUT = 5.0  # wall-clock seconds per compile; a low priority stretches CPU time
SIZE = 2  # concurrent compiles while the engine is idle; one is left for a second tenant
RECHECK = 0.1  # seconds; the engine does not announce that it became idle
EXIT_SECONDS = 10.0  # until a killed process must be reaped

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from verbatim.sampling.compile_worker import main
main(**json.loads(sys.argv[2]))
"""
# SIGPROF: the CPU timer of one compile. SIGXCPU: RLIMIT_CPU, the net behind it.
_CPU_SIGNALS = {getattr(signal, name, None) for name in ("SIGPROF", "SIGXCPU")}


Busy = Callable[[], bool]  # whether the engine has requests to run


def never_busy() -> bool:
    """For a caller without an engine."""
    return False


class TooExpensive(Exception):
    """The structure needs more CPU time or memory than any may have. Does not depend on load."""


class PoolBusy(Exception):
    """The structure was not compiled before its deadline. A retry may succeed."""


class WorkerDied(Exception):
    """The worker process ended during a compile. `code`: as of subprocess, -N is signal N."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"compile worker ended with {code}")
        self.code = code


class Worker(Protocol):
    """What the pool needs of a worker. Only compile threads that hold a slot call it."""

    @property
    def alive(self) -> bool: ...

    def wait_ready(self, timeout: float) -> None:
        """Wait for start-up. TimeoutError, WorkerDied."""

    def call(self, message: Any, timeout: float) -> dict[str, Any]:
        """One compile. TimeoutError, WorkerDied."""

    def kill(self) -> None: ...


class ProcessWorker:
    """A worker process and the socket that it shares with this one: a line of JSON each way."""

    def __init__(self, command: list[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._socket, theirs = socket.socketpair()
        self._buffer = b""
        self._ready = False
        with theirs:
            try:
                # A process group of its own: Ctrl-C in the terminal must not kill a compile.
                self.process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    process_group=0,
                )
            except BaseException:
                self._socket.close()
                raise

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait_ready(self, timeout: float) -> None:
        if not self._ready:
            self._ready = bool(self._receive(self._clock() + timeout))

    def call(self, message: Any, timeout: float) -> dict[str, Any]:
        deadline = self._clock() + timeout
        self._socket.settimeout(max(timeout, 0.001))
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except ConnectionError:
            raise self._death() from None
        return self._receive(deadline)

    def kill(self) -> None:
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_SECONDS)
        self._socket.close()

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            self._socket.settimeout(max(deadline - self._clock(), 0.001))
            try:
                chunk = self._socket.recv(1 << 16)
            except ConnectionError:
                chunk = b""
            if not chunk:
                raise self._death()
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _death(self) -> WorkerDied:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_SECONDS)
        return WorkerDied(self.process.returncode)


def worker_command(limits: Mapping[str, Any], memory: int, cpu_seconds: float) -> list[str]:
    path = [*sys.path, str(Path(__file__).parents[2])]  # an editable install may not be on the path
    options = {
        "parent": os.getpid(),
        "memory": memory,
        "cpu_seconds": cpu_seconds,
        "limits": dict(limits),
    }
    return [sys.executable, "-c", _PROGRAM, json.dumps(path), json.dumps(options)]


class CompilePool:
    def __init__(
        self,
        limits: Mapping[str, Any],
        *,
        memory: int = MEMORY,
        cpu_seconds: float = CPU_SECONDS,
        timeout: float = TIMEOUT,
        size: int = SIZE,
        spawn: Callable[[], Worker] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        command = worker_command(limits, memory, cpu_seconds)
        self._spawn = spawn or (lambda: ProcessWorker(command))
        self._cpu_seconds, self._timeout, self._size, self._clock = cpu_seconds, timeout, size, clock
        self._changed = threading.Condition()
        self._active = 0  # slots in use
        self._idle: list[Worker] = []  # the last one used is the first one reused
        self._closed = False
        self._orders: queue.SimpleQueue[Future[Worker] | None] = queue.SimpleQueue()
        # Linux sends the parent-death signal when the thread that forked ends, not the process. So
        # one thread starts all workers, and it ends when the process does or the pool is closed.
        threading.Thread(target=self._start_workers, name="verbatim-spawn", daemon=True).start()
        atexit.register(self.close)

    @contextlib.contextmanager
    def slot(self, deadline: float, engine_busy: Busy = never_busy) -> Iterator[None]:
        """Permission to compile: one caller at a time while `engine_busy()`, `size` otherwise.
        Raises PoolBusy at the deadline, on the pool's clock."""
        with self._changed:
            while self._active >= (1 if engine_busy() else self._size):
                left = deadline - self._clock()
                if left <= 0:
                    raise PoolBusy
                self._changed.wait(min(left, RECHECK))
            self._active += 1
        try:
            yield
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify()

    def translate(self, field: str, value: Any, deadline: float) -> str:
        """The grammar text of a structure that compiles. ParameterError or UnsupportedError if it
        does not; TooExpensive; PoolBusy at the deadline. Call it inside slot()."""
        try:
            answer = self._ask([field, value], deadline)
        except WorkerDied as death:
            if death.code != -signal.SIGKILL:
                raise self._refusal(death) from None
            # Another process killed the worker (out of memory?), perhaps while it was idle.
            try:
                answer = self._ask([field, value], deadline)
            except WorkerDied as again:
                raise self._refusal(again) from None
        if "grammar" in answer:
            return str(answer["grammar"])
        kind = UnsupportedError if answer["error"] == "UnsupportedError" else ParameterError
        raise kind(answer["param"], answer["message"])

    def close(self) -> None:
        """Kill all idle workers; workers in use are killed by the calls that use them."""
        with self._changed:
            self._closed, idle, self._idle = True, self._idle, []
        for worker in idle:
            worker.kill()
        self._orders.put(None)
        atexit.unregister(self.close)

    def _ask(self, message: Any, deadline: float) -> dict[str, Any]:
        worker = self._ready_worker(deadline)
        try:
            answer = worker.call(message, min(self._timeout, deadline - self._clock()))
        except BaseException as error:
            worker.kill()
            with contextlib.suppress(PoolBusy):  # the next compile tries again, and reports it
                self._put_back(self._new_worker())  # starts up until the next compile needs it
            if isinstance(error, TimeoutError):
                raise PoolBusy from None
            raise
        self._put_back(worker)
        return answer

    def _refusal(self, death: WorkerDied) -> TooExpensive:
        if death.code is not None and -death.code in _CPU_SIGNALS:
            return TooExpensive(f"takes more than {self._cpu_seconds:g} seconds of CPU time to compile")
        if death.code in (-signal.SIGABRT, -signal.SIGKILL):
            return TooExpensive("takes too much memory to compile")
        return TooExpensive("made the grammar compiler crash")

    def _ready_worker(self, deadline: float) -> Worker:
        """A warm worker if there is one, else a new one. PoolBusy if none starts in time."""
        while True:
            with self._changed:
                worker = self._idle.pop() if self._idle else None
            warm = worker is not None
            worker = worker or self._new_worker()
            try:
                worker.wait_ready(deadline - self._clock())
                if worker.alive:
                    return worker
            except TimeoutError:
                self._put_back(worker)  # it is still starting
                raise PoolBusy from None
            except WorkerDied:
                pass
            except BaseException:
                worker.kill()
                raise
            worker.kill()
            if not warm:
                raise PoolBusy

    def _new_worker(self) -> Worker:
        if self._closed:
            raise PoolBusy
        order: Future[Worker] = Future()
        self._orders.put(order)
        try:
            return order.result(EXIT_SECONDS)
        except TimeoutError:
            order.add_done_callback(self._adopt)
            raise PoolBusy from None
        except OSError:  # the system has no process to give
            raise PoolBusy from None

    def _start_workers(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                order.set_result(self._spawn())
            except BaseException as error:
                order.set_exception(error)

    def _adopt(self, order: Future[Worker]) -> None:
        """A worker that started too late for the compile that ordered it."""
        if order.exception() is None:
            self._put_back(order.result())

    def _put_back(self, worker: Worker) -> None:
        with self._changed:
            if not self._closed:
                self._idle.append(worker)
                return
        worker.kill()
