"""Ranks on several machines find each other: authenticated TCP sockets between every two of them.

In: the address of rank 0, a number of ranks and the shared secret VERBATIM_RANK_SECRET. Out: each
rank's number, and its sockets to the others. Invariant: both sides of a connection have proven that
they know the secret before either reads a message, and nothing listens once the group is complete.

    rank 0 (lead)                            another rank (join)
    listens                              <-  connects
    MAGIC, nonce                         ->
                                         <-  nonce, HMAC(secret, "join", both nonces)
    HMAC(secret, "lead", both nonces)    ->
                                         <-  {version}
    {rank, ranks, group} or {refused}    ->
                                         <-  {port} on which it waits for higher ranks
    {peers}: [host, port] of each rank   ->

A rank connects to those between 0 and itself in the same way, and says {rank, group}. What is sent
later is neither encrypted nor signed: the network must be private (docs/scaling.md).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

from verbatim.base.errors import BackendError, ParameterError
from verbatim.base.setting_rules import host_and_port

log = logging.getLogger("verbatim.parallel")
VERSION: str = import_module("verbatim").__version__
SECRET = "VERBATIM_RANK_SECRET"
SECRET_LENGTH = 16  # characters at least
MAGIC, NONCE = b"verbatim ranks 1", 32
MOST_MESSAGE = 1 << 16  # bytes of a message
REFUSED = 4  # exit code of a rank that need not try again
HANDSHAKE_SECONDS = 10.0
HANDSHAKES = 32  # connections at the same time that have not proven the secret
COMPLETE_SECONDS = 600.0  # for all ranks to join
LOG_SECONDS, POLL_SECONDS, RETRY_SECONDS = 10.0, 0.1, 1.0
# Seconds of silence until a machine counts as gone, also while no step runs.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}


class RefusedError(BackendError):
    """Rank 0 and this rank cannot run one model; trying again would change nothing."""


class Member(NamedTuple):
    """A rank that has joined, as rank 0 sees it."""

    socket: socket.socket
    host: str
    local: bool  # on the machine of rank 0


class Joined(NamedTuple):
    """This process as a rank. sockets[r]: to rank r; None: itself."""

    rank: int
    sockets: list[socket.socket | None]


def shared_secret() -> bytes:
    value = os.environ.get(SECRET, "")
    if len(value) < SECRET_LENGTH:
        raise ParameterError(
            "rank_address",
            f"the variable {SECRET} must have at least {SECRET_LENGTH} characters, the same on all"
            " machines; `openssl rand -hex 32` makes one",
        )
    return value.encode()


def lead(address: str, ranks: int, secret: bytes) -> list[Member]:
    """Wait for ranks 1, 2, …; those of this machine come first, then machine by machine."""
    admission, group = RankAdmission(secret), secrets.token_hex(8)
    with _listen(*host_and_port("rank_address", address)) as server:
        members = sorted(
            admission.wait(server, ranks - 1, address), key=lambda m: (not m.local, m.host)
        )
    peers = []
    try:
        for rank, member in enumerate(members, 1):
            _send(member.socket, {"rank": rank, "ranks": ranks, "group": group})
            peers.append((member.host, int(_receive(member.socket)["port"])))
        for member in members:
            _send(member.socket, {"peers": peers})
    except (OSError, KeyError, ValueError) as error:
        raise BackendError(f"tensor parallelism: a rank has left again: {error}") from None
    for member in members:
        _keep_alive(member.socket)
    return members


class RankAdmission:
    """Lets ranks in that know the secret and run this version."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._members: list[Member] = []
        self._refused = ""
        self._places = threading.BoundedSemaphore(HANDSHAKES)

    def wait(self, server: socket.socket, count: int, address: str) -> list[Member]:
        server.settimeout(POLL_SECONDS)
        start, told = time.monotonic(), 0.0
        while len(here := [m for m in self._members if not _ended(m.socket)]) < count:
            waited = time.monotonic() - start
            state = f"{len(here)} of {count} other ranks have joined at {address}"
            if self._refused or waited > COMPLETE_SECONDS:
                raise BackendError(f"tensor parallelism: {self._refused or state}")
            if waited >= told:
                log.info("%s; the others are started with `verbatim rank`", state)
                told += LOG_SECONDS
            with contextlib.suppress(TimeoutError):
                connection, (host, *_) = server.accept()
                if not self._places.acquire(blocking=False):
                    connection.close()
                    continue
                threading.Thread(target=self._admit, args=(connection, host), daemon=True).start()
        return here[:count]

    def _admit(self, connection: socket.socket, host: str) -> None:
        try:
            _welcome(connection, self._secret)
            version = str(_receive(connection)["version"])
            if version != VERSION:
                why = f"the rank of {host} runs verbatim {version}, and rank 0 {VERSION}"
                _send(connection, {"refused": why})
                self._refused = why
                connection.close()
                return
            local = connection.getsockname()[0] == host
            self._members.append(Member(connection, host, local))
        except (OSError, KeyError, ValueError) as error:
            log.warning("a connection from %s is no rank: %s", host, error)
            connection.close()
        finally:
            self._places.release()


