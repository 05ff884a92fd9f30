"""The fixture of the chat tests: a page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "server"))

from chat_page import ChatPage
from live_server import Live


@pytest.fixture
def chat(browser: Any, live: Live) -> Iterator[ChatPage]:
    """A page of a new browser profile. At the end: no console error, and no request to another
    host."""
    page = ChatPage(browser, live).open()
    yield page
    page.close()
    assert page.errors == []
    assert not [url for url in page.requests if not url.startswith((live.url, "blob:", "data:"))]
