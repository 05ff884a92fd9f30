"""The HTTP process of `verbatim serve`: binds the socket, starts the supervisor, drains at the end.

Settings come in; an exit code goes out, after every stream has received its last event.

    SIGTERM, SIGINT, SIGHUP   new requests get 503; running requests have drain_seconds to finish,
                              then get an error event; then exit 0 with no child process left
    a second signal           ends the drain at once
    SIGHUP with a key file    the keys are read again; nothing drains
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import signal
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import uvicorn
from starlette.types import ASGIApp

from verbatim.base.errors import ModelError, ParameterError
from verbatim.base.setting_rules import host_and_port
from verbatim.server.http.api_keys import read_keys
from verbatim.server.http.connection import HttpProtocol
from verbatim.server.logs import AccessLog, set_up_logs
from verbatim.server.model_pool import ModelPool
from verbatim.server.problem import shutting_down
from verbatim.server.process.supervisor import Supervisor
from verbatim.server.server_state import State
from verbatim.server.settings import EXECUTOR_THREADS, Settings

log = logging.getLogger("verbatim.server")
SPARE_FILES = 100  # file descriptors reserved for the engine socket, the log and 503 responses


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: serve() installs its own, which drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class MetricsProtocol(HttpProtocol):
    """Connections to --metrics-address: few, and not part of the server's accounts."""

    reject_early = count_malformed = None
    max_connections = 64


def bind(settings: Settings) -> list[socket.socket]:
    """Bind the listening sockets: the server's, and that of --metrics-address, if there is one.
    Called before the model loads, so a port in use fails at once."""
    socks = [_bind("port", settings.host, settings.port, "choose another --port or --host")]
    if settings.metrics_address is not None:
        address = host_and_port("metrics_address", settings.metrics_address)
        socks.append(_bind("metrics_address", *address, "choose another one"))
    return socks


def _bind(setting: str, host: str, port: int, remedy: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        why = f"cannot listen on {host}:{port}: {error.strerror}; {remedy}"
        raise ParameterError(setting, why) from None
    sock.set_inheritable(False)
    return sock


def check_certificate(settings: Settings) -> None:
    """Check the TLS files before anything starts. A key with a password is an error: OpenSSL would
    otherwise prompt for it on the terminal of a server."""
    if settings.tls_cert is None or settings.tls_key is None:
        return
    for name, path in (("tls_cert", settings.tls_cert), ("tls_key", settings.tls_key)):
        try:
            open(path, "rb").close()
        except OSError as error:
            raise ParameterError(name, f"cannot read {path!r}: {error.strerror}") from None
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            settings.tls_cert, settings.tls_key, password=""
        )
    except (ssl.SSLError, ValueError) as error:
        why = f"is not a certificate with its key in PEM form, without password: {error}"
        raise ParameterError("tls_cert", why) from None


def _servers(state: State) -> tuple[list[Server], list[Coroutine[None, None, None]]]:
    """The HTTP servers of the sockets of bind(), and the runner of batches. Imports the API, half
    of this process's start."""
    gc.disable()
    from verbatim.server.app import make_app, make_metrics_app
    from verbatim.server.storage.batch_runner import BatchRunner

    settings, app = state.settings, make_app(state)
    HttpProtocol.limits = settings.limits
    HttpProtocol.reject_early = app.reject_early
    HttpProtocol.count_malformed = app.count_malformed
    HttpProtocol.max_connections = connection_limit(settings.limits.max_connections)
    apps: list[tuple[ASGIApp, type[HttpProtocol]]] = [(app, HttpProtocol)]
    if settings.metrics_address is not None:
        apps.append((make_metrics_app(state), MetricsProtocol))
    servers = [Server(uvicorn.Config(
        app, http=http, ws="none", lifespan="off",
        access_log=False, log_config=None, server_header=False, proxy_headers=False, backlog=4096,
        ssl_certfile=settings.tls_cert, ssl_keyfile=settings.tls_key, timeout_graceful_shutdown=5,
    )) for app, http in apps]  # fmt: skip
    batches = [BatchRunner(state, app).run()] if settings.state_dir else []
    gc.freeze()  # the modules and the app stay: no collection needs to visit them
    gc.enable()
    return servers, batches


