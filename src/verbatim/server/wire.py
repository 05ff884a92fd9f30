"""Messages between the HTTP process and the engine process: a length, then one msgpack map. Never pickle, no code, no object.

frame = 4 bytes big-endian length | msgpack of a dict with "t" (its type)

to the engine     start, submit, abort, close
from the engine   loading, ready, failed, accepted, deltas, done, error, beat
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from typing import Any

import msgpack

MAX_FRAME = 256 * 1024 * 1024  # a bug's bound, not a client's: bodies are limited long before
Message = dict[str, Any]


def pack(message: Message) -> bytes:
    body: bytes = msgpack.packb(message, use_bin_type=True)
    return struct.pack(">I", len(body)) + body


async def read(reader: asyncio.StreamReader) -> Message | None:
    """The next message, or None when the other side closed or died (even inside a frame)."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        assert size <= MAX_FRAME, f"frame of {size} bytes"
        body = await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError, OSError):
        return None
    message = msgpack.unpackb(body, raw=False, strict_map_key=False)
    assert isinstance(message, dict)
    return message


class Outbox:
    """Writes messages; those made in one turn of the event loop leave in one system call."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._pending: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def put(self, message: Message) -> None:
        self.put_frame(pack(message))

    def put_frame(self, frame: bytes) -> None:
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(frame)

    def _flush(self) -> None:
        data, self._pending = b"".join(self._pending), []
        if not self._writer.is_closing():
            self._writer.write(data)

    async def drain(self) -> None:
        if self._pending:
            self._flush()
        with contextlib.suppress(ConnectionError, OSError):
            await self._writer.drain()
