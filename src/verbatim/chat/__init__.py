"""The chat: the web page that `verbatim serve` shows at `/`. See README.md for its modules."""

from __future__ import annotations

from pathlib import Path

from verbatim.base.page_files import PageFiles

PAGE = PageFiles(Path(__file__).parent / "page", "/", "/chat-page/")
