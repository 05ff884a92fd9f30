"""A minimal SSE client on asyncio sockets: cheap enough for thousands of streams in one process,
and able to disconnect at any point."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StreamResult:
    status: int = 0
    head: str = ""
    events: list[Any] = field(default_factory=list)  # parsed data lines; "[DONE]" as a string
    comments: int = 0
    whole: bool = False  # the last chunk of the body arrived

    @property
    def text(self) -> str:
        return "".join(
            c.get("text", "")
            for e in self.events
            if isinstance(e, dict)
            for c in e.get("choices", [])
        )

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [e["error"] for e in self.events if isinstance(e, dict) and "error" in e]

    @property
    def finished(self) -> bool:
        return any(
            c.get("finish_reason")
            for e in self.events
            if isinstance(e, dict)
            for c in e.get("choices", [])
        )


def request_bytes(path: str, body: dict[str, Any], key: str = "") -> bytes:
    data = json.dumps({"model": "m", **body}).encode()
    auth = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"{auth}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def stream(
    port: int,
    path: str,
    body: dict[str, Any],
    *,
    key: str = "",
    leave_after: int | None = None,
    on_head: Callable[[], None] | None = None,
) -> StreamResult:
    """Read a whole response; with leave_after, disconnect after that many events."""
    got = StreamResult()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        writer.write(request_bytes(path, body, key))
        await writer.drain()
        if leave_after == -1:  # before any answer
            return got
        got.head = (await reader.readuntil(b"\r\n\r\n")).decode()
        got.status = int(got.head.split(" ", 2)[1])
        if on_head is not None:
            on_head()
        while line := await reader.readline():
            if line.startswith(b"data: "):
                text = line[6:].strip().decode()
                got.events.append(text if text == "[DONE]" else json.loads(text))
                if leave_after is not None and len(got.events) >= leave_after:
                    return got
            elif line.startswith(b": "):
                got.comments += 1
            elif line.strip() == b"0":
                got.whole = True
            elif line.startswith(b'{"error"'):
                got.events.append(json.loads(line))
        if "content-length" in got.head:
            got.whole = True
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.transport.abort() if leave_after is not None else writer.close()
    return got
