"""What a model, or a file, may contain to harm the reader: nothing runs, nothing is loaded, no text
disappears, and large or deep texts are shown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_page import ChatPage
from live_server import Live
from playwright.sync_api import expect

pytestmark = pytest.mark.server

HOSTILE = Path(__file__).with_name("hostile.md").read_text()
TAGS = re.findall(
    r"\w+",
    """
    DIV P BR HR EM STRONG DEL CODE PRE BLOCKQUOTE UL OL LI TABLE THEAD TBODY TR TH TD H3 A IMG SPAN
    SUB SUP KBD U MARK B I S BUTTON""",
)
INSIDE = """(box) => [...box.querySelectorAll("*")].map((e) => [
  e.tagName, e.namespaceURI, [...e.attributes].map((a) => [a.name, a.value])])"""


def show(chat: ChatPage, text: str) -> Any:
    """A conversation with this answer; returns its element."""
    chat.store(
        "s.newChat(); await s.add({parent: null, role: 'user', content: 'x'});"
        "const parent = s.state.chat.leaf;"
        "await s.add({parent, role: 'assistant', model: 'm', content: a}); s.changed();",
        text,
    )
    box = chat.page.locator(".assistant .md")
    box.locator("> *").first.wait_for()
    return box


@pytest.fixture(scope="module")
def large(browser: Any, live: Live) -> Iterator[ChatPage]:
    page = ChatPage(browser, live).open()
    yield page
    page.close()
    assert page.errors == []


def test_nothing_that_a_model_writes_runs_or_leaves_the_host(chat: ChatPage) -> None:
    box = show(chat, HOSTILE)
    box.locator(".math.wrong, math").first.wait_for()
    chat.page.mouse.move(500, 300)
    assert chat.page.evaluate("() => window.hacked") is None
    for tag, space, attributes in box.evaluate(INSIDE):
        if "MathML" in space:
            assert tag not in ("annotation-xml", "maction"), tag
        else:
            assert tag in TAGS, tag
        for name, value in attributes:
            assert not name.startswith("on"), (tag, name)
            assert name != "style" or "MathML" in space, (tag, value)
            if name in ("href", "src", "action", "formaction", "xlink:href"):
                assert value.startswith(("https://", "mailto:")), (tag, name, value)
    for shown in ("<script>window.hacked = 1</script>", "<iframe srcdoc=", "<svg onload=", "cover"):
        expect(box).to_contain_text(shown)
    good = box.locator("a", has_text="good")
    expect(good).to_have_attribute("rel", "noopener noreferrer")
    expect(box.locator("img")).to_have_count(0)


def test_a_picture_in_the_answer_is_shown_and_one_elsewhere_is_a_link(chat: ChatPage) -> None:
    dot = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="
    box = show(chat, f"![a dot]({dot}) and ![far](https://example.com/far.png)")
    expect(box.locator("img")).to_have_attribute("alt", "a dot")
    expect(box.locator("a")).to_have_text("far (picture, not loaded)")


@pytest.mark.parametrize(
    ("text", "selector", "count"),
    [
        ("| a | b |\n|---|---|\n" + "| 1 | <table><tr><td> |\n" * 10_000, "tbody tr", 10_000),
        (">" * 10_000 + " deep", ".block", 1),
        ("\n".join("  " * i + "- x" for i in range(300)), ".block", 1),
        ("*a **b " * 3_000, ".block", 1),
        ("[" * 3_000 + "]" * 3_000, ".block", 1),
        ("$" * 5_001, ".block", 1),
        ("`" * 20_000, ".block", 1),
        ("x" * 500_000, ".block", 1),
    ],
    ids=["table", "quotes", "lists", "stars", "brackets", "dollars", "backticks", "long"],
)
def test_large_and_deep_texts_are_shown(
    large: ChatPage, text: str, selector: str, count: int
) -> None:
    box = show(large, text)
    expect(box.locator(selector)).to_have_count(count)
    large.page.fill("#message", "still here")
    large.page.wait_for_selector("#send:not([disabled])")


def test_an_imported_file_is_hostile_too(chat: ChatPage, tmp_path: Path) -> None:
    node = {"id": "n1", "chat": "c1", "role": "user", "content": "hello", "parent": "n2"}
    reply = {
        "id": "n2",
        "chat": "c1",
        "role": "assistant",
        "parent": "n1",
        "status": "streaming",
        "content": {"evil": 1},
        "tokens": "<b>",
        "files": "x",
        "calls": [None],
        "warnings": {"a": 1},
    }
    chats = [
        {"id": "c1", "title": {"x": 1}, "leaf": "n2", "settings": {"params": {"a": {}}, "more": 7}}
    ]
    data = {
        "format": "verbatim-chat-1",
        "chats": chats,
        "nodes": [node, reply, {**node, "chat": "c9"}],
    }
    (tmp_path / "in.json").write_text(json.dumps(data))
    chat.page.click("#more")
    chat.page.set_input_files("#import", tmp_path / "in.json")
    chat.page.click(".list >> text=New conversation")
    expect(chat.page.locator(".assistant")).to_contain_text("Interrupted.")
    expect(chat.ask("go on", "yes").locator(".md")).to_have_text("yes")
    for bad in (
        {"chats": 1},
        {"chats": [{"id": "../x"}], "nodes": []},
        {"chats": [], "nodes": [{}]},
    ):
        (tmp_path / "bad.json").write_text(json.dumps({"format": "verbatim-chat-1", **bad}))
        chat.page.click("#more")
        chat.page.set_input_files("#import", tmp_path / "bad.json")
        chat.page.wait_for_selector(".toast:has-text('This file holds no conversations')")
        chat.page.click(".toast [aria-label=dismiss]")
