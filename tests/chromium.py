"""The Chromium of the system, driven by Playwright, for tests of the Lens and of the site."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from eventually import HANG_SECONDS


def chromium() -> str | None:
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


@contextmanager
def launched() -> Iterator[Any]:
    """A running browser; skips the test where there is none."""
    found = chromium()
    if found is None:
        pytest.skip("no Chromium: `make test` installs Debian's only as root")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=1000 * HANG_SECONDS)
    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        running = playwright.chromium.launch(executable_path=found, args=flags)
        yield running
        running.close()
