"""Slider redraws of the Lens beside 2,000 tokens: script, style and layout time per redraw, and
redraws per second.

    python bench/lens_slider.py [--tokens 2000] [--redraws 300]      the last line is JSON

Needs Chromium and Playwright (`make test` installs them). The limit is one redraw per frame of the
display, 16.7 ms. Chromium runs without a GPU here, so it rasterises on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from lens_pictures import generate, start_server

FRAME_MS = 1000 / 60
# Repeats the tokens of the run until there are enough. `tiles` are made for all of them.
LENGTHEN = """async (length) => {
  const { changed, current } = await import("/lens/store.js");
  const { tokens } = current(), few = tokens.length;
  for (let i = few; i < length; i++) tokens.push({ ...tokens[i % few] });
  changed();
}"""
# Each redraw waits for its frame: requestAnimationFrame runs before style, layout and paint, so a
# redraw is complete when the next frame starts.
SLIDE = """async (redraws) => {
  const box = document.querySelector("[data-what=temperature]");
  const frame = () => new Promise((r) => requestAnimationFrame(r));
  const start = performance.now();
  for (let i = 0; i < redraws; i++) {
    box.value = 0.3 + (i % 60) / 40;
    box.dispatchEvent(new Event("input"));
    await frame();
  }
  await frame();
  return performance.now() - start;
}"""


def metrics(session: Any) -> dict[str, float]:
    found = session.send("Performance.getMetrics")["metrics"]
    return {entry["name"]: 1000 * entry["value"] for entry in found}


def measure(page: Any, tokens: int, redraws: int) -> dict[str, float]:
    page.evaluate(LENGTHEN, tokens)
    page.wait_for_selector(f"#tile-{tokens - 1}", state="attached")
    page.evaluate(SLIDE, 30)  # warm-up
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    before = metrics(session)
    wall = page.evaluate(SLIDE, redraws)
    after = metrics(session)
    parts = {"script": "Script", "style": "RecalcStyle", "layout": "Layout", "task": "Task"}
    per = {
        f"{name}_ms": (after[f"{key}Duration"] - before[f"{key}Duration"]) / redraws
        for name, key in parts.items()
    }
    return {**per, "redraws_per_second": 1000 * redraws / wall}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--redraws", type=int, default=300)
    given = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    server, url = start_server()
    try:
        with sync_playwright() as playwright:
            flags = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = playwright.chromium.launch(executable_path=chromium, args=flags)
            page = browser.new_page(viewport={"width": 1440, "height": 1000})
            page.set_default_timeout(300_000)
            generate(page, url, "generate")
            found = measure(page, given.tokens, given.redraws)
            browser.close()
    finally:
        server.terminate()
        server.communicate()
    print(f"limit      {FRAME_MS:.1f} ms per redraw (60 per second)")
    for name in ("script", "style", "layout", "task"):
        print(f"{name:<10} {found[f'{name}_ms']:.2f} ms per redraw")
    print(f"measured   {found['redraws_per_second']:.1f} redraws per second, {given.tokens} tokens")
    print(json.dumps({"tokens": given.tokens, "redraws": given.redraws, **found}))


if __name__ == "__main__":
    main()
