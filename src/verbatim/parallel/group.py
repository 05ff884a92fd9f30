"""The other ranks of a group, as rank 0 sees them.

In: a number of ranks, and the address where they join. Out: ranks 1, 2, … with a socket between
every two: processes that are started here, or, with an address, those of rendezvous.py. Invariant:
a rank that ends ends the group. The others see their sockets close, and `error` says which rank it
was; a group is never repaired, because its streams are out of step.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import subprocess
import sys
import threading
import time

from verbatim.backend.ranks import frame, native_mesh
from verbatim.base.errors import BackendError
from verbatim.parallel.rendezvous import lead, read_exactly, shared_secret

log = logging.getLogger("verbatim.parallel")
ENDS_SECONDS = 5.0  # from the closing of the sockets until a rank is killed
ANSWER_SECONDS = 600.0  # to load a part of a model from a slow disk


class Group:
    def __init__(self, ranks: int, address: str | None = None) -> None:
        self.ranks, self.error = ranks, ""
        self.hosts = ("",) * ranks  # empty: this machine
        self._closing = False
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        if address is None:
            self._sockets = self._start(ranks)
        else:
            members = lead(address, ranks, shared_secret())
            self.hosts = ("", *("" if m.local else m.host for m in members))
            self._sockets = [None, *(m.socket for m in members)]
        self.mesh = native_mesh(0, [-1 if s is None else s.fileno() for s in self._sockets])
        others = range(1, ranks)
        self._watchers = [threading.Thread(target=self._watch, args=(r,)) for r in others]
        for watcher in self._watchers:
            watcher.daemon = True
            watcher.start()

    def _start(self, ranks: int) -> list[socket.socket | None]:
        """Start the other ranks on this machine. sockets[r]: to rank r; None: itself."""
        pairs = {(a, b): socket.socketpair() for a in range(ranks) for b in range(a)}
        self._processes = [_start(rank, ranks, pairs) for rank in range(1, ranks)]
        for (_, low), ends in pairs.items():
            for end in ends if low else ends[:1]:  # the ends of the other ranks
                end.close()
        return [None, *(pairs[rank, 0][1] for rank in range(1, ranks))]

    def tell(self, kind: bytes, body: bytes) -> None:
        """Send a frame to every rank."""
        self.check()
        try:
            self.mesh.broadcast(frame(kind, body))
        except RuntimeError as error:
            raise self.failed(error) from None

    def answers(self) -> list[bytes]:
        """The answers of ranks 1, 2, … to the last frame."""
        try:
            return [self._answer(rank) for rank in range(1, self.ranks)]
        except OSError as error:
            raise self.failed(error) from None

    def check(self) -> None:
        if self.error:
            raise BackendError(self.error)

    @property
    def failure(self) -> str:
        """Why the group has ended by itself; empty while it works."""
        return "" if self._closing else self.error

    def failed(self, error: BaseException) -> BackendError:
        """The error of a group whose exchange has failed with `error`. Ends all ranks."""
        deadline = time.monotonic() + 1.0
        while not self.error and time.monotonic() < deadline:
            time.sleep(0.01)  # a watcher learns which rank ended, and how
        self._end(str(error))
        return BackendError(self.error)

    def close(self) -> None:
        """Close the sockets, upon which the ranks end."""
        self._closing = True
        self._end("the group is closed")
        for watcher in self._watchers:
            watcher.join(ENDS_SECONDS)

    def _answer(self, rank: int) -> bytes:
        end = self._sockets[rank]
        assert end is not None
        end.settimeout(ANSWER_SECONDS)
        try:
            size = int.from_bytes(read_exactly(end, 8)[4:], "little")
            return read_exactly(end, size)
        finally:
            end.settimeout(None)

    def _watch(self, rank: int) -> None:
        end, poll = self._sockets[rank], select.poll()
        assert end is not None
        poll.register(end, getattr(select, "POLLRDHUP", select.POLLHUP))
        poll.poll()  # without reading: the mesh does
        how = f", on {self.hosts[rank] or 'this machine'}, has ended or cannot be reached"
        if self._processes:
            code = self._processes[rank - 1].wait()
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            how = f" has ended ({how})"
        if not self._closing and not self.error:
            self._end(f"rank {rank} of {self.ranks}{how}")

    def _end(self, why: str) -> None:
        with self._lock:
            if self.error:
                return
            self.error = f"tensor parallelism: {why}; the model must be loaded again"
        if not self._closing:
            log.error("%s", self.error)
        for end in self._sockets:
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)  # wakes a step that waits for it
        deadline = time.monotonic() + ENDS_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(
    rank: int, ranks: int, pairs: dict[tuple[int, int], tuple[socket.socket, socket.socket]]
) -> subprocess.Popen[bytes]:
    fds = [
        -1 if other == rank else pairs[max(rank, other), min(rank, other)][rank < other].fileno()
        for other in range(ranks)
    ]
    command = [
        sys.executable,
        "-m",
        "verbatim.parallel.rank_process",
        str(rank),
        ",".join(map(str, fds)),
    ]
    return subprocess.Popen(command, pass_fds=[fd for fd in fds if fd >= 0])