def _handle_signals(state: State) -> tuple[asyncio.Future[signal.Signals], asyncio.Event]:
    """The first signal sets the future and drains, the second sets the event and ends the drain."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[signal.Signals] = loop.create_future()
    drain_now = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        drain_now.set() if stop.done() else stop.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number == signal.SIGHUP and state.settings.api_key_file is not None:
            loop.add_signal_handler(number, reload_keys, state)
        elif number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            loop.add_signal_handler(number, on_signal, number)
    return stop, drain_now


async def serve(
    settings: Settings,
    clock: Callable[[], float] = time.monotonic,
    supervise: Callable[[Settings, Callable[[], float]], Supervisor] = Supervisor,
) -> int:
    """`clock` is read for every deadline; the tests pass one that they move themselves.
    `supervise` makes the supervisor: of one engine process, or of replicas elsewhere
    (scale/cluster.py)."""
    check_certificate(settings)
    socks = bind(settings)
    pool = ModelPool(settings, clock) if settings.models else None
    supervisor = supervise(settings, clock) if pool is None else pool.first.supervisor
    state = State(settings, supervisor, clock, pool)
    state.access = AccessLog(settings.log_format)
    executor = ThreadPoolExecutor(EXECUTOR_THREADS, "verbatim-http")
    asyncio.get_running_loop().set_default_executor(executor)
    stop, drain_now = _handle_signals(state)
    (supervisor if pool is None else pool).start()
    await asyncio.sleep(0)  # the engine process starts here, and imports beside this one
    servers, batches = _servers(state)
    pairs = zip(servers, socks, strict=True)
    serving = [asyncio.create_task(server.serve(sockets=[sock])) for server, sock in pairs]
    background = [send_keepalives(state), announce(state, socks), *batches]
    background += [pool.unload_idle()] if pool is not None else []
    tasks = [asyncio.create_task(work) for work in background]
    try:
        ends = (stop, supervisor.fatal, serving[0])
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not supervisor.fatal.done():
            await drain(state, drain_now, stop.result().name if stop.done() else "ended")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        state.admission.draining.set()  # ends the wait for a model that could not be loaded
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*serving)
        await (supervisor if pool is None else pool).close()
        state.access.flush()
        state.store.close()
    if supervisor.fatal.done():
        raise ModelError(supervisor.fatal.result())
    ledger = supervisor.ledger
    assert ledger.balanced()
    counts = {"opened": ledger.opened, **ledger.states, "usage": ledger.usage}
    log.info("ended: %s", json.dumps(counts))
    return 0


def reload_keys(state: State) -> None:
    """Read the keys again, with their names and limits. A file with an error changes nothing."""
    try:
        lines = read_keys(state.settings.api_key_file)
        state.keys.replace(lines)
    except ParameterError as error:
        log.error("SIGHUP: the keys stay as they were: %s", error.message)
    else:
        log.info("SIGHUP: %d keys read again", len(lines))


async def announce(state: State, socks: Sequence[socket.socket]) -> None:
    """Log the address, once the model's name has turned out to be right: a server whose model does
    not exist never says that it listens."""
    await state.supervisor.found.wait()
    scheme, names = "https" if state.settings.tls_cert else "http", ", ".join(state.names())
    ends = [sock.getsockname()[:2] for sock in socks]
    where, *more = [f"{scheme}://[{h}]:{p}" if ":" in h else f"{scheme}://{h}:{p}" for h, p in ends]
    log.info("listening on %s (a chat page in a browser; model names: %s)", where, names)
    for address in more:
        log.info("metrics at %s/metrics, without a key", address)
    if state.store.folder is None:
        log.info("stored answers stay in memory until the server ends (--state-dir keeps them)")
    else:
        log.info("stored answers, files and batches are kept in %s", state.store.folder)


async def drain(state: State, drain_now: asyncio.Event, why: str) -> None:
    """Wait until no request is open, drain_seconds have passed, or a second signal arrives.
    Requests that are still open then fail with a 503."""
    state.admission.draining.set()
    text = (
        "%s: draining %d requests, for at most %g s; a second Ctrl-C or SIGTERM ends them at once"
    )
    log.info(text, why, state.open, state.settings.drain_seconds)
    clock = asyncio.get_running_loop().time
    deadline = clock() + state.settings.drain_seconds
    while state.open and not drain_now.is_set() and clock() < deadline:
        await asyncio.sleep(0.05)
    if state.open:
        log.warning("cancelling %d requests", state.open)
        for supervisor in state.engines().values():
            supervisor.fail_all(shutting_down())
        for _ in range(60):
            if not state.open:
                break
            await asyncio.sleep(0.05)


async def send_keepalives(state: State) -> None:
    """Wake every stream three times per keepalive interval; a silent one then sends a comment."""
    while True:
        await asyncio.sleep(max(state.settings.keepalive_seconds / 3, 0.05))
        for supervisor in state.engines().values():
            supervisor.wake_all()


def raise_file_limit() -> None:
    """Raise the soft limit on open files to the hard limit. The usual soft limit of 1,024 is a
    tenth of what a busy server needs."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connection_limit(requested: int) -> int:
    """`requested`, capped by the open-file limit. Connections beyond that limit would be dropped
    without a response; below it they get a 503."""
    import resource

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES
    if requested and requested <= files:
        return requested
    if requested > 2 * files:
        why = "the system allows %d open files: at most %d connections, not %d"
        log.warning(why, files + SPARE_FILES, files, requested)
    return max(files, 1)


def run(
    settings: Settings,
    supervise: Callable[[Settings, Callable[[], float]], Supervisor] = Supervisor,
) -> int:
    set_up_logs(settings)
    raise_file_limit()
    try:
        import uvloop
    except ImportError:
        return asyncio.run(serve(settings, supervise=supervise))
    result: int = uvloop.run(serve(settings, supervise=supervise))
    return result
