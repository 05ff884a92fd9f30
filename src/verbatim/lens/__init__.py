"""The Lens: the web page at `/lens` that shows how each token is made. See README.md for its data
flow."""

from __future__ import annotations

from pathlib import Path

from verbatim.base.page_files import PageFiles

PAGE = PageFiles(Path(__file__).parent / "page", "/lens", "/lens/")
