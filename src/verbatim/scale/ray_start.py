"""Connects to a Ray cluster, or starts a Ray of this machine's own on loopback.

Ray Serve opens one gRPC port per replica on all network interfaces, unpickles what arrives there,
and has no setting for it (2.60). A Ray that is started here therefore always runs with token
authentication, and with a token that only its own processes know.

Ray's processes are waited for by event; the limits below only catch a hang. One wait of Ray has a
limit that no setting changes: its raylet ends when an agent needs more than 15 seconds to start,
which happens on a busy machine. A start that failed is tried again: the files of the agents are in
the page cache then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verbatim.base.errors import BackendError, ParameterError
from verbatim.base.json_io import JsonObject
from verbatim.scale.ray_options import LOCAL, require_ray
from verbatim.scale.resources import Node

log = logging.getLogger("verbatim.scale")
HANG_SECONDS = 600  # no start of a process takes that long
# For the raylet. Ray does not notice that it ended, and waits that long before a start has failed.
RAYLET_SECONDS = 60
ATTEMPTS = 4
PROBE_SECONDS = 5.0  # for a connection to the address of a cluster
QUIET: JsonObject = {
    "namespace": "serve",
    "logging_level": logging.ERROR,
    "log_to_driver": False,  # Ray keeps the replicas' output in its session directory
}
# A Ray that is started here sends no usage report to its makers, and its ports listen on loopback:
# the second setting is Ray's own for macOS and Windows, and works everywhere.
LOCAL_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_raylet_start_wait_time_s": str(RAYLET_SECONDS),
    "RAY_agent_register_timeout_ms": str(1000 * HANG_SECONDS),
    "RAY_worker_register_timeout_seconds": str(HANG_SECONDS),
}


UNPROTECTED = (
    "this Ray cluster has no token authentication: a machine that reaches the ports of its nodes, "
    "one of each replica among them, can run code there; start it with RAY_AUTH_MODE=token, or "
    "keep its network private"
)


def local_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a Ray that is started here, read when Ray is imported: those of LOCAL_RAY,
    and token authentication with the user's token or a random one."""
    mode = environ.get("RAY_AUTH_MODE", "token")
    if mode.lower() != "token":
        raise ParameterError(
            "ray",
            f"RAY_AUTH_MODE is {mode!r:.40} in the environment. Ray Serve opens a port on all "
            "network interfaces for each replica, and without a token any machine that reaches it "
            "can run code here: unset RAY_AUTH_MODE, or start Ray yourself and pass HOST:PORT",
        )
    own = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & environ.keys()
    # Not the token in ~/.ray/auth_token, which Ray writes readable for other users.
    token = {} if own else {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {**LOCAL_RAY, "RAY_AUTH_MODE": "token", **token}


def has_token_authentication() -> bool:
    """Whether this process of a Ray cluster refuses calls without a token."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def connect(address: str) -> bool:
    """Connect to a running cluster, or start one on loopback. True: it was started here."""
    require_ray()
    if address == LOCAL:
        os.environ.update(local_environment(os.environ))
    import ray

    if ray.is_initialized():
        return False
    if address == LOCAL:
        start_local()
        return True
    if address != "auto":
        probe(address)
    try:
        ray.init(address=address, **QUIET)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise BackendError(
            f"no Ray cluster at {address}: {_first_line(error)}; a cluster with token "
            "authentication needs RAY_AUTH_MODE=token and its token in RAY_AUTH_TOKEN"
        ) from None
    return False


def probe(address: str) -> None:
    """Fail at once if nothing listens at HOST:PORT: Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), PROBE_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise BackendError(
            f"no Ray cluster at {address}: {_first_line(error)}; check that Ray runs there ('ray "
            "status' on its head node; the default port is 6379) and that this machine reaches it"
        ) from None


def start_local(**more: Any) -> None:
    """`more`: further arguments of ray.init."""
    import ray

    log.info("starting Ray on this machine")
    before = _children()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            ray.init(address="local", include_dashboard=False, **QUIET, **more)
            return
        except Exception as error:  # Ray raises a plain Exception here
            reason = _first_line(error)
        log.warning("Ray did not start (attempt %d of %d): %s", attempt, ATTEMPTS, reason)
        ray.shutdown()
        _kill(_children() - before)
    raise BackendError(
        f"Ray did not start on this machine in {ATTEMPTS} attempts: {reason} Ray gives its own "
        "agents 15 seconds, too few on a very busy machine: start again when it is less busy, or "
        "start Ray yourself ('ray start --head') and pass --ray HOST:PORT. Ray's log: "
        "/tmp/ray/session_latest/logs/raylet.err"
    )


def _children() -> set[int]:
    """Child processes of this process (Linux)."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.update(map(int, path.read_text().split()))
    return found


def _kill(pids: set[int]) -> None:
    """End what a failed start has left. Ray's processes end with their parent, or when the GCS is
    gone."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def cluster_nodes() -> list[Node]:
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    names = ("CPU", "GPU", "memory")
    counts = [[resources.get(name, 0) for name in names] for resources in alive]
    return [Node(float(cpus), float(gpus), int(memory)) for cpus, gpus, memory in counts]
