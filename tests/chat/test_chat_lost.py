"""Nothing is lost: a reload, a killed engine and a killed server in mid-answer leave what was
shown, marked, and the answer goes on as it would have."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_page import ChatPage
from live_server import Live
from playwright.sync_api import expect

from step_gate import StepGate

pytestmark = pytest.mark.server
LETTERS = {"allowed_token_ids": list(range(97, 123)), "max_completion_tokens": 24}


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Live], StepGate]]:
    """A server that the tests kill: the last of the list is the one that runs."""
    gate = StepGate(tmp_path_factory.mktemp("mortal") / "gate")
    flags = ("--backoff-seconds", "0.05")
    servers = [Live(*flags, engine=f"pipeline,gate={gate.path}").wait_ready()]
    yield servers, gate
    gate.open()
    servers[-1].stop()


def steps_more(live: Live, gate: StepGate, steps: int) -> None:
    gate.set(int(live.metrics()["verbatim_steps_total"]) + steps)


def shown(chat: ChatPage) -> str:
    return str(chat.store("return s.path().at(-1).content;"))


def begin(chat: ChatPage, gate: StepGate) -> None:
    """An answer that has begun and waits for the gate."""
    chat.says(None, **LETTERS)
    steps_more(chat.live, gate, 8)
    chat.type("Write.")
    chat.page.wait_for_selector(".assistant .md")


def check_continues(chat: ChatPage) -> None:
    """Continue sends what there is, with the same seed, and writes on behind it."""
    before, seed = shown(chat), chat.store("return s.path().at(-1).seed;")
    assert before
    with chat.page.expect_request("**/v1/chat/completions") as asked:
        chat.click("Continue")
    body = asked.value.post_data_json
    assert body["messages"][-1] == {"role": "assistant", "content": before}
    assert body["seed"] == seed
    chat.page.wait_for_function(
        "async (n) => { const s = await import('/chat-page/store.js');"
        " const node = s.path().at(-1); if (s.running.size) return false;"
        " return node.status === 'done' && node.content.length > n; }",
        arg=len(before),
    )
    assert shown(chat).startswith(before)
    expect(chat.page.locator(".ending")).to_contain_text("Cut at the length limit.")


def test_a_reload_in_mid_answer(chat: ChatPage, gate: Any) -> None:
    begin(chat, gate)
    before = shown(chat)
    chat.reload()
    gate.open()
    chat.page.wait_for_selector(".ending.interrupted")
    assert shown(chat).startswith(before)
    closed = "The page was closed while this was written."
    expect(chat.page.locator(".ending")).to_contain_text(closed)
    check_continues(chat)


def test_a_closed_window_in_mid_answer(chat: ChatPage, gate: Any) -> None:
    begin(chat, gate)
    before, address = shown(chat), chat.page.url
    chat.page.close(run_before_unload=True)
    gate.open()
    chat.page = chat.new_page()
    chat.page.goto(address)
    chat.ready()
    chat.page.wait_for_selector(".ending.interrupted")
    assert shown(chat).startswith(before)


def test_what_was_typed_survives_a_reload(chat: ChatPage) -> None:
    chat.page.fill("#message", "half a sentence")
    chat.reload()
    expect(chat.page.locator("#message")).to_have_value("half a sentence")
    chat.ask("first", "one")
    chat.page.fill("#message", "second, not sent")
    chat.reload()
    expect(chat.page.locator("#message")).to_have_value("second, not sent")
    chat.shows("first", "one")
    chat.page.fill("#message", "")


def test_two_windows_show_the_same_conversation(chat: ChatPage) -> None:
    chat.ask("one?", "1")
    other = chat.new_page()
    other.goto(chat.page.url)
    other.wait_for_selector(".md:has-text('1')")
    chat.ask("two?", "2")
    other.wait_for_selector(".md:has-text('2')")
    expect(other.locator(".turn")).to_have_count(4)


def test_a_killed_engine_in_mid_answer(browser: Any, mortal: Any) -> None:
    servers, gate = mortal
    chat = ChatPage(browser, servers[-1]).open()
    begin(chat, gate)
    before = shown(chat)
    os.kill(chat.live.engine_pid(), signal.SIGKILL)
    gate.open()
    chat.page.wait_for_selector(".ending.interrupted")
    assert shown(chat).startswith(before)
    check_continues(chat)  # also while the engine starts: the request waits for it
    chat.close()


def test_a_killed_server_in_mid_answer(browser: Any, mortal: Any, tmp_path: Path) -> None:
    servers, gate = mortal
    chat = ChatPage(browser, servers[-1]).open()
    begin(chat, gate)
    before = shown(chat)
    servers[-1].stop(signal.SIGKILL)
    chat.page.wait_for_selector(".ending.interrupted")
    chat.page.wait_for_selector(".banner.lost")
    assert shown(chat).startswith(before)
    chat.type("And now?")
    expect(chat.page.locator(".ending.error")).to_contain_text("The server does not answer.")
    gate.open()
    again = Live(port=chat.live.port, engine=f"pipeline,gate={gate.path}").wait_ready()
    servers.append(again)
    chat.live = again
    chat.page.wait_for_selector(".banner", state="detached")
    chat.click("Try again")
    chat.page.wait_for_function(
        "async () => { const s = await import('/chat-page/store.js');"
        " return !s.running.size && s.path().at(-1).status === 'done'; }"
    )
    chat.click("delete this message and what follows", ".user")
    chat.page.wait_for_selector(".bubble:has-text('And now?')", state="detached")
    check_continues(chat)
    chat.close()
