"""Ranks on several machines find each other: authenticated TCP sockets between every two of them.

In: the address of rank 0, a number of ranks and the shared secret VERBATIM_RANK_SECRET. Out: each
rank's number, and its sockets to the others. Invariant: both sides of a connection have proven that
they know the secret before either reads a message, and nothing listens once the group is complete.

    rank 0 (lead)                            another rank (join)
    listens                              <-  connects
    MAGIC, nonce                         ->
                                         <-  nonce, HMAC(secret, "join", both nonces)
    HMAC(secret, "lead", both nonces)    ->
                                         <-  {version, port}: where it waits for higher ranks
    {rank, group, peers} or {refused}    ->  peers: [host, port] of ranks 1, 2, ...

A rank connects to those between 0 and itself in the same way, and says {rank, group}. What is sent
later is neither encrypted nor signed: the network must be private (docs/scaling.md).
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import select
import socket
import time
from collections.abc import Mapping
from importlib import import_module
from typing import NamedTuple

from verbatim.base.errors import BackendError, ParameterError
from verbatim.base.json_io import JsonObject
from verbatim.base.setting_rules import host_and_port

log = logging.getLogger("verbatim.parallel")
VERSION: str = import_module("verbatim").__version__
SECRET = "VERBATIM_RANK_SECRET"
SECRET_LENGTH = 16  # characters at least
MAGIC, NONCE = b"verbatim ranks 1", 32
MOST_MESSAGE = 1 << 16  # bytes of a message
# One connection after the other: a stranger that says nothing delays the others by so much.
HANDSHAKE_SECONDS = 3.0
COMPLETE_SECONDS = 600.0  # for all ranks to join
LOG_SECONDS, RETRY_SECONDS = 10.0, 1.0
# Seconds of silence until a machine counts as gone, also while no step runs.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
NO_RANK = (OSError, KeyError, ValueError, TypeError)  # a peer that does not follow the protocol


Sockets = list[socket.socket | None]  # one to each rank; None: to itself


class RefusedError(BackendError):
    """Rank 0 and this rank cannot run one model; trying again would change nothing."""


class Member(NamedTuple):
    """A rank that has joined, as rank 0 sees it."""

    socket: socket.socket
    host: str
    port: int  # where it waits for higher ranks

    @property
    def local(self) -> bool:
        """Whether it is on the machine of rank 0: both ends of the connection have one address."""
        return bool(self.socket.getsockname()[0] == self.host)

    @property
    def left(self) -> bool:
        """Whether it has gone again: a rank that waits sends nothing."""
        return bool(select.select([self.socket], [], [], 0)[0])


def shared_secret() -> bytes:
    value = os.environ.get("VERBATIM_RANK_SECRET", "")
    if len(value) < SECRET_LENGTH:
        raise ParameterError(
            "rank_address",
            f"the variable {SECRET} must have at least {SECRET_LENGTH} characters, the same on all"
            " machines; `openssl rand -hex 32` makes one",
        )
    return value.encode()


def lead(address: str, ranks: int, secret: bytes) -> list[Member]:
    """Wait for ranks 1, 2, …; those of this machine come first, then machine by machine."""
    members: list[Member] = []
    with _listen(*host_and_port("rank_address", address)) as server:
        server.settimeout(LOG_SECONDS)
        deadline = time.monotonic() + COMPLETE_SECONDS
        while len(members) < ranks - 1:
            state = f"{len(members)} of {ranks - 1} other ranks have joined at {address}"
            log.info("%s; `verbatim rank` starts one", state)
            if time.monotonic() > deadline:
                raise BackendError(f"tensor parallelism: {state} in {COMPLETE_SECONDS:g} s")
            try:
                connection, (host, *_) = server.accept()
            except TimeoutError:
                continue
            if (member := _admit(connection, host, secret)) is not None:
                members = [m for m in members if not m.left] + [member]
    members.sort(key=lambda m: (not m.local, m.host))
    group, peers = secrets.token_hex(8), [(m.host, m.port) for m in members]
    for rank, member in enumerate(members, 1):
        try:
            _send(member.socket, {"rank": rank, "group": group, "peers": peers})
        except OSError as error:
            raise BackendError(f"tensor parallelism: a rank has left again: {error}") from None
        _keep_alive(member.socket)
    return members


def _admit(connection: socket.socket, host: str, secret: bytes) -> Member | None:
    """A rank that knows the secret and runs this version."""
    try:
        _welcome(connection, secret)
        stated = _receive(connection)
        version, port = str(stated["version"]), int(stated["port"])
    except NO_RANK as error:
        log.warning("a connection from %s is no rank: %s", host, error)
        connection.close()
        return None
    if version != VERSION:
        why = f"the rank of {host} runs verbatim {version}, and rank 0 {VERSION}"
        _send(connection, {"refused": why})
        raise BackendError(f"tensor parallelism: {why}")
    return Member(connection, host, port)


def join(address: str, secret: bytes) -> Sockets:
    """Become a rank of the group at the address, as soon as there is one. Returns the socket to
    each rank; None: this one."""
    connection = _first_connection(address, secret)
    with _listen(connection.getsockname()[0], 0) as server:
        _send(connection, {"version": VERSION, "port": server.getsockname()[1]})
        _keep_alive(connection)
        stated = _receive(connection)  # when all ranks are there
        if why := stated.get("refused"):
            raise RefusedError(f"rank 0 at {address} refuses this rank: {why}")
        rank, group, peers = int(stated["rank"]), stated["group"], stated["peers"]
        sockets: Sockets = [connection, *[None] * len(peers)]
        for lower in range(1, rank):
            host, port = peers[lower - 1]
            peer = sockets[lower] = _connect(host, port, secret)
            _send(peer, {"rank": rank, "group": group})
            _keep_alive(peer)
        server.settimeout(HANDSHAKE_SECONDS * len(peers))
        while None in sockets[rank + 1 :]:
            _take_higher(server.accept()[0], sockets, range(rank + 1, len(sockets)), group, secret)
    return sockets


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


def _take_higher(
    peer: socket.socket, sockets: Sockets, ranks: range, group: str, secret: bytes
) -> None:
    """The connection of one of the ranks; another one is closed."""
    try:
        _welcome(peer, secret)
        stated = _receive(peer)
        if stated["group"] != group or stated["rank"] not in ranks:
            raise ValueError("it is of another group")
        sockets[stated["rank"]] = peer
        _keep_alive(peer)
    except NO_RANK as error:
        log.warning("a connection is no rank: %s", error)
        peer.close()


# ------------------------------------------------------------------------------------- connections


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=32)
    except OSError as error:
        raise ParameterError("rank_address", f"cannot listen on {host}:{port}: {error}") from None


def _connect(host: str, port: int, secret: bytes) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=HANDSHAKE_SECONDS)
    try:
        hello = read_exactly(connection, len(MAGIC) + NONCE)
        if not hello.startswith(MAGIC):
            raise RefusedError(f"{host}:{port} is no rank of this protocol")
        nonces = hello[len(MAGIC) :] + secrets.token_bytes(NONCE)
        connection.sendall(nonces[NONCE:] + _proof(secret, b"join", nonces))
        if not hmac.compare_digest(
            read_exactly(connection, NONCE), _proof(secret, b"lead", nonces)
        ):
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
    answer = read_exactly(connection, 2 * NONCE)
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


def _send(connection: socket.socket, message: Mapping[str, object]) -> None:
    body = json.dumps(message).encode()
    connection.sendall(len(body).to_bytes(4, "little") + body)


def _receive(connection: socket.socket) -> JsonObject:
    size = int.from_bytes(read_exactly(connection, 4), "little")
    if size > MOST_MESSAGE:
        raise ValueError(f"a message of {size} bytes")
    message = json.loads(read_exactly(connection, size))
    if not isinstance(message, dict):
        raise ValueError("a message that is no object")
    return message


def read_exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("it has closed the connection")
        data += part
    return bytes(data)
