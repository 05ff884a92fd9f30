"""Poll for an event. The timeout only catches a hang: no working program reaches it on any
machine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

# Seconds after which a wait counts as a hang.
HANG_SECONDS = float(os.environ.get("VERBATIM_TEST_HANG_SECONDS", "300"))
POLL_SECONDS = 0.02


def eventually(
    condition: Callable[[], Any], what: str | Callable[[], str] = "", seconds: float = HANG_SECONDS
) -> Any:
    """Poll until `condition` returns a true value and return it; fail with `what` after a hang."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(
                f"waited {seconds:g} s: {what() if callable(what) else what or condition}"
            )
        time.sleep(POLL_SECONDS)
    return found


def becomes(read: Callable[[], Any], expected: Any) -> None:
    """Poll until `read` returns what is expected."""
    eventually(lambda: read() == expected, lambda: f"{read()!r} is not {expected!r}")


async def eventually_async(
    condition: Callable[[], Awaitable[Any]], what: str = "", seconds: float = HANG_SECONDS
) -> Any:
    """eventually() on an event loop; `condition` is awaited."""
    deadline = time.monotonic() + seconds
    while not (found := await condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s: {what or condition}")
        await asyncio.sleep(POLL_SECONDS)
    return found
