"""One HTTP request and its response as an ASGI receive/send pair.

The connection (connection.py) feeds the parsed request in; the encoded response goes out through
Connection.write(), head and first body bytes in one write. Connection.answered() is called exactly
once, after the last byte of the response.
"""

from __future__ import annotations

import asyncio
import http
import logging
from typing import Protocol

from starlette.types import ASGIApp, Message, Scope

log = logging.getLogger("verbatim.server")
STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
    for status in http.HTTPStatus
}


class Connection(Protocol):
    """The interface of connection.HttpProtocol that an exchange uses."""

    def write(self, data: bytes) -> None: ...
    async def drained(self) -> None: ...
    def answered(self, exchange: Exchange) -> None: ...
    def refuse(self, status: str, code: str, message: str) -> None: ...
    def abort(self) -> None: ...
    def default_headers(self) -> list[tuple[bytes, bytes]]: ...


class Exchange:
    def __init__(
        self, connection: Connection, scope: Scope, *, keep_alive: bool, expects_continue: bool
    ) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.more_body = True  # the last byte of the request has not arrived
        self.started = False  # the app has sent the response head
        self.complete = False  # the last byte of the response is written
        self.disconnected = False  # the client closed the connection before `complete`
        self._connection = connection
        self._expects_continue = expects_continue
        self._chunks_allowed = scope["http_version"] == "1.1"
        self._body = bytearray()
        self._changed = asyncio.Event()  # wakes receive()
        self._head = b""  # encoded and not yet written
        # Framing of the response body: "length", "chunks", "close" (ends with the connection) or
        # "none". None: not decided yet.
        self._framing: str | None = None

    # ------------------------------------------------------------------- called by the connection

    def feed_body(self, data: bytes) -> None:
        if not self.complete:
            self._body += data
            self._changed.set()

    def end_of_body(self) -> None:
        self.more_body = False
        self._changed.set()

    def disconnect(self) -> None:
        """The client disconnected: receive() reports it, and send() drops its data from now on."""
        self.disconnected = not self.complete
        self._changed.set()

    def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Send a whole response without calling the app."""
        self.started = True
        self._head = self._encode_head(status, headers)
        self._end(body)

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self.scope, self.receive, self.send)
        except Exception:
            log.exception("a request failed outside its handler")
        if not self.complete and not self.disconnected:
            if self.started:
                self._connection.abort()
            else:
                why = "the server failed on this request"
                self._connection.refuse("500 Internal Server Error", "internal_error", why)

    # -------------------------------------------------------------------------- called by the app

    async def receive(self) -> Message:
        if self._expects_continue and not self.started and not self.disconnected:
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._expects_continue = False
        if not self.disconnected and not self.complete:
            await self._changed.wait()
            self._changed.clear()
        if self.disconnected or self.complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            assert not self.started
            self.started = True
            self._head = self._encode_head(message["status"], message["headers"])
            # Write the head even if the first event of a stream comes much later.
            asyncio.get_running_loop().call_soon(self._flush)
            return
        assert self.started, "a body before its head"
        assert not self.complete, "a body after its end"
        if message.get("more_body", False):
            body = self._encode_body(message.get("body", b""), True)
            self._connection.write(self._take_head() + body)
            await self._connection.drained()
        else:
            self._end(message.get("body", b""))

    def _end(self, body: bytes) -> None:
        self._connection.write(self._take_head() + self._encode_body(body, False))
        self.complete = True
        self._body.clear()
        self._changed.set()
        self._connection.answered(self)

    def _encode_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        lines = [STATUS_LINES[status]] if status in STATUS_LINES else [b"HTTP/1.1 %d \r\n" % status]
        for name, value in [*self._connection.default_headers(), *headers]:
            if name == b"content-length":
                self._framing = "length"
            if b"\r" in value or b"\n" in value:
                raise ValueError("a response header contains a line break")
            lines.append(b"%s: %s\r\n" % (name, value))
        if self.scope["method"] == "HEAD" or status in (204, 304):
            self._framing = "none"
        elif self._framing is None:
            self._framing = "chunks" if self._chunks_allowed else "close"
        if self._framing == "chunks":
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        return b"".join([*lines, b"\r\n"])

    def _encode_body(self, body: bytes, more: bool) -> bytes:
        if self._framing == "none":
            return b""
        if self._framing != "chunks":
            return body
        piece = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
        return piece if more else piece + b"0\r\n\r\n"

    def _take_head(self) -> bytes:
        head, self._head = self._head, b""
        return head

    def _flush(self) -> None:
        if self._head and not self.disconnected:
            self._connection.write(self._take_head())
