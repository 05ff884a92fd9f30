"""What the Lens says when something goes wrong: refused requests, wrong texts in controls, keys,
servers that end, files of other models, and tokens that no font shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from lens_page import PROMPT, LensPage
from live_server import Live
from playwright.sync_api import expect

from eventually import becomes

pytestmark = pytest.mark.server
MESSAGE = "box => box.validationMessage"


def test_errors_are_shown_kindly(browser: Any, live: Live, tmp_path: Path) -> None:
    page = LensPage(browser, live).open()
    page.start(top_p=5, max_tokens=4)
    expect(page.page.locator("[role=alert]")).to_contain_text("top_p")
    expect(page.page.locator(".control.wrong #p-top_p")).to_have_count(1)
    page.set(top_p=1)
    page.page.wait_for_selector(".control.wrong", state="detached")
    broken = tmp_path / "nothing.html"
    broken.write_text("<p>not a run</p>")
    page.page.set_input_files("#load", broken)
    page.page.wait_for_selector("text=This file holds no run of the Lens.")
    page.page.route("**/tokenize", lambda route: route.abort())
    page.page.click("#send")
    page.page.wait_for_selector("text=The server does not answer.")
    page.expect_errors(400, "/v1/completions", "net::ERR_FAILED")
    page.close()


BREAK = """() => {
  // Pass three events of an answer on, then break off. Events are counted, not the pieces in which
  // the network brings them: on a busy machine one piece may hold the whole answer.
  const { fetch } = window;
  window.fetch = async (path, options) => {
    const answer = await fetch(path, options);
    if (path !== "/v1/completions") return answer;
    const text = new TextDecoder(), bytes = new TextEncoder(), { headers } = answer;
    const reader = answer.body.getReader();
    let held = "", events = 0;
    return new Response(new ReadableStream({ async pull(to) {
      while (!held.includes("\\n\\n")) {
        const { value, done } = await reader.read();
        if (done) throw new Error("the answer has fewer than four events");
        held += text.decode(value, { stream: true });
      }
      const end = held.indexOf("\\n\\n") + 2, event = held.slice(0, end);
      held = held.slice(end);
      if (events++ < 3) to.enqueue(bytes.encode(event));
      else to.error(new TypeError("network error"));
    } }), { headers });
  };
}"""


def test_a_stream_that_breaks_off_keeps_its_tokens(browser: Any, live: Live, gate: Any) -> None:
    """As if the server had died: three pieces of the answer, then the connection is gone."""
    page = LensPage(browser, live).open()
    page.page.evaluate(BREAK)
    gate.set(int(live.metrics()["verbatim_steps_total"]) + 6)
    with page.one_request():
        page.start(max_tokens=24, seed=1)
        page.page.wait_for_selector("#tile-0")
        gate.open()
    expect(page.page.locator("[role=alert]")).to_contain_text("The server does not answer.")
    expect(page.page.locator("#send")).to_be_enabled()
    assert len(page.tokens()) < 24
    page.page.click("#prove")
    page.page.wait_for_selector("text=This run has no receipt")
    assert page.errors == []
    page.close()


def test_a_server_with_keys_is_asked_for_one(browser: Any, live: Live) -> None:
    """The server here has no keys: the test answers as one that has."""
    page = LensPage(browser, live)
    message = {"error": {"message": "this server needs a key", "code": "invalid_api_key"}}

    def answer(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer open sesame":
            route.continue_()
        else:
            route.fulfill(status=401, json=message)

    page.page.route("**/lens/api/*", answer)
    page.page.goto(live.url + "/lens")
    page.page.fill("input[name=key]", "open sesame")
    page.page.click("text=Use it")
    page.page.wait_for_selector("#send:not([disabled])")
    expect(page.page.locator("[role=alert], input[name=key]")).to_have_count(0)
    page.expect_errors(401, "/lens/api/info")
    page.close()


def test_a_stream_that_ends_early_is_an_error(browser: Any, live: Live) -> None:
    """As behind a proxy that closes the connection: no [DONE], no receipt."""
    page = LensPage(browser, live).open()
    page.page.evaluate(BREAK.replace('to.error(new TypeError("network error"))', "to.close()"))
    page.generate(max_tokens=24, seed=1)
    expect(page.page.locator("[role=alert]")).to_contain_text("The server does not answer.")
    expect(page.page.locator(".facts")).not_to_contain_text("ended by")
    assert page.errors == []
    page.close()


def test_a_refused_request_keeps_the_last_run(browser: Any, live: Live) -> None:
    page = LensPage(browser, live).open()
    before = page.generate(max_tokens=4, seed=3)
    with page.one_request():
        page.start(top_p=5)
    page.page.wait_for_selector("#tile-3")
    expect(page.page.locator("[role=alert]")).to_contain_text("top_p")
    page.shows(before)
    page.expect_errors(400, "/v1/completions")
    page.close()


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_text_that_is_no_value_stops_generate(browser: Any, live: Live, every: bool) -> None:
    """The old value stays in force, so a request would not be what the control shows."""
    page = LensPage(browser, live).open()
    # `n`: the page would draw a branch for each; seed 2⁵³: JavaScript would round it
    texts = [("temperature", "warm"), ("n", "100000"), ("seed", "9007199254740992")]
    if every:
        texts += [("stop_token_ids", "5, x"), ("logit_bias", "{5"), ("n", "0")]
        texts += [("max_tokens", "1.5"), ("seed", "-3")]
    for name, text in texts:
        page.set(**{name: text})
        wrong = page.page.locator(f"#p-{name}")
        page.page.wait_for_selector(f"[role=alert]:has-text('{name}: ')")
        page.page.click("#send")
        page.page.wait_for_function("id => document.activeElement.id === id", arg=f"p-{name}")
        becomes(lambda: wrong.evaluate(MESSAGE) != "", True)  # noqa: B023
        page.set(**{name: ""})
        becomes(lambda: wrong.evaluate(MESSAGE), "")  # noqa: B023
    temperature = page.page.locator("#p-temperature")
    expect(temperature, "an empty text shows the default again").to_have_value("1")
    page.set(seed=4, temperature="cold")
    page.page.click("text=Reset 1 to defaults")
    expect(temperature).to_have_value("1")
    assert not [url for url in page.requests if "completions" in url]
    page.generate(max_tokens=2)
    assert page.errors == []
    page.close()


def test_a_key_that_no_header_can_hold_is_said_to_be_one(browser: Any, live: Live) -> None:
    page = LensPage(browser, live)
    wrong = {"error": {"message": "this server needs a key", "code": "invalid_api_key"}}
    page.page.route("**/lens/api/*", lambda route: route.fulfill(status=401, json=wrong))
    page.page.goto(live.url + "/lens")
    page.page.wait_for_selector("main >> text=This server needs an API key.")
    for key, said in (("ключ", "ASCII characters only"), ("wrong", "this server needs a key")):
        page.page.fill("input[name=key]", key)
        page.page.press("input[name=key]", "Enter")
        page.page.wait_for_selector(f"[role=alert]:has-text('{said}')")
        page.page.wait_for_selector("input[name=key]")
    page.expect_errors(401, "/lens/api/info")
    page.page.unroute_all(behavior="ignoreErrors")
    page.close()


def test_a_run_of_another_model_is_shown_without_this_server(
    browser: Any, live: Live, tmp_path: Path
) -> None:
    """Its logits are not this model's: nothing of it may be computed here."""
    page = LensPage(browser, live).open()
    page.generate(max_tokens=4, seed=3)
    with page.page.expect_download() as download:
        page.page.click("#save")
    text = Path(download.value.path()).read_text()
    found = re.search(r'id="run">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    data["info"] |= {"model": "another", "digest": "0"}
    data["rows"] = [row for row in data["rows"] if row[0].endswith(":2")]
    data["branches"][0]["status"] = "stopped"
    for rule in data["info"]["parameters"].values():
        del rule["slider"]  # older versions do not write it
    file = tmp_path / "another.json"
    file.write_text(json.dumps(data))
    asked = len([url for url in page.requests if "/lens/api/step" in url])
    page.page.set_input_files("#load", file)
    page.page.wait_for_selector("[role=alert]:has-text('This run was made by another')")
    page.select(2)
    expect(page.page.locator("[data-what=top_k]")).to_have_attribute("max", "256")
    page.page.click("#tile-1")
    page.page.wait_for_selector("text=This step was not opened before the run was saved.")
    expect(page.page.locator("#send, .candidates button")).to_have_count(0)
    expect(page.page.locator(".facts")).to_contain_text("stopped")
    assert len([url for url in page.requests if "/lens/api/step" in url]) == asked
    assert page.errors == []
    page.close()


@pytest.mark.soak
def test_a_poll_after_a_failure_doubles_no_step(browser: Any, live: Live) -> None:
    page = LensPage(browser, live).open()
    page.generate(max_tokens=4, seed=3)
    page.page.click("nav >> text=Engine")
    page.page.wait_for_selector(".timeline i")
    failed: list[str] = []

    def once(route: Any) -> None:
        failed.append(route.request.url)
        if len(failed) == 1:
            route.abort()
        else:
            route.continue_()

    page.page.route("**/lens/api/engine*", once)
    with page.page.expect_response(lambda r: r.url.endswith("engine?after=0")):
        pass
    page.page.evaluate("() => new Promise(r => requestAnimationFrame(() => r()))")
    steps = page.page.locator(".timeline i").evaluate_all("all => all.map((i) => i.title)")
    numbers = [title.split(":")[0] for title in steps]
    assert failed
    assert len(set(numbers)) == len(numbers)
    page.page.unroute_all(behavior="ignoreErrors")
    page.close()


def test_invisible_characters_of_a_token_are_shown(browser: Any, live: Live) -> None:
    page = LensPage(browser, live).open()
    shown = page.page.evaluate(
        """async (texts) => {
          const { Vocab } = await import("/lens/vocab.js");
          const bytes = texts.map((text) => [...new TextEncoder().encode(text)]);
          const vocab = Vocab.fromSaved({ tokens: { ...bytes }, control: [] });
          return texts.map((_, id) => vocab.show(id));
        }""",
        [
            "\u200b",
            "\u202eab",
            "\ufe0f",
            "❤\ufe0f",
            "👩\u200d🚀",
            "\u00a0",
            " \n",
            "שלום",
            "\u0007",
            "\ufeff",
            "\ufeffusing",
            "\u2028",
        ],
    )
    assert shown[:3] == ["⟨U+200B⟩", "⟨U+202E⟩ab", "⟨U+FE0F⟩"]
    assert shown[3:5] == ["❤\ufe0f", "👩\u200d🚀"], "an emoji stays whole"
    assert shown[5:9] == ["␣", "␣⏎", "שלום", "⟨U+0007⟩"]
    assert shown[9:] == ["⟨U+FEFF⟩", "⟨U+FEFF⟩using", "⟨U+2028⟩"]
    text = page.page.evaluate(
        """async (tokens) => {
          const { Vocab } = await import("/lens/vocab.js");
          const vocab = Vocab.fromSaved({ tokens: { ...tokens }, control: [] });
          return vocab.text(tokens.map((_, id) => id));
        }""",
        [list(b"\xef\xbb\xbfa\xff"), list("é".encode()), list("€".encode()[:2])],
    )
    assert text == "\ufeffa\ufffdé", "as verbatim.text.decode.TextDecoder writes it"
    page.close()


def test_a_new_conversation_stops_the_request_that_runs(browser: Any, live: Live) -> None:
    """Without its branch no button could: Generate would wait for an answer that is not shown."""
    page = LensPage(browser, live).open()
    page.page.route("**/v1/completions", lambda route: None)  # an answer that never comes
    page.page.check("text=Chat")
    page.page.click("#send")
    page.page.click("text=New conversation")
    page.page.wait_for_selector("#send:not([disabled])")
    expect(page.page.locator(".turn")).to_have_count(0)
    one = page.page.evaluate(
        """async () => {
          const { recordOf } = await import("/lens/run.js");
          const top = [{ id: 5, logit: 2, logprob: -1, final_prob: null }];
          return recordOf({ token: 7, top, margin: -1 }, 5);
        }"""
    )
    assert (one["token"], one["rank"], one["margin"]) == (5, 1, None), "a server that explains one"
    page.page.unroute_all(behavior="ignoreErrors")
    page.close()


@pytest.mark.soak
def test_right_to_left_text_keeps_its_direction(browser: Any, live: Live) -> None:
    """A run of Hebrew letters: its text runs from the right, and the tiles in token order."""
    page = LensPage(browser, live).open()
    page.generate(PROMPT, regex="שלום עולם", max_tokens=40, seed=1)
    text = page.page.locator(".branch .text")
    expect(text).to_have_css("direction", "rtl")
    lefts = page.page.locator(".tile").evaluate_all(
        "all => all.filter((t) => t.offsetTop === all[0].offsetTop).map((t) => t.offsetLeft)"
    )
    assert lefts == sorted(lefts)
    assert page.errors == []
    page.close()


@pytest.mark.soak
def test_a_seed_that_is_none_leaves_the_draw_as_it_is(browser: Any, live: Live) -> None:
    page = LensPage(browser, live).open()
    page.generate(max_tokens=2, seed=3)
    page.select(1)
    box = page.page.locator("[data-what=seed]")
    for text in ("1e400", "-1", "9007199254740992", "x"):
        box.fill(text)
        box.dispatch_event("change")
        becomes(lambda: "whole number" in box.evaluate(MESSAGE), True)
        expect(page.page.locator("label.moved")).to_have_count(0)
    assert page.slide(seed=4) >= 0
    becomes(lambda: box.evaluate(MESSAGE), "")
    expect(page.page.locator("label.moved")).to_have_count(1)
    assert page.errors == []
    page.close()


@pytest.mark.soak
def test_many_answers_are_drawn_only_when_they_come(browser: Any, live: Live, gate: Any) -> None:
    """A server that refuses n, or has not answered yet: one branch, and the last run stays."""
    page = LensPage(browser, live).open()
    before = page.generate(max_tokens=2, seed=3)
    with page.one_request():
        page.start(n=1024)
    expect(page.page.locator("[role=alert]")).to_contain_text("n")
    page.shows(before)
    gate.set(0)
    with page.one_request():
        page.start(n=3)
        page.page.wait_for_selector(".facts:has-text('waiting')")
        expect(page.page.locator(".branch")).to_have_count(1)
        gate.open()
    labels = "async () => (await import('/lens/store.js')).state.branches.map((b) => b.label)"
    becomes(lambda: page.page.evaluate(labels), ["answer 1", "answer 2", "answer 3"])
    page.expect_errors(400, "/v1/completions")
    page.close()
