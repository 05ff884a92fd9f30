"""A server with several models, which reason: the picker loads and unloads them, the reasoning is
folded, and each conversation keeps its model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from chat_page import ChatPage
from live_server import Live
from playwright.sync_api import expect

pytestmark = pytest.mark.server
CLOSE = 261  # the token that ends the reasoning of the fake model


@pytest.fixture(scope="module")
def two() -> Iterator[Live]:
    models = ("--model", "a=first", "--model", "b=second")
    live = Live(*models, names=(), engine="pipeline,think=yes").wait_ready()
    yield live
    assert live.stop() == 0, live.log_text()


def test_models_are_loaded_unloaded_and_kept_per_conversation(browser: Any, two: Live) -> None:
    chat = ChatPage(browser, two).open()
    chat.page.click(".model")
    chat.page.wait_for_selector(".models li >> nth=1")
    chat.click("Load", ".models")
    chat.page.wait_for_selector(".models li:has-text('b') >> text=Unload")
    chat.click("Unload", ".models li:has-text('b')")
    chat.page.wait_for_selector(".models li:has-text('b') >> text=/^Load$/")
    loaded = {m["id"]: m["loaded"] for m in two.client.get("/v1/models").json()["data"]}
    assert loaded == {"a": True, "b": False}
    chat.page.click(".models .item:has-text('b')")
    expect(chat.page.locator("header .model")).to_have_text("b")
    chat.says(None, max_completion_tokens=4, seed=1)
    expect(chat.ask("Hi").locator(".who")).to_have_text("b")
    chat.reload()
    expect(chat.page.locator("header .model")).to_have_text("b")
    assert chat.errors == []
    chat.close()


def test_reasoning_is_folded_and_not_sent_back(browser: Any, two: Live) -> None:
    chat = ChatPage(browser, two).open()
    sent: list[Any] = []
    chat.page.on(
        "request", lambda r: sent.append(r.post_data_json) if "completions" in r.url else None
    )
    chat.says(None, max_completion_tokens=24, seed=3, logit_bias={str(CLOSE): 9})
    answer = chat.ask("Think.")
    fold = answer.locator("details.thought")
    expect(fold).not_to_have_attribute("open", "")
    expect(fold).to_contain_text("Reason")
    fold.locator("summary").click()
    expect(fold.locator(".md")).not_to_be_empty()
    chat.ask("Again.")
    assert "reasoning_content" not in str(sent[-1]["messages"])
    assert chat.errors == []
    chat.close()
