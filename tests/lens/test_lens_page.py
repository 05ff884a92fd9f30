"""The Lens in a browser: it streams, its numbers are the API's, its redraws and branches are what
the server would draw, and a saved run replays."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from lens_page import LensPage, api, prompt_ids, run_of
from live_server import Live
from playwright.sync_api import expect

from eventually import becomes

pytestmark = pytest.mark.server
SETTINGS = {"max_tokens": 24, "seed": 11, "temperature": 0.8, "ignore_eos": True}
TYPED = {name: value for name, value in SETTINGS.items() if name != "ignore_eos"}


@pytest.fixture(scope="module")
def lens(browser: Any, live: Live) -> Iterator[LensPage]:
    """One page for the module, with a run of 24 tokens. At the end: no console error, and no
    request to another host."""
    page = LensPage(browser, live).open()
    page.page.locator("#p-ignore_eos").evaluate("box => { box.closest('details').open = true }")
    page.page.check("#p-ignore_eos")
    page.generate(**TYPED)
    yield page
    page.close()
    assert page.errors == []
    assert {url.split("/")[2] for url in page.requests if url.startswith("http")} == {
        live.url.split("/")[2]
    }
    assert not [url for url in page.requests if not url.startswith(("http", "blob:", "data:"))]


def test_the_page_is_served_under_a_strict_policy(live: Live) -> None:
    answer = live.client.get("/lens")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert not re.search(r"<script(?![^>]*src=)|<style|style=|\son\w+=", answer.text)
    assert live.client.get("/lens/../pyproject.toml").status_code == 404
    assert live.client.get("/lens/__init__.py").status_code == 404


def test_chat_streams_with_probabilities_while_streaming(
    browser: Any, live: Live, gate: Any
) -> None:
    """The engine stops after a few steps: the page already shows tokens and their numbers."""
    page = LensPage(browser, live).open()
    page.set(max_tokens=12, seed=5)
    page.page.fill("#prompt", "hello")
    gate.set(int(live.metrics()["verbatim_steps_total"]) + 5)
    with page.one_request():
        page.page.click("#send")
        page.page.wait_for_selector("#tile-2")
        expect(page.page.locator("#stop")).to_be_enabled()
        expect(page.page.locator("#tile-1")).to_have_attribute("title", re.compile("probability"))
        expect(page.page.locator(".candidates tr").nth(9)).to_be_attached()
        gate.open()
    ids = live.post("/tokenize", {"messages": [{"role": "user", "content": "hello"}]}).json()
    direct = api(live, ids["tokens"], max_tokens=12, seed=5)
    page.shows(direct["ids"])
    assert page.errors == []
    page.close()


def candidates(lens: LensPage) -> dict[int, float]:
    """id -> log-probability, as the first rows of the table show them."""
    pairs = lens.page.locator(".candidates tr").evaluate_all(
        "all => all.slice(0, 12).map((row) =>"
        " [row.dataset.id, row.querySelector('.p').dataset.logprob])"
    )
    return {int(i): float(logprob) for i, logprob in pairs}


def test_the_bars_are_the_numbers_of_the_api(lens: LensPage) -> None:
    direct = api(lens.live, prompt_ids(lens.live), **SETTINGS)
    lens.shows(direct["ids"])
    for index in (0, 7, 23):
        lens.select(index)
        record = direct["explain"][index]
        becomes(lambda: candidates(lens), {c["id"]: c["logprob"] for c in record["top"][:12]})
        cells = lens.page.locator(".draw tr.winner td")
        expect(cells.nth(3)).to_have_text(f"{record['score']:.2f}")
        share = float(cells.nth(1).inner_text().removesuffix(" %"))
        assert share == pytest.approx(100 * record["final_prob"], abs=0.005)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1.75},
        {"temperature": 2, "top_p": 0.6},
        {"seed": 12345},
        {"temperature": 0},
        {"repetition_penalty": 1.5, "temperature": 1.5},
        # test_lens_draw.py compares the draws of all settings, without a page
        pytest.param({"top_k": 3, "temperature": 1.5}, marks=pytest.mark.soak),
        pytest.param({"min_p": 0.2, "temperature": 1.9}, marks=pytest.mark.soak),
        pytest.param({"typical_p": 0.4, "temperature": 1.2}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_redraw_is_what_a_request_with_that_setting_draws(
    lens: LensPage, changes: dict[str, float]
) -> None:
    ids, known = lens.tokens(), prompt_ids(lens.live)
    for index in (2, 9):
        lens.select(index)
        drawn = lens.slide(**changes)
        direct = api(lens.live, known + ids[:index], **{**SETTINGS, **changes, "max_tokens": 1})
        assert drawn == direct["ids"][0]
        lens.page.click("text=Reset >> nth=-1")


def test_a_branch_is_a_request_with_that_prefix(lens: LensPage) -> None:
    before, known = lens.tokens(), prompt_ids(lens.live)
    lens.select(6)
    row = lens.page.locator(".candidates tr:not(.drawn)").nth(3)
    candidate = int(str(row.get_attribute("data-id")))
    with lens.one_request():
        row.locator("button").click()
    prefix = [*before[:6], candidate]
    direct = api(lens.live, known + prefix, **SETTINGS)
    lens.shows(prefix + direct["ids"])
    counts = lens.page.locator(".branch.on :is(.cached, .computed)")
    expect(counts).to_have_text([re.compile(r"\d")] * 2)
    cached, computed = map(int, counts.all_text_contents())
    assert cached + computed == direct["usage"]["prompt_tokens"]
    assert cached >= 16  # the prefix cache holds whole blocks
    expect(lens.page.locator(".two .column"), "compared with its parent").to_have_count(2)
    lens.page.click("text=Undo")
    lens.page.wait_for_selector(".branch >> nth=1", state="detached")
    lens.shows(before)


def test_a_branch_inside_structured_output_continues_its_grammar(browser: Any, live: Live) -> None:
    page = LensPage(browser, live).open()
    settings = {"regex": "[ -~]{4}[0-9]{6}z?", "seed": 11, "max_tokens": 24, "temperature": 0.8}
    before, known = page.generate(**settings), prompt_ids(live)
    page.select(2)
    row = page.page.locator(".candidates tr:has(button)").nth(1)
    candidate = int(str(row.get_attribute("data-id")))
    with page.one_request():
        row.locator("button").click()
    prefix = [*before[:2], candidate]
    direct = api(live, known + prefix, output_prefix=3, **settings)
    page.shows(prefix + direct["ids"])
    written = bytes(t for t in page.tokens() if t < 256).decode()
    assert re.fullmatch(r"[ -~]{4}[0-9]{6}z?", written)
    # a token that the grammar does not allow, as a client without the table's tags would ask for
    before = page.tokens()
    page.page.evaluate(
        """async () => {
          const { branchFrom } = await import("/lens/run.js");
          const { current } = await import("/lens/store.js");
          await branchFrom(current(), 2, 10);
        }"""
    )
    expect(page.page.locator("[role=alert]")).to_contain_text("does not allow '\\n' (id 10)")
    page.shows(before)
    page.expect_errors(400, "/v1/completions")
    page.page.click("#prove")
    page.page.wait_for_selector("#proof.identical")
    page.close()


def test_a_branch_with_other_settings_starts_with_the_redrawn_token(lens: LensPage) -> None:
    before, known = lens.tokens(), prompt_ids(lens.live)
    lens.select(4)
    drawn = lens.slide(temperature=1.9, top_k=50)
    with lens.one_request():
        lens.page.click("text=Branch here with these settings")
    settings = {**SETTINGS, "temperature": 1.9, "top_k": 50}
    direct = api(lens.live, known + before[:4], **settings)
    lens.shows(before[:4] + direct["ids"])
    assert direct["ids"][0] == drawn
    lens.page.click("text=Undo")
    lens.page.wait_for_selector(".branch >> nth=1", state="detached")


def test_a_branch_at_a_single_step_is_a_whole_answer(browser: Any, live: Live) -> None:
    """A request for one token drew the step; the branch has the length that the controls say."""
    page = LensPage(browser, live).open()
    with page.one_request():
        page.start(button="#step", max_tokens=6, seed=8)
    with page.one_request():
        page.page.click("#step")
    page.shows_tokens(2)
    page.select(0)
    with page.one_request():
        page.page.evaluate("() => document.querySelector('.candidates tr button').click()")
    known = page.tokens()
    direct = api(live, prompt_ids(live) + known[:1], seed=8, max_tokens=6, output_prefix=1)
    assert known[1:] == direct["ids"]
    assert page.errors == []
    page.close()


def test_the_keyboard_walks_over_the_tokens(lens: LensPage) -> None:
    lens.select(3)
    lens.page.focus("#tiles")
    for key, at in (("ArrowRight", 4), ("End", 23), ("Home", 0), ("ArrowDown", 10)):
        lens.page.keyboard.press(key)
        expect(lens.page.locator(f"#tile-{at}")).to_have_attribute("aria-selected", "true")
        tiles = lens.page.locator("#tiles")
        expect(tiles).to_have_attribute("aria-activedescendant", f"tile-{at}")
    expect(lens.page.locator("#live")).to_contain_text("probability")
    unnamed = lens.page.evaluate(
        "() => [...document.querySelectorAll('button, input, select, textarea')].filter(e =>"
        " !e.textContent.trim() && !e.getAttribute('aria-label') && !e.labels?.length)"
        ".map(e => e.outerHTML)"
    )
    assert unnamed == []
    levels = lens.page.locator("h1, h2, h3, h4").evaluate_all(
        "all => all.map((heading) => Number(heading.tagName[1]))"
    )
    assert all(after <= before + 1 for before, after in pairwise(levels))
    heights = lens.page.locator("input[type=range]").evaluate_all(
        "all => all.map((box) => box.offsetHeight).filter((height) => height)"
    )
    assert min(heights) >= 24, "WCAG 2.2: a target is at least 24 pixels high"


def test_the_cards_of_a_column_are_equally_wide(lens: LensPage) -> None:
    lens.select(3)
    for column, cards in ((".middle", 5), (".right", 3)):
        found = lens.page.locator(f"{column} .card")
        expect(found).to_have_count(cards)
        widths = found.evaluate_all(
            "cards => cards.map((card) => Math.round(card.getBoundingClientRect().width))"
        )
        assert len(set(widths)) == 1, (column, widths)


@pytest.mark.soak
def test_colours_follow_the_choice(lens: LensPage) -> None:
    heat = "tile => tile.style.getPropertyValue('--heat')"
    seen = set()
    for name in ("probability", "rank", "entropy", "margin", "relative"):
        lens.page.select_option("#colour", name)
        lens.page.evaluate("() => new Promise(r => requestAnimationFrame(() => r()))")
        seen.add(tuple(lens.page.locator(f"#tile-{i}").evaluate(heat) for i in range(24)))
    assert len(seen) == 5
    lens.page.select_option("#colour", "probability")


def test_the_engine_view_shows_this_keys_steps_and_blocks(lens: LensPage) -> None:
    lens.page.click("nav >> text=Engine")
    lens.page.wait_for_selector(".strip i")
    api(lens.live, "a request of the same key", max_tokens=4)  # recorded: the page watches
    lens.page.wait_for_selector(".timeline i")
    lens.page.wait_for_selector(".lanes i")
    lens.page.wait_for_selector("#plot i")
    lens.page.click("nav >> text=Generate")
    lens.page.wait_for_selector("#tile-23")


def test_the_engine_view_marks_evicted_blocks_and_preempted_requests(
    browser: Any, live: Live
) -> None:
    """Two reports of a small cache, as the server would send them: between them two cached blocks
    were evicted, and a request that was preempted computes its tokens again."""
    page = LensPage(browser, live)
    reports = iter(range(1000))

    def answer(route: Any) -> None:
        report = route.fetch().json()
        late = next(reports) > 0
        part = {"request": "req-0123456789", "tokens": 1, "kind": "decode", "drafts": 0}
        part |= {"accepted": 0, "source": "", "arrival": 0.5, "preemptions": 0}
        steps = [{"step": 1, "at": 1.0, "seconds": 0.1, "parts": [part | {"start": 40}]}]
        again = part | {"start": 0, "tokens": 41, "kind": "prefill", "preemptions": 1}
        steps += [{"step": 2, "at": 3.0, "seconds": 0.2, "parts": [again]}]
        pool = {"total": 8, "used": 3, "cached": 3, "free": 2, "own": 2, "shared": 1}
        pool |= {"strip": "oosccc..", "evictions": 9, "evicted": [7, 4]}
        if late:
            pool |= {"evictions": 11, "evicted": [7, 4, 1, 3]}
        report |= {"pools": [pool], "steps": [] if late else [s | {"others": 0} for s in steps]}
        route.fulfill(json=report)

    page.page.route("**/lens/api/engine*", answer)
    page.page.add_init_script("performance.now = () => 0;")  # the marks would fade after 5 s
    page.open()
    page.page.click("nav >> text=Engine")
    marked = page.page.wait_for_function(
        """() => {
          const cells = [...document.querySelectorAll(".strip i")].map((cell, i) =>
            cell.classList.contains("gone") ? i : -1).filter((i) => i >= 0);
          return cells.length && cells;
        }"""
    )
    assert marked.json_value() == [1, 3]
    expect(page.page.locator("[aria-label=cache]")).to_contain_text("evicted 11")
    expect(page.page.locator(".lanes i.preempted")).to_have_count(1)
    expect(page.page.locator(".lanes")).to_contain_text("preempted 1×")
    assert page.errors == []
    page.page.unroute_all(behavior="ignoreErrors")  # a poll may be on its way
    page.close()


# ------------------------------------------------------------------------------------- saved runs


@pytest.fixture(scope="module")
def saved(lens: LensPage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    lens.select(5)
    return lens.save(tmp_path_factory.mktemp("saved") / "run.html")


def test_a_saved_run_opens_without_a_server(browser: Any, lens: LensPage, saved: Path) -> None:
    page = LensPage(browser, lens.live, offline=True)
    page.page.goto(saved.as_uri())
    page.page.wait_for_selector("#tile-23")
    page.shows(lens.tokens())
    page.select(9)
    expect(page.page.locator("[data-stage=temperature]")).to_have_count(1)
    row = next(data for key, data in run_of(saved)["rows"] if key.endswith(":0:9"))
    assert page.slide(temperature=0) == row["top"][0][0]
    assert page.errors == []
    assert [url for url in page.requests if url.startswith("http")] == []
    page.close()


REDRAWS = """async () => {
  const { state } = await import("/lens/store.js");
  const panels = [...document.querySelectorAll(".panel")];
  const box = document.querySelector("[data-what=temperature]");
  let inside = 0, outside = 0, shown = 0;
  const heights = new Set();
  const watch = new MutationObserver((all) => {
    for (const { target } of all)
      if (panels.some((panel) => panel.contains(target))) inside++;
      else if (!document.body.isSameNode(target)) outside++;
  });
  watch.observe(document.body, { subtree: true, childList: true, attributes: true,
    characterData: true });
  const { vocab } = state, { show } = vocab;
  vocab.show = (id) => { shown++; return show.call(vocab, id); };
  for (let i = 0; i < 60; i++) {
    box.value = 0.3 + i / 40;
    box.dispatchEvent(new Event("input"));
    await new Promise((r) => requestAnimationFrame(() => r()));
    heights.add(document.documentElement.scrollHeight);
  }
  await new Promise((r) => setTimeout(r));
  watch.disconnect();
  delete vocab.show;
  return [inside, outside, shown, heights.size];
}"""


@pytest.mark.soak
def test_the_work_of_a_redraw_does_not_depend_on_the_length_of_the_text(
    lens: LensPage, saved: Path, tmp_path: Path
) -> None:
    """60 redraws beside 600 tokens touch what 60 redraws beside 24 tokens touch: the panels of
    the chosen step, and no tile. bench/lens_slider.py measures the time."""
    data = run_of(saved)
    tokens = data["tokens"]
    work = []
    for length in (24, 600):
        data["tokens"] = [dict(tokens[i % len(tokens)]) for i in range(length)]
        data["branches"][0]["tokens"] = list(range(length))
        file = tmp_path / f"{length}.json"
        file.write_text(json.dumps(data))
        lens.page.set_input_files("#load", file)
        lens.page.wait_for_selector(f"#tile-{length - 1}", state="attached")
        lens.page.wait_for_selector(f"#tile-{length}", state="detached")
        lens.select(5)
        lens.slide(top_k=40)
        inside, outside, shown, heights = lens.page.evaluate(REDRAWS)
        assert outside == 0
        assert heights == 1, "a page that grows or shrinks is laid out and painted as a whole"
        assert inside >= 60, "the funnel follows the slider"
        work.append((inside, shown))
        lens.slide(temperature=SETTINGS["temperature"])
    assert work[0] == work[1]


def test_a_word_of_the_page_opens_what_it_means(lens: LensPage) -> None:
    lens.select(3)
    lens.page.click(".loop button:text-is('softmax')")
    lens.page.wait_for_selector(
        "#term:popover-open:has-text('Turns the logits into probabilities')"
    )
    lens.page.keyboard.press("Escape")
    lens.page.wait_for_selector("#term", state="hidden")


def test_a_run_without_a_limit_has_none_of_the_lens(browser: Any, live: Live) -> None:
    """4,096 tokens of context with 64 candidates each are more than the server explains. The
    parameters make room for the run."""
    page = LensPage(browser, live).open()
    page.generate(max_tokens=2)
    page.page.wait_for_selector(".params:not([open])")
    page.set(max_tokens="")
    with page.page.expect_request("**/v1/completions") as sent, page.one_request():
        page.start(regex="a{3}")
    body = sent.value.post_data_json
    assert body["max_tokens"] == 250_000 // 64
    assert "on_loop" not in body
    page.shows_tokens(3)
    assert page.errors == []
    page.close()


# ------------------------------------------------------------------------------------------- phone


@pytest.mark.parametrize("scheme", ["dark", pytest.param("light", marks=pytest.mark.soak)])
def test_a_phone_needs_no_sideways_scrolling(browser: Any, live: Live, scheme: str) -> None:
    page = LensPage(browser, live, color_scheme=scheme)
    page.page.set_viewport_size({"width": 390, "height": 844})
    page.open()
    page.generate(**TYPED)
    page.select(3)
    becomes(lambda: page.page.evaluate("() => document.documentElement.scrollWidth <= 390"), True)
    colour = page.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", colour)[:3])) > 380
    assert light == (scheme == "light")
    page.page.click("nav >> text=Engine")
    page.page.wait_for_selector("#plot i")
    page.page.wait_for_function(
        """() => {  // a swatch and its word are on one line
          const keys = [...document.querySelectorAll(".legend i")].map((i) => i.parentElement);
          return keys.length > 9 && keys.every((key) => key.getClientRects().length === 1
            && key.matches("span") && key.textContent.length);
        }"""
    )
    assert page.errors == []
    page.close()
