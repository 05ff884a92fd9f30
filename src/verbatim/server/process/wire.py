"""Framing of messages on the socket between the HTTP process and the engine process.

frame = length (4 bytes, big-endian) | the encoded message (message_codec.py)
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable, Iterator
from typing import TypeVar

from verbatim.server.problem import Problem
from verbatim.server.process.message_codec import WireError, encode
from verbatim.server.process.messages import Message

# Bytes of one message. engine/request.py bounds the number of alternatives in an answer, not the
# bytes of their tokens: two million log-probabilities of tokens with 128 bytes have 290 MB.
MAX_FRAME = 256 * 1024 * 1024
M = TypeVar("M")


def pack(message: Message) -> bytes:
    body = encode(message)
    return struct.pack(">I", len(body)) + body


def split(frames: bytes) -> Iterator[bytes]:
    """The encoded messages of frames that were joined."""
    at = 0
    while at < len(frames):
        end = at + 4 + int.from_bytes(frames[at : at + 4], "big")
        if end > len(frames):
            raise WireError(f"{len(frames)} bytes end inside a frame")
        yield frames[at + 4 : end]
        at = end


async def read(reader: asyncio.StreamReader, decode: Callable[[bytes], M]) -> M | None:
    """The next message; None if the other process closed the socket or died, even inside a frame.
    Raises WireError for a message that `decode` does not know."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        if size > MAX_FRAME:
            raise WireError(f"a frame of {size} bytes is above the limit of {MAX_FRAME}")
        body = await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError, OSError):
        return None
    return decode(body)


class Outbox:
    """Writes messages to the socket: all messages of one event loop iteration in one system
    call."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._pending: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def put(self, message: Message) -> None:
        """Raises a Problem of the request whose answer the other process would not read()."""
        frame = pack(message)
        if len(frame) - 4 > MAX_FRAME:
            size = f"{len(frame) - 4} bytes, above the limit of {MAX_FRAME}"
            why = f"the answer with its log-probabilities and explanations has {size}"
            remedy = "lower max_tokens, n, logprobs, prompt_logprobs or explain"
            raise Problem("invalid_request", f"{why}; {remedy}")
        self.put_frame(frame)

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