def join(address: str, secret: bytes) -> Joined:
    """Become a rank of the group at the address, as soon as there is one."""
    connection = _first_connection(address, secret)
    _send(connection, {"version": VERSION})
    connection.settimeout(None)  # rank 0 waits for the others
    _keep_alive(connection)
    stated = _receive(connection)
    if why := stated.get("refused"):
        raise RefusedError(f"rank 0 at {address} refuses this rank: {why}")
    rank, ranks, group = int(stated["rank"]), int(stated["ranks"]), stated["group"]
    joined = Joined(rank, [connection, *[None] * (ranks - 1)])
    with _listen(connection.getsockname()[0], 0) as server:
        _send(connection, {"port": server.getsockname()[1]})
        peers = _receive(connection)["peers"]
        for lower in range(1, rank):
            host, port = peers[lower - 1]
            peer = joined.sockets[lower] = _connect(host, port, secret)
            _send(peer, {"rank": rank, "group": group})
            _keep_alive(peer)
        server.settimeout(HANDSHAKE_SECONDS * ranks)
        while None in joined.sockets[rank + 1 :]:
            _take_higher(server.accept()[0], joined, group, secret)
    return joined


def _first_connection(address: str, secret: bytes) -> socket.socket:
    """The connection to rank 0, which may start later."""
    host, port = host_and_port("rank_address", address)
    told = False
    while True:
        try:
            return _connect(host, port, secret)
        except OSError as error:
            if not told:
                log.info("waiting for rank 0 at %s: %s", address, error)
            told = True
            time.sleep(RETRY_SECONDS)


def _take_higher(peer: socket.socket, joined: Joined, group: str, secret: bytes) -> None:
    """The connection of a higher rank; another one is closed."""
    try:
        _welcome(peer, secret)
        stated = _receive(peer)
        higher = int(stated["rank"])
        if stated["group"] != group or not joined.rank < higher < len(joined.sockets):
            raise ValueError("it is of another group")
        joined.sockets[higher] = peer
        _keep_alive(peer)
    except (OSError, KeyError, ValueError) as error:
        log.warning("a connection is no rank: %s", error)
        peer.close()


# ------------------------------------------------------------------------------------- connections


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=HANDSHAKES)
    except OSError as error:
        raise ParameterError("rank_address", f"cannot listen on {host}:{port}: {error}") from None


def _connect(host: str, port: int, secret: bytes) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=HANDSHAKE_SECONDS)
    try:
        hello = _read(connection, len(MAGIC) + NONCE)
        if not hello.startswith(MAGIC):
            raise RefusedError(f"{host}:{port} is no rank of this protocol")
        nonces = hello[len(MAGIC) :] + secrets.token_bytes(NONCE)
        connection.sendall(nonces[NONCE:] + _proof(secret, b"join", nonces))
        if not hmac.compare_digest(_read(connection, NONCE), _proof(secret, b"lead", nonces)):
            raise RefusedError(f"{host}:{port} has another {SECRET}")
    except BaseException:
        connection.close()
        raise
    return connection


def _welcome(connection: socket.socket, secret: bytes) -> None:
    """The other side of _connect()."""
    connection.settimeout(HANDSHAKE_SECONDS)
    nonce = secrets.token_bytes(NONCE)
    connection.sendall(MAGIC + nonce)
    answer = _read(connection, 2 * NONCE)
    nonces = nonce + answer[:NONCE]
    if not hmac.compare_digest(answer[NONCE:], _proof(secret, b"join", nonces)):
        connection.sendall(bytes(NONCE))  # the other side learns that its secret is another
        raise ConnectionError(f"it has another {SECRET}")
    connection.sendall(_proof(secret, b"lead", nonces))


def _proof(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, MAGIC + side + nonces, "sha256")


def _keep_alive(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _ended(connection: socket.socket) -> bool:
    """Whether a rank that waits has closed its connection: until then it sends nothing."""
    return bool(select.select([connection], [], [], 0)[0])


def _send(connection: socket.socket, message: Mapping[str, object]) -> None:
    body = json.dumps(message).encode()
    connection.sendall(len(body).to_bytes(4, "little") + body)


def _receive(connection: socket.socket) -> dict[str, Any]:
    size = int.from_bytes(_read(connection, 4), "little")
    if size > MOST_MESSAGE:
        raise ValueError(f"a message of {size} bytes")
    message = json.loads(_read(connection, size))
    if not isinstance(message, dict):
        raise ValueError("a message that is no object")
    return message


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("it has closed the connection")
        data += part
    return bytes(data)
