"""Twenty tasks that people do on a chat page, each in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_page import ChatPage
from playwright.sync_api import expect

from eventually import becomes

pytestmark = pytest.mark.server
WIDTH = "() => document.documentElement.scrollWidth"


def test_01_ask_and_read_a_formatted_answer(chat: ChatPage) -> None:
    text = (
        "# Sorting\n\nIt is **fast**: $O(n \\log n)$, at most $5 and $6.\n\n"
        "```python\nprint(1)  # one\n```\n\n| a | b |\n|--|--:|\n| 1 | 2 |\n\n$$x^2$$\n"
    )
    answer = chat.ask("How do I sort?", text)
    answer.locator("math").nth(1).wait_for()
    answer.locator(".hljs-comment").wait_for()
    expect(answer.locator("h3")).to_have_text("Sorting")
    expect(answer.locator("strong")).to_have_text("fast")
    expect(answer.locator("p").first).to_contain_text("at most $5 and $6.")
    expect(answer.locator("td[align=right]")).to_have_text("2")
    expect(answer.locator("math[display=block], math.tml-display")).to_have_count(1)
    chat.lists("How do I sort?")
    expect(answer.locator(".facts")).to_contain_text("tokens/s")


def test_02_an_answer_streams_and_stops(chat: ChatPage, gate: Any) -> None:
    chat.says("one two three four five six seven", speculate="off")
    gate.set(int(chat.live.metrics()["verbatim_steps_total"]) + 14)
    chat.type("Count.")
    chat.page.wait_for_selector(".md:has-text('one two')")
    expect(chat.page.locator(".assistant[aria-busy=true]")).to_have_count(1)
    chat.page.keyboard.press("Escape")
    answer = chat.last()
    gate.open()
    expect(answer).to_contain_text("Stopped.")
    shown = answer.locator(".md").inner_text().strip()
    assert "one two three four five six seven".startswith(shown)
    assert len(shown) < 33


def test_03_edit_a_question_and_switch_between_versions(chat: ChatPage) -> None:
    chat.ask("First?", "one")
    chat.says("two")
    chat.click("edit and send again")
    chat.page.fill("textarea[name=text]", "Second?")
    chat.page.press("textarea[name=text]", "Enter")
    chat.shows("Second?", "two")
    chat.click("previous version")
    chat.shows("First?", "one")
    chat.click("next version")
    chat.shows("Second?", "two")


def test_04_another_answer_keeps_the_first(chat: ChatPage) -> None:
    chat.ask("Again?", "one")
    chat.says("two")
    chat.click("another answer")
    chat.page.wait_for_selector(".md:has-text('two')")
    chat.last()
    expect(chat.page.locator(".assistant .versions")).to_have_text("2/2")
    chat.click("previous version", ".assistant")
    chat.page.wait_for_selector(".md:has-text('one')")


def test_05_a_conversation_has_a_memory(chat: ChatPage) -> None:
    sent: list[Any] = []
    chat.page.on(
        "request", lambda r: sent.append(r.post_data_json) if "completions" in r.url else None
    )
    chat.ask("My name is Ada.", "Hello Ada")
    chat.ask("Who am I?", "Ada")
    roles = [(m["role"], m["content"]) for m in sent[-1]["messages"]]
    assert roles == [("user", "My name is Ada."), ("assistant", "Hello Ada"), ("user", "Who am I?")]
    extra = {"model", "messages", "choice", "receipt", "report_params", "stream", "stream_options"}
    assert set(sent[-1]) == extra, "nothing that the user did not set"


def test_06_delete_a_message_and_take_it_back(chat: ChatPage) -> None:
    chat.ask("one?", "1")
    chat.ask("two?", "2")
    chat.click("delete this message and what follows", ".user")
    chat.shows("one?", "1")
    chat.page.click(".toast >> text=Undo")
    chat.shows("one?", "1", "two?", "2")


def test_07_find_rename_and_delete_conversations(chat: ChatPage) -> None:
    for name in ("apples", "pears"):
        chat.ask(name, name)
        chat.page.keyboard.press("Control+Shift+O")
        chat.page.wait_for_selector(".welcome")
    chat.lists("pears", "apples")
    chat.page.keyboard.press("Control+k")
    chat.page.wait_for_function("() => document.activeElement.id === 'search'")
    chat.page.fill("#search", "app")
    chat.lists("apples")
    chat.click("menu of apples")
    chat.page.fill("input[name=title]", "orchard")
    chat.page.press("input[name=title]", "Enter")
    chat.page.fill("#search", "")
    chat.page.wait_for_selector(".list >> text=orchard")
    chat.click("menu of orchard")
    chat.page.click("text=Delete")
    chat.page.wait_for_selector(".list >> text=orchard", state="detached")
    chat.page.click(".toast >> text=Undo")
    chat.page.wait_for_selector(".list >> text=orchard")
    chat.shows("apples", "apples")


def test_08_drop_text_files_into_a_message(chat: ChatPage) -> None:
    sent: list[Any] = []
    chat.page.on(
        "request", lambda r: sent.append(r.post_data_json) if "completions" in r.url else None
    )
    files = [
        {"name": "a.py", "mimeType": "text/x-python", "buffer": b"print('```')\n"},
        {"name": "b.bin", "mimeType": "application/octet-stream", "buffer": b"\xff\xfe\x00"},
    ]
    chat.page.set_input_files(".composer input[type=file]", files)
    chat.page.wait_for_selector(".chips >> text=a.py")
    expect(chat.page.locator(".toast")).to_contain_text("b.bin is not a text in UTF-8")
    chat.ask("What is it?", "Python")
    assert sent[-1]["messages"][0]["content"] == "a.py:\n````\nprint('```')\n````\n\nWhat is it?"
    expect(chat.page.locator(".user .file")).to_contain_text("a.py")


def test_09_a_system_prompt_kept_by_name(chat: ChatPage) -> None:
    sent: list[Any] = []
    chat.page.on(
        "request", lambda r: sent.append(r.post_data_json) if "completions" in r.url else None
    )
    chat.page.keyboard.press("Control+,")
    chat.page.fill("#system", "Be brief.")
    chat.page.fill(".named input[name=name] >> nth=0", "brief")
    chat.page.click(".named button >> text=Save")
    chat.page.wait_for_selector("#prompt-name option:checked >> text=brief", state="attached")
    chat.ask("Hi", "Hi")
    assert sent[-1]["messages"][0] == {"role": "system", "content": "Be brief."}
    chat.page.keyboard.press("Control+Shift+O")
    chat.page.wait_for_selector(".welcome")
    system = chat.page.locator("#system")
    expect(system).to_have_value("")
    chat.page.select_option("#prompt-name", "brief")
    expect(system).to_have_value("Be brief.")


def test_10_sampling_shows_the_models_own_values_and_sends_only_changes(chat: ChatPage) -> None:
    sent: list[Any] = []
    chat.page.on(
        "request", lambda r: sent.append(r.post_data_json) if "completions" in r.url else None
    )
    chat.page.click("#settings")
    temperature = chat.page.locator("#s-temperature")
    expect(temperature).to_have_value("1")
    field = chat.page.locator(".field:has(#s-temperature)")
    expect(field).to_contain_text("1 · server default")
    chat.page.fill("#s-temperature", "0.5")
    chat.page.press("#s-temperature", "Tab")
    chat.page.wait_for_selector(".field.mine #s-temperature")
    chat.ask("Hi", "Hi")
    assert sent[-1]["temperature"] == 0.5
    chat.page.select_option("#preset", "Always the most likely (temperature 0)")
    expect(temperature).to_have_value("0")
    chat.click("Use the model's: 1")
    chat.page.wait_for_selector(".field.mine", state="detached")
    chat.ask("Hi", "Hi")
    assert "temperature" not in sent[-1]


def test_11_a_preset_kept_by_name(chat: ChatPage) -> None:
    chat.page.click("#settings")
    chat.page.fill("#s-seed", "7")
    chat.page.press("#s-seed", "Tab")
    chat.page.fill(".named:has(#preset) input[name=name]", "seven")
    chat.page.press(".named:has(#preset) input[name=name]", "Enter")
    chat.page.wait_for_selector("#preset option:checked >> text=seven", state="attached")
    first, second = chat.ask("Hi").inner_text(), ""
    chat.click("another answer")
    chat.page.wait_for_selector(".toast:has-text('A fixed seed gives the same answer again')")
    second = chat.last().inner_text()
    assert first.split("\n")[1] == second.split("\n")[1]


def test_12_export_and_import_everything_in_one_file(
    chat: ChatPage, browser: Any, tmp_path: Path
) -> None:
    chat.ask("Keep this.", "Kept.")
    chat.page.click("#more")
    with chat.page.expect_download() as found:
        chat.page.click("text=Export all conversations")
    found.value.save_as(tmp_path / "chats.json")
    other = ChatPage(browser, chat.live).open()
    other.page.click("#more")
    other.page.set_input_files("#import", tmp_path / "chats.json")
    other.page.click(".list >> text=Keep this.")
    other.shows("Keep this.", "Kept.")
    (tmp_path / "no.json").write_text("{}")
    other.page.click("#more")
    other.page.set_input_files("#import", tmp_path / "no.json")
    other.page.wait_for_selector(".toast:has-text('This file holds no conversations')")
    assert other.errors == []
    other.close()


def test_13_explain_opens_the_same_tokens_in_the_lens(chat: ChatPage) -> None:
    chat.ask("Why?", "Because.")
    with chat.context.expect_page() as opened:
        chat.click("Explain", ".assistant")
    lens = opened.value
    for index, letter in enumerate(b"Because."):
        tile = lens.locator(f"#tile-{index} small")
        expect(tile).to_have_text(re.compile(rf"^{letter}\b"))
    lens.wait_for_selector("#proof.identical")
    expect(lens.locator("#prompt")).to_have_value("")
    assert "/lens#answer=" in lens.url


def test_14_explain_an_answer_that_was_stopped(chat: ChatPage, gate: Any) -> None:
    chat.says("one two three four five six seven", speculate="off")
    gate.set(int(chat.live.metrics()["verbatim_steps_total"]) + 14)
    chat.type("Count.")
    chat.page.wait_for_selector(".md:has-text('one')")
    chat.page.click("#stop")
    chat.last()
    gate.open()
    with chat.context.expect_page() as opened:
        chat.click("Explain", ".assistant")
    opened.value.wait_for_selector("#tile-2")
    opened.value.wait_for_selector("#proof.identical")


def test_15_continue_an_answer_that_was_cut(chat: ChatPage) -> None:
    chat.says(None)
    chat.page.click("#settings")
    chat.page.fill("#s-max_completion_tokens", "6")
    chat.page.press("#s-max_completion_tokens", "Tab")
    answer = chat.ask("Go on")
    expect(answer).to_contain_text("Cut at the length limit.")
    before = chat.store("return s.path().at(-1).content;")
    answer.get_by_role("button", name="Continue").click()
    chat.page.wait_for_function(
        "async (n) => { const s = await import('/chat-page/store.js');"
        " return !s.running.size && s.path().at(-1).content.length > n; }",
        arg=len(before),
    )
    assert chat.store("return s.path().at(-1).content;").startswith(before)
    expect(chat.page.locator(".turn")).to_have_count(2)


def test_an_answer_that_repeats_itself_says_so_once(chat: ChatPage) -> None:
    chat.says(None, regex="(ab){200}")
    looped = chat.ask("Repeat.")
    expect(looped).to_contain_text("Ended, because it repeats itself.")
    expect(looped.locator(".warning")).to_have_count(0)


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
TOOL = [
    {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]


def test_16_tool_calls_are_readable_and_get_a_result(chat: ChatPage) -> None:
    chat.store("s.state.chat.settings.tools = a;", json.dumps(TOOL))
    answer = chat.ask("Weather?", CALL)
    card = answer.locator(".call")
    expect(card).to_contain_text("Calls weather")
    expect(card.locator("dd")).to_have_text(["Paris", "2"])
    chat.says("It rains.")
    answer.locator("textarea[name=result]").fill('{"rain": true}')
    answer.get_by_role("button", name="Send result").click()
    chat.page.wait_for_selector(".md:has-text('It rains.')")
    chat.last()
    expect(chat.page.locator(".turn.result")).to_contain_text("Result of weather")


def test_17_structured_output_is_shown_as_json(chat: ChatPage) -> None:
    answer = chat.ask("JSON?", '{"a":12345678901234567890,"b":[1,{}],"c":"x,{y"}')
    answer.locator(".hljs-attr").first.wait_for()
    shown = answer.locator(".code code").inner_text()
    assert '  "a": 12345678901234567890,' in shown
    assert '"c": "x,{y"' in shown
    assert json.loads(shown)["b"] == [1, {}]


def test_18_dark_mode_and_shortcuts(chat: ChatPage) -> None:
    body = chat.page.locator("body")
    light = body.evaluate("(body) => getComputedStyle(body).backgroundColor")
    chat.page.click("#more")
    for _ in range(2):
        chat.page.click("#theme")
    expect(body).not_to_have_css("background-color", light)
    chat.page.keyboard.press("Escape")
    chat.page.keyboard.press("Control+/")
    chat.page.wait_for_selector("dialog#keys[open]")
    expect(chat.page.locator("#keys")).to_contain_text("stop the answer")
    chat.page.keyboard.press("Escape")
    chat.reload()
    expect(chat.page.locator("html")).to_have_attribute("data-theme", "dark")


def test_19_a_phone_has_room_for_everything(browser: Any, chat: ChatPage) -> None:
    phone = ChatPage(
        browser, chat.live, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True
    ).open()
    phone.says("| a | b |\n|-|-|\n| 1 | 2 |\n\n```\n" + "x" * 300 + "\n```")
    phone.page.fill("#message", "Wide?")
    phone.page.tap("#send")
    phone.last()
    becomes(lambda: phone.page.evaluate(WIDTH), 390)
    phone.page.tap(".show-list")
    phone.page.wait_for_selector(".sidebar.open >> text=Wide?")
    phone.page.tap(".sidebar >> text=New chat")
    phone.page.wait_for_selector(".welcome")
    phone.page.tap("#settings")
    phone.page.wait_for_selector(".drawer")
    becomes(lambda: phone.page.evaluate(WIDTH), 390)
    assert phone.errors == []
    phone.close()


def test_20_a_server_with_keys_asks_for_one(browser: Any, chat: ChatPage) -> None:
    """The server here has no keys: the test answers as one that has."""
    message = {"error": {"message": "this server needs a key", "code": "invalid_api_key"}}

    def answer(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer open-sesame":
            route.continue_()
        else:
            route.fulfill(status=401, json=message)

    for path in ("v1/**", "api/**"):
        chat.page.route(f"**/{path}", answer)
    chat.page.reload()
    chat.page.fill("input[name=key]", "open-sesame")
    chat.page.press("input[name=key]", "Enter")
    chat.page.wait_for_selector("dialog#key", state="hidden")
    chat.ready()
    expect(chat.ask("Hi", "Hello").locator(".md")).to_have_text("Hello")
    assert all("401" in error for error in chat.errors)
    chat.errors.clear()
