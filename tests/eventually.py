"""Wait for an event. The deadline is there for a hang: no working program reaches it, however slow the machine is."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

HANG_SECONDS = float(
    os.environ.get("VERBATIM_TEST_HANG_SECONDS", "120")
)  # a wait of this length is a failure
POLL_SECONDS = 0.02


def eventually(
    condition: Callable[[], Any], what: str | Callable[[], str] = "", seconds: float = HANG_SECONDS
) -> Any:
    """The first true value of `condition`; fails with `what` after a hang."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise AssertionError(
                f"waited {seconds:g} s: {what() if callable(what) else what or condition}"
            )
        time.sleep(POLL_SECONDS)
    return found


async def eventually_async(
    condition: Callable[[], Awaitable[Any]], what: str = "", seconds: float = HANG_SECONDS
) -> Any:
    """The same on an event loop; `condition` is awaited."""
    end = time.monotonic() + seconds
    while not (found := await condition()):
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds:g} s: {what or condition}")
        await asyncio.sleep(POLL_SECONDS)
    return found
