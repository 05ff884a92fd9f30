"""Which controls of a page Tab reaches."""

from __future__ import annotations

from typing import Any

# Visible controls that a key must reach; of the radio buttons of one name, the chosen one.
CONTROLS = """() => [...document.querySelectorAll(
    "a, button, input, select, textarea, summary, [tabindex='0']")]
  .filter((e) => !e.disabled && e.checkVisibility() && !(e.type === "radio" && !e.checked))
  .map((e) => { e.dataset.control = ''; return e.outerHTML.slice(0, 120); })"""
FOCUS = """() => {
  const active = document.activeElement, seen = active.dataset.reached;
  active.dataset.reached = "yes"; // also of the body, which has the focus between two rounds
  return !seen;
}"""


def unreached(page: Any) -> list[str]:
    """Controls of this view that Tab does not reach in one round, from where the focus is."""
    page.evaluate(CONTROLS)
    page.evaluate(
        "() => document.querySelectorAll('[data-reached]').forEach((e) => delete e.dataset.reached)"
    )
    page.keyboard.press("Tab")
    while page.evaluate(FOCUS):
        page.keyboard.press("Tab")
    found = page.locator("[data-control]:not([data-reached])").evaluate_all(
        "all => all.map((e) => e.outerHTML.slice(0, 120))"
    )
    page.evaluate(
        "() => document.querySelectorAll('[data-control]').forEach((e) => delete e.dataset.control)"
    )
    return list(found)
