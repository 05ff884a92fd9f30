"""The chat without a mouse: Tab reaches every control. With `make soak`: axe (from npm) finds
nothing, in every view, light and dark, desktop and phone."""

from __future__ import annotations

from typing import Any

import pytest
from chat_page import ChatPage
from live_server import Live

from axe_core import axe, violations
from tab_order import unreached

pytestmark = pytest.mark.server
__all__ = ["axe"]  # a fixture
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
ANSWER = (
    "### Title\n\n[link](https://example.com) `code` ==x==\n\n```python\nprint(1)  # one\n```\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n$$x^2$$\n\n- [x] done\n\n> quote\n"
)


def test_tab_reaches_every_control(chat: ChatPage) -> None:
    chat.ask("Hello", ANSWER)
    chat.page.click("#settings")
    chat.page.wait_for_selector(".drawer")
    assert unreached(chat.page) == []


@pytest.mark.soak
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(
    browser: Any, live: Live, axe: str, size: dict[str, int], scheme: str
) -> None:
    options = {"viewport": size, "color_scheme": scheme, "bypass_csp": True}
    chat = ChatPage(browser, live, **options).open()
    page = chat.page
    found = {"start": violations(page, axe)}
    chat.ask("Hello", ANSWER)
    chat.ask("JSON", '{"a": 1}')
    page.wait_for_selector(".hljs-comment")
    page.locator("math").first.wait_for()
    found["conversation"] = violations(page, axe)
    chat.click("edit and send again")
    page.wait_for_selector(".editor")
    found["editing"] = violations(page, axe)
    page.click(".editor >> text=Cancel")
    chat.says(None, top_p=5)
    chat.ask("Wrong")
    page.wait_for_selector(".ending.error")
    found["refused"] = violations(page, axe)
    page.click("#settings")
    page.wait_for_selector(".drawer")
    page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    found["settings"] = violations(page, axe)
    page.keyboard.press("Escape")
    page.click(".model")
    page.wait_for_selector(".models li")
    found["models"] = violations(page, axe)
    page.keyboard.press("Escape")
    page.click(".facts >> nth=0")
    page.wait_for_selector("#panel dl")
    found["details"] = violations(page, axe)
    page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    page.wait_for_selector("#search:focus")
    found["list"] = violations(page, axe)
    page.click("#more")
    page.wait_for_selector("#theme")
    found["menu"] = violations(page, axe)
    page.keyboard.press("Escape")
    page.keyboard.press("Control+/")
    page.wait_for_selector("dialog#keys[open]")
    found["keys"] = violations(page, axe)
    assert {view: all_ for view, all_ in found.items() if all_} == {}
    chat.close()
