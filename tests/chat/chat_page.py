"""The chat page in a browser, driven as a user would; `says` decides what the model answers."""

from __future__ import annotations

import json
from typing import Any

from live_server import Live
from playwright.sync_api import expect

from eventually import HANG_SECONDS

MS = 1000 * HANG_SECONDS


class ChatPage:
    """Collects console errors and requests that leave the host."""

    def __init__(self, browser: Any, live: Live, **options: Any) -> None:
        self.live = live
        options = {"viewport": {"width": 1280, "height": 800}, **options}
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(MS)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.page = self.new_page()

    def new_page(self) -> Any:
        page = self.context.new_page()
        page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        return page

    def open(self) -> ChatPage:
        self.page.goto(self.live.url + "/")
        return self.ready()

    def ready(self) -> ChatPage:
        self.page.wait_for_selector("body[data-ready]")
        return self

    def reload(self) -> None:
        self.page.reload()
        self.ready()

    def store(self, code: str, argument: Any = None) -> Any:
        """Evaluate an expression with the page's store as `s` and an argument as `a`."""
        return self.page.evaluate(
            f"async (a) => {{ const s = await import('/chat-page/store.js'); {code} }}", argument
        )

    def says(self, text: str | None, **more: Any) -> None:
        """The model's next answers are this text: a request field that the drawer also sets."""
        fields = {**({"choice": [text]} if text is not None else {}), **more}
        self.store(
            "s.state.chat.settings.more = a; await s.saveChat();",
            json.dumps(fields) if fields else "",
        )

    def type(self, text: str) -> None:
        self.page.fill("#message", text)
        self.page.press("#message", "Enter")

    def ask(self, text: str, answer: str | None = None) -> Any:
        """Send a message, and wait for the whole answer; returns its element."""
        if answer is not None:
            self.says(answer)
        before = self.page.locator(".turn").count()
        self.type(text)
        expect(self.page.locator(".turn")).to_have_count(before + 2)
        return self.last()

    def last(self) -> Any:
        """The last answer, once it has ended."""
        self.page.wait_for_selector(".turn:last-child.assistant[aria-busy=false]")
        return self.page.locator(".turn.assistant").last

    def shows(self, *texts: str) -> None:
        """Wait until the page shows these messages."""
        expect(self.page.locator(".turn .bubble, .turn .md:not(.soft)")).to_have_text(texts)

    def lists(self, *titles: str) -> None:
        """Wait until the sidebar lists these conversations."""
        expect(self.page.locator(".list li a")).to_have_text(titles)

    def click(self, label: str, within: str = "body", nth: int = -1) -> None:
        """A button of the page by its label."""
        self.page.locator(within).get_by_role("button", name=label, exact=True).nth(nth).click()

    def close(self) -> None:
        self.context.close()
