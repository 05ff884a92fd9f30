"""Starts servers for the tests as forks of one process per test worker, which has imported the
modules of `verbatim serve` and of its engine process: nearly all of a start's CPU time is imports.

In: a script, a command line, an environment, a file for the log. Out: the process; its engine
processes are forks of it. start_fresh() does the same with new interpreters, as a user does.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import gc
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from eventually import HANG_SECONDS, eventually

HERE = Path(__file__).parent
ENGINE = "verbatim.server.process.engine_process"
PROGRAMS = {  # script -> words of its own interpreter
    "plain": ("-m", "verbatim"),
    "counted": (str(HERE / "counted_server.py"),),
    "clocked": (str(HERE / "clocked_server.py"),),
}


def start_fresh(
    script: str, words: Sequence[str], env: dict[str, str], log: int
) -> subprocess.Popen[bytes]:
    """A process of `script` (a key of PROGRAMS) that logs to a descriptor. A clocked one has pipes
    as stdin and stdout."""
    piped = script == "clocked"
    return subprocess.Popen(
        [sys.executable, *PROGRAMS[script], *words],
        stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
        stdout=subprocess.PIPE if piped else log,
        stderr=log,
        env=env,
    )


def start(
    script: str, words: Sequence[str], env: dict[str, str], log: int
) -> subprocess.Popen[bytes] | ForkedProcess:
    """The same as a fork."""
    if sys.platform != "linux":  # no pidfd_open
        return start_fresh(script, words, env, log)
    status, their_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stdin, to_them = os.pipe()
    from_them, stdout = os.pipe()
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    request = json.dumps((script, [*words], env, os.getcwd(), nohup)).encode()
    fds = (stdin, stdout if script == "clocked" else log, log, their_status.fileno())
    pid = _fork_server().start(request, fds)
    os.close(stdin)
    os.close(stdout)
    their_status.close()
    return ForkedProcess(pid, status, os.fdopen(to_them, "wb"), os.fdopen(from_them, "rb"))


class ForkedProcess:
    """What the tests use of subprocess.Popen; the fork server waits for the process."""

    def __init__(self, pid: int, status: socket.socket, stdin: Any, stdout: Any) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(BlockingIOError):
                self.returncode = int(self._status.recv(16, socket.MSG_DONTWAIT))
                self._status.close()
        return self.returncode

    def wait(self, seconds: float = HANG_SECONDS) -> int:
        eventually(lambda: self.poll() is not None, "a server does not end", seconds)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _ForkServer:
    """The process that forks, asked for servers."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, __file__, str(theirs.fileno())]
            path = os.pathsep.join(filter(None, sys.path))
            self._process = subprocess.Popen(
                words, pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": path}
            )
        atexit.register(self._stop)

    def start(self, request: bytes, fds: Sequence[int]) -> int:
        socket.send_fds(self._socket, [request], fds)
        return int(self._socket.recv(16))

    def _stop(self) -> None:
        self._socket.close()
        self._process.wait()


_fork_server = functools.cache(_ForkServer)

# ------------------------------------------------------------------------ in the process that forks


def main(control: socket.socket) -> None:
    runs = _import_all()
    gc.collect()
    gc.freeze()
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data is not None:  # a server has ended
                selector.unregister(key.fd)
                os.close(key.fd)
                _report(*key.data)
                continue
            request, fds, _, _ = socket.recv_fds(control, 1 << 20, 4)
            if not request:
                return
            pid = os.fork()
            if pid == 0:
                _become_server(runs, request, fds)
            control.send(b"%d" % pid)
            for fd in fds[:3]:
                os.close(fd)
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, fds[3]))


def _import_all() -> dict[str, Callable[[], None]]:
    """Import what a server and its engine process import when they start. Returns what each script
    runs."""
    import clocked_server
    import counted_server
    import uvloop

    import verbatim.backend.cpu.backend
    import verbatim.cli.commands.serve
    import verbatim.cli.main
    import verbatim.engine.calls.async_engine
    import verbatim.hub.catalog
    import verbatim.server.process.engine_process
    import verbatim.testing.fakes
    from verbatim.server.process import supervisor

    assert uvloop
    vars(supervisor)["asyncio"] = _ForkingAsyncio()
    return {
        "plain": verbatim.cli.main.main,
        "counted": counted_server.run,
        "clocked": clocked_server.start,
    }


def _report(pid: int, status: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):  # the test has closed its end
        os.write(status, b"%d" % code)
    os.close(status)


def _become_server(
    runs: dict[str, Callable[[], None]], request: bytes, fds: Sequence[int]
) -> NoReturn:
    script, words, env, folder, nohup = json.loads(request)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.argv[1:] = words
    _become(runs[script], 3)


def _become(run: Callable[[], int | None], kept: int) -> NoReturn:
    """Run in a fork what a new interpreter would. Of the open files only the standard streams and
    `kept` stay."""
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
    code: Any = 1
    try:
        code = run()
    except SystemExit as end:
        code = end.code
    except BaseException:
        logging.exception("a forked process failed")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)


# ------------------------------------------------------------------------------ in a forked server


class _ForkingAsyncio:
    """The module asyncio for the supervisor, whose engine process is a fork of this one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def create_subprocess_exec(
        *words: str, pass_fds: Sequence[int], **more: Any
    ) -> _ForkedEngine:
        assert words[1:3] == ("-m", ENGINE), words
        pid = os.fork()
        if pid == 0:
            _become_engine([*words[2:]], *pass_fds)
        return _ForkedEngine(pid)


class _ForkedEngine:
    """What the supervisor uses of asyncio.subprocess.Process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        fd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(fd, self._reap, fd)

    def _reap(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode

    def kill(self) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, signal.SIGKILL)


def _become_engine(words: list[str], kept: int) -> NoReturn:
    from verbatim.server.process import engine_process

    gc.freeze()  # the server's sockets stay: a finaliser would close what has their numbers here
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    asyncio._set_running_loop(None)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for name in ("verbatim", "uvicorn.error"):  # as before set_up_logs()
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = [], True
        logger.setLevel(logging.NOTSET)
    _become(lambda: engine_process.main(words), kept)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
