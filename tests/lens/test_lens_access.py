"""The Lens without a mouse: every control of every view is reached by Tab, and works by keys. With
`make soak`: axe (from npm) finds nothing, in every view, light and dark, desktop and phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lens_page import LensPage
from live_server import Live

from axe_core import axe, violations
from tab_order import unreached

pytestmark = pytest.mark.server
__all__ = ["axe"]  # a fixture
DESKTOP, PHONE = {"width": 1400, "height": 900}, {"width": 390, "height": 844}


def test_tab_reaches_every_control_and_keys_operate_them(browser: Any, live: Live) -> None:
    page = LensPage(browser, live).open()
    assert unreached(page.page) == []
    page.page.focus("#prompt")
    page.set(max_tokens=6, seed=2)
    page.page.focus("#prompt")
    with page.one_request():
        page.page.keyboard.press("Enter")
    page.page.focus("#tiles")
    page.page.keyboard.press("Home")
    page.page.wait_for_selector("#tile-0[aria-selected=true]")
    page.page.wait_for_selector("#outcome[data-token]:not([data-token=''])")
    assert unreached(page.page) == []
    page.page.focus("[data-what=temperature]")
    page.page.keyboard.press("ArrowLeft")
    page.page.wait_for_selector("label.moved [data-what=temperature]")
    page.page.locator(".candidates button").first.focus()
    with page.one_request():
        page.page.keyboard.press("Enter")
    page.page.wait_for_selector(".branch >> nth=1")
    page.page.locator("nav button").nth(1).focus()
    page.page.keyboard.press("Enter")
    page.page.wait_for_selector(".timeline i")
    page.page.route("**/lens/api/engine*", lambda route: None)  # no redraw while Tab walks
    assert unreached(page.page) == []
    assert page.errors == []
    page.page.unroute_all(behavior="ignoreErrors")
    page.close()


@pytest.mark.soak
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(
    browser: Any, live: Live, axe: str, tmp_path: Path, size: dict[str, int], scheme: str
) -> None:
    page = LensPage(browser, live, color_scheme=scheme, bypass_csp=True)
    page.page.set_viewport_size(size)
    page.open()
    found = {"start": violations(page.page, axe)}
    page.generate(max_tokens=8, seed=7, n=3, top_p=0.9, logit_bias='{"100": 3}')
    page.select(3)
    page.page.check("#bytes")
    found["raw completion, answers, funnel"] = violations(page.page, axe)
    with page.one_request():
        page.page.locator(".candidates button").first.click()
    page.page.click("#prove")
    page.page.wait_for_selector("#proof.identical")
    found["branches, proof"] = violations(page.page, axe)
    with page.page.expect_download() as download:
        page.page.click("#save")
    download.value.save_as(tmp_path / "run.html")
    page.page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    page.page.check("text=Chat")
    with page.one_request():
        page.page.click("#send")
    found["chat, every control"] = violations(page.page, axe)
    page.start(top_p=5)
    page.page.wait_for_selector("[role=alert]")
    found["error"] = violations(page.page, axe)
    page.page.click("nav >> text=Engine")
    page.page.wait_for_selector("#plot i")
    found["engine"] = violations(page.page, axe)
    page.page.goto((tmp_path / "run.html").as_uri())
    page.page.wait_for_selector("#tile-3")
    found["saved file"] = violations(page.page, axe)
    assert {view: all_ for view, all_ in found.items() if all_} == {}
    page.close()
