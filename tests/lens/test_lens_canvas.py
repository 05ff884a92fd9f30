"""The Lens of a diffusion model: the canvas of a block step by step, and the proof by a replay."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from lens_page import LensPage
from live_server import Live
from playwright.sync_api import expect

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def lens(browser: Any) -> Iterator[LensPage]:
    live = Live(engine="pipeline,diffusion=4").wait_ready()
    page = LensPage(browser, live).open()
    page.page.locator("#p-ignore_eos").evaluate("box => { box.closest('details').open = true }")
    page.page.check("#p-ignore_eos")
    page.generate(max_tokens=12, seed=11, temperature=0.8)
    yield page
    page.close()
    assert page.errors == []
    live.stop()


def test_the_canvas_shows_what_each_step_decided(lens: LensPage) -> None:
    lens.page.locator("#tile-6").click()
    canvas = lens.page.locator("table.canvas")
    expect(canvas.locator("tr")).to_have_count(4)  # one position per step, where none is sure
    first, last = canvas.locator("tr").first, canvas.locator("tr").last
    expect(first.locator("td.drawn")).to_have_count(1)
    expect(first.locator("td.quiet")).to_have_count(3)
    expect(last.locator("td.quiet")).to_have_count(0)


def test_the_funnel_says_why_it_shows_no_step(lens: LensPage) -> None:
    lens.page.locator("#tile-2").click()
    expect(lens.page.locator(".hint").last).to_contain_text("belong to the masks of that moment")


def test_the_proof_replays_the_answer(lens: LensPage) -> None:
    assert "identical" in lens.prove()


def test_the_same_prompt_runs_from_left_to_right_beside_the_blocks(lens: LensPage) -> None:
    """One token per pass, in the first masked position; the first run needs fewer passes."""
    lens.page.locator("#tile-6").click()
    pace = lens.page.locator("table.pace tr")
    expect(pace).to_have_count(1)
    lens.page.get_by_role("button", name="from left to right").click()
    expect(pace).to_have_count(2)
    expect(pace.first).to_contain_text("left to right12 tokens12 passes")
    expect(pace.last).to_contain_text(re.compile(r"run12 tokens\d+ passes[\d.]+ "))
    drawn = lens.page.locator("table.canvas td.drawn").all_inner_texts()
    last = lens.page.locator("table.canvas tr").last.locator("td").all_inner_texts()
    assert drawn == last  # in order of position
