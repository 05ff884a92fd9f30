"""The built site in a browser, from the file system: pages open, search works without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chromium import launched
from eventually import HANG_SECONDS

WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")  # Playwright runs an event loop, in which asyncio.run() fails
def browser() -> Iterator[Any]:
    with launched() as running:
        yield running


@pytest.mark.parametrize("size", WIDTHS.values(), ids=WIDTHS)
def test_a_reader_searches_and_follows_a_result(
    site: Path, browser: Any, size: tuple[int, int]
) -> None:
    wide, high = size
    page = browser.new_page(viewport={"width": wide, "height": high})
    page.set_default_timeout(1000 * HANG_SECONDS)
    wrong: list[str] = []
    asked: list[str] = []
    page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / "index.html").as_uri())
    assert page.inner_text("h1").startswith("Verbatim")
    assert page.evaluate("document.documentElement.scrollWidth") <= wide, "it scrolls sideways"
    if wide < 1000:
        page.click("label.md-header__button[for=__search]")
    page.locator("input.md-search__input").press_sequentially("keep_alive")  # as keys: keyup
    page.locator("a.md-search-result__link").first.click()
    page.wait_for_url(lambda url: "index.html" not in url)
    assert "keep_alive" in page.inner_text("article")
    assert page.evaluate("document.documentElement.scrollWidth") <= wide
    page.close()
    assert wrong == []
    outside = [url for url in asked if not url.startswith((site.as_uri(), "data:", "blob:"))]
    assert outside == []
