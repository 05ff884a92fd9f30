"""HTTP/1.1 connection over httptools: bytes come in, ASGI exchanges go out, one after another.

It replaces uvicorn's protocol, which limits neither the size of request heads and trailers, nor the
time they take, nor the bytes a client sends after a response or ahead of it (pipelining).

    state       ends with                                        timeout
    idle        the first byte of a request                      idle_seconds
    head        its last line; max_header_bytes                  header_seconds
    exchange    the end of the response                          - (the app has its own deadlines)
    leftover    the last byte of a body that the app ignored     body_seconds, max LINGER_SECONDS
    closing     the client closes after reading the error        as leftover
    unread      the client has read its last response            idle_seconds without progress

Reading never pauses, so that a disconnect is noticed at once. Pipelined requests are limited
instead (MAX_PIPELINED, MAX_PIPELINED_BYTES): those within the limit are answered, then an error is
sent and the connection closes.
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

from verbatim.base.json_io import dumps
from verbatim.server.http.asgi_cycle import Exchange
from verbatim.server.problem import Problem
from verbatim.server.settings import Limits

log = logging.getLogger("verbatim.server")
LINGER_SECONDS = 5.0  # longest wait for the client to stop sending after its response
TLS_CLOSE_SECONDS = 0.5  # longest wait for the peer's close_notify at shutdown
FAILED = ("500 Internal Server Error", "internal_error", "the server failed on this request")
MAX_PIPELINED = 16  # requests queued behind the running one, per connection
MAX_PIPELINED_BYTES = 64 * 1024  # their bodies together


class HttpProtocol(asyncio.Protocol):
    limits: ClassVar[Limits] = Limits()
    max_connections: ClassVar[int] = 0  # 0: no limit
    # app.Middleware.reject_early and .count_malformed
    reject_early: ClassVar[
        Callable[[Scope], tuple[int, list[tuple[bytes, bytes]], bytes] | None] | None
    ] = None
    count_malformed: ClassVar[Callable[[int], str] | None] = None

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
        self._writable: asyncio.Future[None] | None = None  # set while the write buffer is full
        self._closing = False
        self._active: Exchange | None = None  # the exchange that runs, or ran last
        self._latest: Exchange | None = None  # the exchange whose request is being read
        self._pipelined: deque[Exchange] = deque()
        self._pipelined_bytes = 0
        self._too_many = False  # the client pipelined more than the limit; its input is ignored
        # Bytes outside the body since the request began or its last chunk: head, chunk headers and
        # trailers. Limited by max_header_bytes.
        self._non_body_bytes = 0
        self._resumed = False  # an Upgrade header ended the first parser; a second reads the body
        self._in_head = False  # between the first byte and the last line of a request head
        self._head_timed = False  # the header timeout runs
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # Ignore data after a request with `connection: close` instead of failing on it.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    # ------------------------------------------------------------------------ transport callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        info = transport.get_extra_info
        ends = info("sockname"), info("peername")
        self._ends = [tuple(end[:2]) if isinstance(end, tuple) else None for end in ends]
        self._scheme = "https" if info("sslcontext") else "http"
        self._shared.connections.add(self)  # type: ignore[arg-type]
        self._set_timeout(self.limits.idle_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.connections.discard(self)
        self._clear_timeout()
        for exchange in filter(None, (self._active, self._latest, *self._pipelined)):
            exchange.disconnect()
        self._pipelined.clear()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None:
            self._writable.set_result(None)
            self._writable = None

    def shutdown(self) -> None:
        """Called by uvicorn when the server ends: close an idle connection now, and a busy one
        after its response."""
        if self._active is not None and not self._active.complete:
            self._active.keep_alive = False
            return
        self._transport.close()
        if self._scheme == "https":  # do not wait for a peer that sends no close_notify
            self._loop.call_later(TLS_CLOSE_SECONDS, self._transport.abort)

    # --------------------------------------------------------------------------- parser callbacks

    def data_received(self, data: bytes) -> None:
        self._non_body_bytes += len(data)
        if self._too_many and self._non_body_bytes > self.limits.max_body_bytes:
            self.abort()
        if self._closing or self._reading_stopped():
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError:
            log.exception("the HTTP protocol failed")
            self.refuse(*FAILED)
        except httptools.HttpParserError:
            if not self._too_many:
                self.refuse("400 Bad Request", "invalid_request", "this is not HTTP")
        if self._too_many:
            return
        if self._non_body_bytes > self.limits.max_header_bytes and not self._closing:
            self._refuse_head()
        if self._in_head and not self._head_timed and not self._busy() and not self._closing:
            self._head_timed = True
            self._set_timeout(self.limits.header_seconds)

    def _decline_upgrade(self, rest: bytes) -> None:
        """Answer a request that offers HTTP/2 or a WebSocket in HTTP/1.1. httptools stops after the
        head of such a request, so a second parser reads its body."""
        if self._latest is None or self._closing or self._too_many:
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
        self._non_body_bytes -= len(rest)
        self.data_received(head + rest)

    def on_message_begin(self) -> None:
        if not self._resumed:
            self._url, self._headers, self._in_head = b"", [], True

    def on_url(self, url: bytes) -> None:
        if not self._resumed:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        is_trailer = self._latest is not None and self._latest.more_body
        if not self._resumed and not is_trailer:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._resumed or self._closing or self._too_many:
            return
        self._non_body_bytes, self._in_head, self._head_timed = 0, False, False
        size = sum(len(k) + len(v) + 4 for k, v in self._headers) + len(self._url)
        if size > self.limits.max_header_bytes:
            self._refuse_head()
        elif self._parser.get_http_version() not in ("1.0", "1.1"):  # none at all reads as 0.9
            why = "the request line needs HTTP/1.1 or HTTP/1.0 as its version"
            self.refuse("505 HTTP Version Not Supported", "invalid_request", why)
        elif any(k == b"transfer-encoding" and v.lower() != b"chunked" for k, v in self._headers):
            why = "transfer-encoding: only chunked is supported"
            self.refuse("400 Bad Request", "invalid_request", why)
        elif self.max_connections and len(self._shared.connections) > self.max_connections:
            why = "too many connections are open"
            self.refuse("503 Service Unavailable", "unavailable", why, retry_after=1)
        elif self._busy() and len(self._pipelined) >= MAX_PIPELINED:
            self._stop_reading()
        else:
            self._new_exchange()

    def _reading_stopped(self) -> bool:
        return self._too_many

    def _stop_reading(self) -> None:
        """Ignore further input after too many pipelined requests. `answered` sends the error after
        the responses to the requests within the limit."""
        self._too_many, self._non_body_bytes, self._in_head = True, 0, False
        if self._latest is not None and self._latest.more_body:  # its body will not be read
            self._pipelined.remove(self._latest)
        self._latest = self._pipelined[-1] if self._pipelined else self._active

    def _new_exchange(self) -> None:
        if self._transport.get_write_buffer_size() > self.limits.max_stream_bytes:
            self.abort()  # the client sends requests and does not read the responses
            return
        try:
            scope = self._scope()
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
            why = "the request target is not a path or URL"
            self.refuse("400 Bad Request", "invalid_request", why)
            return
        expects = any(k == b"expect" and v.lower() == b"100-continue" for k, v in self._headers)
        keep_alive = scope["http_version"] == "1.1" and self._parser.should_keep_alive()
        self._latest = Exchange(self, scope, keep_alive=keep_alive, expects_continue=expects)
        if not self._busy():
            self._clear_timeout()
            self._active = self._latest
            reject_early = type(self).reject_early
            rejected = None if reject_early is None else reject_early(scope)
            self._start(self._latest) if rejected is None else self._latest.answer(*rejected)
        else:
            self._pipelined.append(self._latest)

    def on_chunk_header(self) -> None:
        self._non_body_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._non_body_bytes -= len(body)
        if self._latest is None or self._closing or self._too_many:
            return
        if self._latest is not self._active:
            self._pipelined_bytes += len(body)
            if self._pipelined_bytes > MAX_PIPELINED_BYTES:
                self._stop_reading()
                return
        self._latest.feed_body(body)

    def on_message_complete(self) -> None:
        if (
            self._latest is None
            or self._closing
            or self._too_many
            or (self._parser.should_upgrade() and not self._resumed)
        ):
            return
        self._resumed = False
        self._non_body_bytes = 0
        self._latest.end_of_body()
        if self._is_idle():  # the body arrived after its response
            self._set_timeout(self.limits.idle_seconds)

    def _scope(self) -> dict[str, object]:
        url = httptools.parse_url(self._url)
        raw_path = url.path or b"/"
        path = raw_path.decode("ascii")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self._parser.get_http_version(),
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
            "verbatim.target_host": url.host,  # None unless the target is absolute
        }

    # ---------------------------------------------------------------------------------- exchanges

    def _busy(self) -> bool:
        return self._active is not None and not self._active.complete

    def _is_idle(self) -> bool:
        return not self._busy() and (self._latest is None or not self._latest.more_body)

    def _start(self, exchange: Exchange) -> None:
        self._active = exchange
        task = self._loop.create_task(exchange.run(self._app))
        task.add_done_callback(self._shared.tasks.discard)
        self._shared.tasks.add(task)

    def answered(self, exchange: Exchange) -> None:
        self._shared.total_requests += 1
        if not exchange.keep_alive:
            self._close_gracefully() if exchange.more_body else self._close()
        elif self._pipelined:
            following = self._pipelined.popleft()
            if not self._pipelined:
                self._pipelined_bytes = 0
            self._start(following)
        elif self._too_many:
            self.refuse(
                "429 Too Many Requests",
                "overloaded",
                f"at most {MAX_PIPELINED} requests with {MAX_PIPELINED_BYTES} bytes of bodies may "
                "wait behind the running one; those before this error are answered",
                retry_after=1,
            )
        else:
            self._set_timeout(self._linger() if exchange.more_body else self.limits.idle_seconds)

    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return self._shared.default_headers

    def write(self, data: bytes) -> None:
        if data and not self._transport.is_closing():
            self._transport.write(data)

    async def drained(self) -> None:
        if self._writable is not None:
            await asyncio.shield(self._writable)

    def abort(self) -> None:
        self._closing = True
        self._transport.abort()

    # --------------------------------------------------------------------- errors, close, timeouts

    def refuse(
        self, status: str, code: str, message: str, retry_after: float | None = None
    ) -> None:
        """Send an error response and close. After the response head is sent no error can be sent
        any more, so the connection is aborted."""
        if self._closing:
            return
        answered = self._active is not None and self._active.started
        if self._busy() and (answered or self._latest is not self._active):
            self.abort()
            return
        problem = Problem(code, message, retry_after=retry_after)
        body = dumps(problem.body())
        count_malformed = type(self).count_malformed
        headers = problem.headers()
        if count_malformed is not None:
            headers["x-request-id"] = count_malformed(int(status[:3]))
        more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = (
            f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{more}connection: close\r\n\r\n"
        )
        self.write(head.encode() + body)
        self._close_gracefully()

    def _refuse_head(self) -> None:
        why = "the headers are too large"
        self.refuse("431 Request Header Fields Too Large", "invalid_request", why)

    def _close_gracefully(self) -> None:
        """Half-close and wait for the client to close. Closing a socket with unread input sends a
        TCP reset, which can destroy the response before the client reads it."""
        self._closing = True
        if self._active is not None:
            self._active.disconnect()
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._set_timeout(self._linger())
        else:
            self._transport.close()

    def _close(self) -> None:
        """Close once the client has read its last response. Without the timeout, transport.close()
        waits for ever for a client that does not read."""
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._set_timeout(self.limits.idle_seconds)

    def _linger(self) -> float:
        return min(LINGER_SECONDS, self.limits.body_seconds)

    def _set_timeout(self, seconds: float) -> None:
        self._clear_timeout()
        unread = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(seconds, self._on_timeout, seconds, unread)

    def _clear_timeout(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self, seconds: float, unread_before: int) -> None:
        self._timer = None
        unread = self._transport.get_write_buffer_size()
        if self._closing or (self._latest is not None and self._latest.more_body):
            self.abort()
        elif 0 < unread < unread_before:  # a slow client still reads
            self._set_timeout(seconds)
        elif not self._transport.is_closing() and self._has_unread_input():
            self._set_timeout(seconds)  # the event loop is late, not the client
        elif unread:
            self.abort()
        else:
            self._transport.close()

    def _has_unread_input(self) -> bool:
        sock = self._transport.get_extra_info("socket")
        try:
            with socket.socket(fileno=os.dup(sock.fileno())) as peek:
                return bool(peek.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False
