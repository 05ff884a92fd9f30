"""Several answers of one request: each continues with its own noise, and the answers that best_of
rejects can be drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lens_page import LensPage, api, prompt_ids
from live_server import Live
from playwright.sync_api import expect

from eventually import becomes

pytestmark = pytest.mark.server


def choose(page: LensPage, label: str, ids: list[int]) -> None:
    page.page.click(f".tree button:has-text('{label}')")
    page.shows(ids)


def answers(live: Live, prompt: list[int], **params: Any) -> list[list[int]]:
    return [c["token_ids"] for c in api(live, prompt, **params)["receipt"]["choices"]]


def test_every_answer_continues_with_its_own_noise(browser: Any, live: Live) -> None:
    """A step, a branch and a branch under other settings of answer 3 are those of a request for
    three answers to the longer prompt; the sliders show the same draw before."""
    page, known = LensPage(browser, live).open(), prompt_ids(live)
    settings: dict[str, Any] = {"seed": 5, "max_tokens": 4, "temperature": 1.5, "ignore_eos": True}
    page.page.locator("#p-ignore_eos").evaluate("box => { box.closest('details').open = true }")
    page.page.check("#p-ignore_eos")
    page.generate(n=4, **{k: v for k, v in settings.items() if k != "ignore_eos"})
    third = answers(live, known, n=4, **settings)[2]
    choose(page, "answer 3", third)
    one = {**settings, "max_tokens": 1, "n": 3}
    with page.one_request():
        page.page.click("#step")
    third += answers(live, known + third, **one)[2]
    page.shows(third)
    page.select(1)
    drawn = page.slide(temperature=2)
    with page.one_request():
        page.page.click("text=Branch here with these settings")
    hot = {**settings, "temperature": 2, "n": 3}
    expected = third[:1] + answers(live, known + third[:1], **hot)[2]
    page.shows(expected)
    assert expected[1] == drawn
    page.page.click("#prove")
    page.page.wait_for_selector("#proof.identical")
    assert page.errors == []
    page.close()


@pytest.mark.soak
def test_a_beam_can_be_stepped_and_branched(browser: Any, live: Live) -> None:
    page, known = LensPage(browser, live).open(), prompt_ids(live)
    settings: dict[str, Any] = {"num_beams": 4, "max_tokens": 4}
    page.generate(num_return_sequences=3, **settings)
    third = answers(live, known, num_return_sequences=3, **settings)[2]
    choose(page, "answer 3", third)
    with page.one_request():
        page.page.click("#step")
    expected = third + answers(live, known + third, num_beams=4, max_tokens=1)[0]
    page.shows(expected)
    page.page.click("#tile-1")
    page.page.wait_for_selector("#tile-1[aria-selected=true]")
    row = page.page.locator(".candidates tr:has(button)").first
    with page.one_request():  # read and click in one go: the table may be drawn again
        candidate = row.evaluate("r => { r.querySelector('button').click(); return +r.dataset.id }")
    becomes(lambda: page.tokens()[:2], [expected[0], candidate])
    assert page.errors == []
    page.close()


@pytest.mark.soak
def test_the_rejected_answers_of_best_of_are_drawn_dimmed(browser: Any, live: Live) -> None:
    page, known = LensPage(browser, live).open(), prompt_ids(live)
    settings: dict[str, Any] = {"seed": 3, "max_tokens": 5, "temperature": 1.5}
    page.generate(n=2, best_of=5, **settings)
    hint = page.page.locator("[aria-label=branches] .hint").first
    best_two = "2 with the highest mean log-probability, 3 rejected. The API does not"
    expect(hint).to_contain_text(best_two)
    best = answers(live, known, n=2, best_of=5, **settings)
    every = answers(live, known, n=5, **settings)
    with page.one_request():
        page.page.click("text=Draw them")
    labels = [f"rejected {i + 1}" for i, ids in enumerate(every) if ids not in best]
    becomes(lambda: sorted(page.page.locator(".branch.rejected b").all_text_contents()), labels)
    expect(hint).to_contain_text("dimmed; drawn again with the same seed")
    for label in labels:
        choose(page, label, every[int(label.split()[1]) - 1])
    assert page.errors == []
    page.close()


@pytest.mark.soak
def test_a_step_after_a_loop_reports_its_own_request(browser: Any, live: Live) -> None:
    """What the page says about the end is what the last request said: the proof compares it. The
    minimum length of the answer holds in its steps too."""
    page = LensPage(browser, live).open()
    settings: dict[str, Any] = {
        "choice": '["aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"]'
    }
    page.generate(max_tokens=40, min_tokens=30, seed=3, **settings)
    expect(page.page.locator(".warn").first).to_be_attached()
    for count in (41, 42):
        with page.one_request():
            page.page.click("#step")
        page.shows_tokens(count)
        assert "Identical" in page.prove()
    assert page.errors == []
    page.close()


def test_a_refused_step_leaves_the_branch_as_it_was(browser: Any, live: Live) -> None:
    page = LensPage(browser, live).open()
    page.generate(choice='["ab"]')
    said = str(page.page.text_content(".facts"))
    with page.one_request():
        page.page.click("#step")
    page.page.wait_for_selector("[role=alert]:has-text('is complete')")
    expect(page.page.locator(".facts")).to_have_text(said)
    assert "Identical" in page.prove()
    page.expect_errors(400, "/v1/completions")
    page.close()


def test_beams_are_saved_and_proved(browser: Any, live: Live, tmp_path: Path) -> None:
    page = LensPage(browser, live).open()
    page.generate(num_beams=3, num_return_sequences=2, max_tokens=4)
    page.load(page.save(tmp_path / "beams.html"))
    assert "Identical" in page.prove()
    assert page.errors == []
    page.close()


def test_undo_takes_one_step_back(browser: Any, live: Live) -> None:
    page = LensPage(browser, live).open()
    known = page.generate(max_tokens=3, seed=4)
    for count in (4, 5):
        with page.one_request():
            page.page.click("#step")
        page.shows_tokens(count)
    expect(page.page.locator(".facts")).not_to_contain_text("first after -")
    for count in (4, 3):
        page.page.click("text=Undo")
        page.shows_tokens(count)
        assert "Identical" in page.prove()
    page.shows(known)
    assert page.errors == []
    page.close()
