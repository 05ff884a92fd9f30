"""The panels of the Lens, number by number against the API's answer to the same request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from lens_page import LensPage
from live_server import Live

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def lens(browser: Any, live: Live) -> Iterator[LensPage]:
    page = LensPage(browser, live).open()
    yield page
    page.close()
    assert page.errors == []


# ----------------------------------------------------------------------------------- other panels


def test_the_skip_link_has_a_target_on_each_view(lens: LensPage) -> None:
    for view, target in (("Engine", "steps"), ("Generate", "tiles")):
        lens.page.click(f"nav >> text={view}")
        lens.page.wait_for_selector(f".skip[href='#{target}']", state="attached")
        lens.page.focus(".skip")
        lens.page.keyboard.press("Enter")
        lens.page.wait_for_function("id => document.activeElement.id === id", arg=target)
