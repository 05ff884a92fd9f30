"""Make the pictures of the chat and the Lens in docs/pictures: a server on the default model, a
browser, a few clicks. Needs Chromium, Playwright and Pillow (`make test` installs them).

    python examples/lens_pictures.py [FOLDER]
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, Playwright, sync_playwright

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
DESKTOP, WINDOW, PHONE = (1440, 1000), (1200, 840), (390, 844)  # CSS pixels
PICTURES = {
    "lens-light": (DESKTOP, "light", "generate"),
    "lens-dark": (DESKTOP, "dark", "branch"),
    "lens-engine": (DESKTOP, "light", "engine"),
    "lens-phone-light": (PHONE, "light", "generate"),
    "lens-phone-dark": (PHONE, "dark", "generate"),
    "chat-light": (WINDOW, "light", "chat"),
    "chat-dark": (WINDOW, "dark", "chat"),
    "chat-phone": (PHONE, "light", "chat"),
}
SEED = "2"  # of the chat, so that the pictures can be made again
CHAT = ("Name the capital of France.", "Write a Python function that adds two numbers.")
PROMPT = "Tell me about Paris in two sentences."


def start_server(python: str = sys.executable) -> tuple[subprocess.Popen[str], str]:
    command = [python, "-m", "verbatim", "serve", "--port", "0", "--default-seed", SEED]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url, ready = "", False  # the two lines come in either order
    for line in process.stderr:
        if found := re.search(r"listening on (http://\S+)", line):
            url = found[1]
        ready = ready or " ready: " in line
        if url and ready:
            break
    return process, url


def chromium(playwright: Playwright) -> Browser:
    names = ("chromium", "google-chrome", "chromium-headless-shell")
    found = next((path for name in names if (path := shutil.which(name))), None)
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    return playwright.chromium.launch(executable_path=found, args=flags)


def set_param(page: Page, name: str, value: object) -> None:
    box = page.locator(f"#p-{name}")
    box.evaluate("box => box.closest('details').open = true")
    box.fill(str(value))
    box.dispatch_event("change")


def generate(page: Page, url: str, view: str) -> None:
    page.goto(f"{url}/lens")
    page.wait_for_selector("#send:not([disabled])")
    set_param(page, "seed", 18)
    set_param(page, "temperature", 0.9)
    set_param(page, "top_p", 0.95)
    page.fill("#prompt", PROMPT)
    page.click("#send")
    page.wait_for_selector("body[data-requests='1']")
    page.click("#tile-8")
    page.wait_for_selector(".stages")
    if view == "branch":
        page.click(".candidates tr:not(.drawn) button >> nth=1")
        page.wait_for_selector("body[data-requests='2']")
        page.wait_for_selector(".stages")
    if view == "engine":
        page.click("nav >> text=Engine")
        page.wait_for_selector("#plot i")
        page.wait_for_timeout(1500)  # one more poll of the engine
    page.wait_for_timeout(400)  # the bars' transitions


def chat(page: Page, url: str) -> None:
    page.goto(url)
    page.wait_for_selector("body[data-ready]")
    for text in CHAT:
        page.fill("#message", text)
        page.press("#message", "Enter")
        page.wait_for_selector(f".turn:has-text('{text}') + .assistant[aria-busy=false]")
    page.wait_for_timeout(400)  # the transitions


def save(png: bytes, path: Path) -> None:
    """A palette of 128 colours: a third of the size, and no visible difference on flat colours."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} KB")


def take(browser: Browser, url: str, folder: Path) -> None:
    for name, ((width, height), scheme, view) in PICTURES.items():
        page = browser.new_page(
            viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=1
        )
        page.set_default_timeout(120_000)
        if view == "chat":
            chat(page, url)
        else:
            generate(page, url, view)
        full = (width, height) == DESKTOP
        if full:  # the browser skips what is out of view
            tall = page.evaluate("() => document.documentElement.scrollHeight")
            page.set_viewport_size({"width": width, "height": tall})
        elif view != "chat":
            page.evaluate("() => document.querySelector('.sequence').scrollIntoView()")
        save(page.screenshot(), folder / f"{name}.png")
        page.close()


def main(folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    server, url = start_server()
    try:
        with sync_playwright() as playwright, chromium(playwright) as browser:
            take(browser, url, folder)
    finally:
        server.terminate()
        server.communicate()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
