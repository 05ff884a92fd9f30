"""Compile worker: the subprocess of compile_pool.py that translates and compiles structures.

Standard input is a socket. In: a line of JSON per compile, [field, value]. Out: a line of JSON, the
result of translate.try_compile(); the first line reports that start-up is done. Invariant: this
process ends with its parent, whatever it is doing.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import queue
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

from verbatim.grammar.translate import byte_tokenizer, parser_limits, try_compile

NICE = 5  # a quarter of a CPU beside one busy thread; 10 would leave a tenth
# Seconds between checks of the parent's id. End-of-input comes sooner, unless a fork of the parent
# still holds the socket.
PARENT_CHECK = 2.0
CPU_SECONDS_PER_BYTE = 2.0 / (1 << 20)  # twice what the longest public schemas take
_PR_SET_PDEATHSIG = 1
_DEFAULT_THREAD_STACK = 2 << 20  # glibc's thread stack where RLIMIT_STACK is unlimited


def main(parent: int, memory: int, cpu_seconds: float, limits: dict[str, Any]) -> None:
    """Serve compiles until the parent ends. `parent`: its process id."""
    channel = socket.socket(fileno=0)
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_watch, args=(channel, parent, jobs), daemon=True).start()
    _end_with_parent(parent)
    _limit("RLIMIT_AS", memory)
    _limit_stack()
    _limit("RLIMIT_CORE", 0)  # running out of memory aborts, and must not write a core file
    tokenizer, bounds = byte_tokenizer(), parser_limits(limits)
    try_compile("choice", ["a"], tokenizer, bounds)
    with suppress(OSError):
        os.nice(NICE)
    _send(channel, {"ready": True})
    while True:
        line = jobs.get()
        field, value = json.loads(line)
        _allow_cpu(cpu_seconds + CPU_SECONDS_PER_BYTE * len(line))
        try:
            answer = try_compile(field, value, tokenizer, bounds)
        except MemoryError:
            os.abort()  # llguidance aborts too, so the pool sees one signal for both
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(channel, answer)


def _end_with_parent(parent: int) -> None:
    """Request SIGKILL from the kernel when the parent ends. Linux only; elsewhere _watch() and the
    CPU limit end this process."""
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the request took effect
        os._exit(0)


def _watch(channel: socket.socket, parent: int, jobs: queue.SimpleQueue[bytes]) -> None:
    """Read requests; exit at end-of-input or when the parent's id has changed. Runs during a
    compile too, because llguidance releases the GIL."""
    pending = b""
    while True:
        readable, _, _ = select.select([channel], [], [], PARENT_CHECK)
        if os.getppid() != parent:
            os._exit(0)
        if readable:
            chunk = b""
            with suppress(ConnectionError):
                chunk = channel.recv(1 << 16)
            if not chunk:
                os._exit(0)
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                jobs.put(line)


def _allow_cpu(seconds: float) -> None:
    """Set the CPU limit of one compile, beyond which the kernel kills this process: SIGPROF, and as
    a backstop RLIMIT_CPU, which counts whole seconds since process start."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    used = os.times()
    _limit("RLIMIT_CPU", math.ceil(used.user + used.system + seconds) + 1, soft=True)


def _limit_stack() -> None:
    """Set the stack of this process to half of a thread's stack in the server. llguidance recurses
    without a limit along rules, so a grammar that overflows the stack must do so here first."""
    with suppress(ImportError, AttributeError, OSError):  # not available everywhere
        import resource

        size = resource.getrlimit(resource.RLIMIT_STACK)[0]
        unlimited = size == resource.RLIM_INFINITY
        _limit("RLIMIT_STACK", (_DEFAULT_THREAD_STACK if unlimited else size) // 2, soft=True)


def _limit(name: str, value: int, soft: bool = False) -> None:
    with suppress(ImportError, AttributeError, OSError, ValueError):  # not available everywhere
        import resource

        which = getattr(resource, name)
        resource.setrlimit(which, (value, resource.getrlimit(which)[1] if soft else value))


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")
