"""uvicorn's httptools protocol with the three bounds it lacks: on the size of headers, on the time they take, and a way to cut a connection."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from verbatim.server.problems import Problem
from verbatim.server.settings import Limits


class HttpProtocol(HttpToolsProtocol):
    limits: ClassVar[Limits] = Limits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self._cut = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self.limits.header_seconds, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._cut:
            return
        if self._in_head:  # counted before parsing: a header may be one endless line
            end = data.find(b"\r\n\r\n")
            self._head_bytes += end if end >= 0 else len(data)
            if self._head_bytes > self.limits.max_header_bytes:
                self._refuse(b"431 Request Header Fields Too Large", "invalid_request", "the headers are too large")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self.scope["verbatim.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 4
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        if self._header_bytes + len(self.url) > self.limits.max_header_bytes:
            self._refuse(b"431 Request Header Fields Too Large", "invalid_request", "the headers are too large")
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._cut:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        if not self._cut:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", "invalid_request", "this is not HTTP")

    def _late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._unread():  # the client has sent, and we have not come to read it: it is not the client that is late
            self._head_timer = self.loop.call_later(self.limits.header_seconds, self._late)
        else:
            self.transport.close()

    def _unread(self) -> bool:
        sock = self.transport.get_extra_info("socket")
        try:
            with socket.socket(fileno=os.dup(sock.fileno())) as peek:
                return bool(peek.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: bytes, code: str, message: str) -> None:
        from verbatim.server.call import dumps

        self._cut = True
        self._stop_timer()
        body = dumps(Problem(code, message).body())
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (
            status,
            len(body),
        )
        if not self.transport.is_closing():
            self.transport.write(head + body)
            self.transport.close()
