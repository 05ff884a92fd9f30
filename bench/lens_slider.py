"""Slider redraws of the Lens beside 2,000 tokens: CPU time per redraw, and redraws per second.

    python bench/lens_slider.py [--tokens 2000] [--redraws 300]      the last line is JSON

Needs Chromium and Playwright (`make test` installs them). The limit is one redraw per frame of the
display, 16.7 ms. CPU times hold on a busy machine too; redraws per second need an idle one. `task`
is the page's main thread, which must stay below the limit: script, style, layout, and the rest,
mostly paint. `all` adds the other threads and processes of Chromium, which run beside it; without a
GPU they rasterise on the CPU.
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


PARTS = {
    "script": "ScriptDuration",
    "style": "RecalcStyleDuration",
    "layout": "LayoutDuration",
    "task": "TaskDuration",
}


def cpu_ms(session: Any, browser: Any) -> dict[str, float]:
    """CPU time since the start: parts of the main thread, and all processes of Chromium."""
    found = session.send("Performance.getMetrics")["metrics"]
    values = {entry["name"]: 1000 * entry["value"] for entry in found}
    processes = browser.send("SystemInfo.getProcessInfo")["processInfo"]
    everything = 1000 * sum(process["cpuTime"] for process in processes)
    return {**{part: values[name] for part, name in PARTS.items()}, "all": everything}


def measure(page: Any, tokens: int, redraws: int) -> dict[str, float]:
    page.evaluate(LENGTHEN, tokens)
    page.wait_for_selector(f"#tile-{tokens - 1}", state="attached")
    page.evaluate(SLIDE, 30)  # warm-up
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    browser = page.context.browser.new_browser_cdp_session()
    before = cpu_ms(session, browser)
    wall = page.evaluate(SLIDE, redraws)
    after = cpu_ms(session, browser)
    per = {f"{part}_ms": (after[part] - before[part]) / redraws for part in after}
    return {**per, "redraws_per_second": 1000 * redraws / wall}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--redraws", type=int, default=300)
    given = parser.parse_args()
    names = ("chromium", "google-chrome", "chromium-headless-shell")
    chromium = next((found for name in names if (found := shutil.which(name))), None)
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
    for name in (*PARTS, "all"):
        print(f"{name:<10} {found[f'{name}_ms']:.2f} ms of CPU per redraw")
    print(f"measured   {found['redraws_per_second']:.1f} redraws per second, {given.tokens} tokens")
    print(json.dumps({"tokens": given.tokens, "redraws": given.redraws, **found}))


if __name__ == "__main__":
    main()
