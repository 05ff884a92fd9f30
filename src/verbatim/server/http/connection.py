"""HTTP/1.1 over httptools: one connection, its bounds, and the exchanges on it. In: bytes. Out: ASGI exchanges, one after another.

It takes the place of uvicorn's own protocol, which bounds neither the size of heads and trailers nor the time they take, nor what a client may
send after its answer or ahead of it.

    state        what ends it                                    the clock
    at rest      the first byte of a request                     idle_seconds
    head         its last line; max_header_bytes                 header_seconds
    exchange     the answer's end (the app has its own clocks)   -
    leftover     the last byte of a body nobody wanted           body_seconds, at most LINGER_SECONDS
    cut          the client reads its error and leaves           the same

Reading never pauses, so a client that leaves is noticed at once, even with requests sent ahead; those are bounded instead.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import urllib.parse
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, cast

import httptools
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.server import ServerState

from verbatim.server.api.api_errors import Problem
from verbatim.server.http.asgi_cycle import Exchange
from verbatim.server.json_io import dumps
from verbatim.server.settings import Limits

log = logging.getLogger("verbatim.server")
LINGER_SECONDS = 5.0
GOODBYE_SECONDS = 0.5
MAX_AHEAD = 16  # requests a client may send before the answer to its first
MAX_AHEAD_BYTES = 64 * 1024  # and the bytes of their bodies


class HttpProtocol(asyncio.Protocol):
    limits: ClassVar[Limits] = Limits()
    max_connections: ClassVar[int] = 0  # 0: as many as come
    early: ClassVar[
        Callable[[Scope], tuple[int, list[tuple[bytes, bytes]], bytes] | None] | None
    ] = None  # app.Door.early
    broken: ClassVar[Callable[[int], str] | None] = None  # app.Door.broken

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        self._app = config.loaded_app
        self._shared = server_state
        self._loop = _loop or asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser = self._new_parser()
        self._timer: asyncio.TimerHandle | None = None
        self._writable: asyncio.Future[None] | None = None  # while the client does not read
        self._cut = False
        self._active: Exchange | None = None  # the one that is being answered, or was answered last
        self._latest: Exchange | None = None  # the one whose body is being read
        self._ahead: deque[Exchange] = deque()
        self._ahead_bytes = 0
        self._no_body = (
            0  # bytes since the request began, or its last chunk, that were not of a body
        )
        self._resumed = False  # a second parser reads the body of a request that offered an upgrade
        self._in_head = self._head_timed = (
            False  # the first byte has come, the last line has not; and its clock runs
        )
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(
            lenient_data_after_close=True
        )  # what follows a last request is ignored, not an error
        return parser

    # ------------------------------------------------------------------------------------------------------ the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        info = transport.get_extra_info
        self._ends = [
            tuple(end[:2]) if isinstance(end, tuple) else None
            for end in (info("sockname"), info("peername"))
        ]
        self._scheme = "https" if info("sslcontext") else "http"
        self._shared.connections.add(self)  # type: ignore[arg-type]
        self._clock(self.limits.idle_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.connections.discard(self)
        self._stop_clock()
        for exchange in filter(None, (self._active, self._latest, *self._ahead)):
            exchange.leave()
        self._ahead.clear()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None:
            self._writable.set_result(None)
            self._writable = None

    def shutdown(self) -> None:
        """From the server, when it ends: whoever is at rest goes now, the others after their answer."""
        if self._active is not None and not self._active.complete:
            self._active.keep_alive = False
            return
        self._transport.close()
        if self._scheme == "https":  # a peer that does not say goodbye is not waited for
            self._loop.call_later(GOODBYE_SECONDS, self._transport.abort)

    # --------------------------------------------------------------------------------------------------------- the parser

    def data_received(self, data: bytes) -> None:
        if self._cut:
            return
        self._no_body += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError:
            log.exception("a fault in the HTTP protocol")
            self.refuse(
                "500 Internal Server Error", "internal_error", "the server failed on this request"
            )
        except httptools.HttpParserError:
            self.refuse("400 Bad Request", "invalid_request", "this is not HTTP")
        if self._no_body > self.limits.max_header_bytes and not self._cut:
            self._refuse_head()
        if self._in_head and not self._head_timed and not self._busy() and not self._cut:
            self._head_timed = True
            self._clock(self.limits.header_seconds)

    def _decline_upgrade(self, rest: bytes) -> None:
        """A request that offers HTTP/2 or a web socket is answered in HTTP/1.1. The parser drops its body, so a new one is told of it."""
        if self._latest is None or self._cut:
            return
        framing = [h for h in self._headers if h[0] in (b"content-length", b"transfer-encoding")]
        self._parser = self._new_parser()
        if not framing:
            self._latest.end_of_body()
            self._resumed = False
            if rest:
                self.data_received(rest)
            return
        self._resumed = True
        head = b"POST / HTTP/1.1\r\n" + b"".join(b"%s: %s\r\n" % pair for pair in framing) + b"\r\n"
        self._no_body -= len(rest)
        self.data_received(head + rest)

    def on_message_begin(self) -> None:
        if not self._resumed:
            self._url, self._headers, self._in_head = b"", [], True

    def on_url(self, url: bytes) -> None:
        if not self._resumed:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._resumed and (
            self._latest is None or not self._latest.more_body
        ):  # not a trailer
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._resumed or self._cut:
            return
        self._no_body, self._in_head, self._head_timed = 0, False, False
        if (
            sum(len(k) + len(v) + 4 for k, v in self._headers) + len(self._url)
            > self.limits.max_header_bytes
        ):
            self._refuse_head()
        elif any(k == b"transfer-encoding" and v.lower() != b"chunked" for k, v in self._headers):
            self.refuse(
                "400 Bad Request",
                "invalid_request",
                "transfer-encoding: only chunked is understood",
            )
        elif self.max_connections and len(self._shared.connections) > self.max_connections:
            self.refuse(
                "503 Service Unavailable",
                "unavailable",
                "too many connections are open",
                retry_after=1,
            )
        else:
            self._begin()

    def _begin(self) -> None:
        try:
            scope = self._scope()
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
            self.refuse("400 Bad Request", "invalid_request", "this is not an address")
            return
        expects = any(k == b"expect" and v.lower() == b"100-continue" for k, v in self._headers)
        keep_alive = scope["http_version"] == "1.1" and self._parser.should_keep_alive()
        self._latest = Exchange(self, scope, keep_alive=keep_alive, expects_continue=expects)
        if not self._busy():
            self._stop_clock()
            self._active = self._latest
            early = type(self).early
            refused = None if early is None else early(scope)
            self._start(self._latest) if refused is None else self._latest.answer(*refused)
        elif len(self._ahead) < MAX_AHEAD:
            self._ahead.append(self._latest)
        else:
            self.abort()

    def on_chunk_header(self) -> None:
        self._no_body = 0

    def on_body(self, body: bytes) -> None:
        self._no_body -= len(body)
        if self._latest is None or self._cut:
            return
        if self._latest is not self._active:
            self._ahead_bytes += len(body)
            if self._ahead_bytes > MAX_AHEAD_BYTES:
                self.abort()
                return
        self._latest.take_body(body)

    def on_message_complete(self) -> None:
        if (
            self._latest is None
            or self._cut
            or (self._parser.should_upgrade() and not self._resumed)
        ):
            return
        self._resumed = False
        self._no_body = 0
        self._latest.end_of_body()
        if self._at_rest():  # a body that came after its answer
            self._clock(self.limits.idle_seconds)

    def _scope(self) -> dict[str, Any]:
        url = httptools.parse_url(self._url)
        raw_path = url.path or b"/"
        path = raw_path.decode("ascii")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1" if self._parser.get_http_version() == "1.1" else "1.0",
            "server": self._ends[0],
            "client": self._ends[1],
            "scheme": self._scheme,
            "method": self._parser.get_method().decode("ascii"),
            "root_path": "",
            "path": urllib.parse.unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": url.query or b"",
            "headers": self._headers,
            "state": {},
            "verbatim.abort": self.abort,
        }

    # ------------------------------------------------------------------------------------------------------- the exchanges

    def _busy(self) -> bool:
        return self._active is not None and not self._active.complete

    def _at_rest(self) -> bool:
        return not self._busy() and (self._latest is None or not self._latest.more_body)

    def _start(self, exchange: Exchange) -> None:
        self._active = exchange
        task = self._loop.create_task(exchange.run(self._app))
        task.add_done_callback(self._shared.tasks.discard)
        self._shared.tasks.add(task)

    def answered(self, exchange: Exchange) -> None:
        self._shared.total_requests += 1
        if not exchange.keep_alive:
            self._leave_politely() if exchange.more_body else self._transport.close()
        elif self._ahead:
            following = self._ahead.popleft()
            if not self._ahead:
                self._ahead_bytes = 0
            self._start(following)
        else:
            self._clock(self._linger() if exchange.more_body else self.limits.idle_seconds)

    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return self._shared.default_headers

    def write(self, data: bytes) -> None:
        if data and not self._transport.is_closing():
            self._transport.write(data)

    async def drained(self) -> None:
        if self._writable is not None:
            await asyncio.shield(self._writable)

    def abort(self) -> None:
        self._cut = True
        self._transport.abort()

    # ------------------------------------------------------------------------------------------------------------ the ends

    def refuse(
        self, status: str, code: str, message: str, retry_after: float | None = None
    ) -> None:
        """Before any exchange, or in the place of one that failed. In the middle of an answer nothing can be said any more."""
        if self._cut:
            return
        if (
            self._active is not None
            and self._busy()
            and (self._active.started or self._latest is not self._active)
        ):
            self.abort()
            return
        problem = Problem(code, message, retry_after=retry_after)
        body = dumps(problem.body())
        broken = type(self).broken
        headers = problem.headers() | (
            {} if broken is None else {"x-request-id": broken(int(status[:3]))}
        )
        more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{more}connection: close\r\n\r\n"
        self.write(head.encode() + body)
        self._leave_politely()

    def _refuse_head(self) -> None:
        self.refuse(
            "431 Request Header Fields Too Large", "invalid_request", "the headers are too large"
        )

    def _leave_politely(self) -> None:
        """Close our side and wait a moment for the client's: closing with bytes unread would tear the answer from its hands."""
        self._cut = True
        if self._active is not None:
            self._active.leave()
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._clock(self._linger())
        else:
            self._transport.close()

    def _linger(self) -> float:
        return min(LINGER_SECONDS, self.limits.body_seconds)

    def _clock(self, seconds: float) -> None:
        self._stop_clock()
        self._timer = self._loop.call_later(seconds, self._late, seconds)

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self, seconds: float) -> None:
        self._timer = None
        if self._cut or (self._latest is not None and self._latest.more_body):
            self.abort()
        elif self._unread():  # the client has sent, and we have not come to read it: it is not the client that is late
            self._clock(seconds)
        else:
            self._transport.close()

    def _unread(self) -> bool:
        sock = self._transport.get_extra_info("socket")
        try:
            with socket.socket(fileno=os.dup(sock.fileno())) as peek:
                return bool(peek.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False
