"""A page of the Lens in a browser, driven by its buttons; and the same questions to the API."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from live_server import Live
from playwright.sync_api import expect

from eventually import HANG_SECONDS, becomes, eventually
from verbatim.base.records import DrawSpec
from verbatim.sampling.pipeline import Row, state_of
from verbatim.server.process.lens_queries import step_report

MS = 1000 * HANG_SECONDS
PROMPT = "Once upon a time"
OPEN = "(box) => { for (let up = box; up; up = up.parentElement) up.open = true }"


class LensPage:
    """Collects console errors and requests that leave the host."""

    def __init__(self, browser: Any, live: Live, **options: Any) -> None:
        self.live = live
        self.context = browser.new_context(viewport={"width": 1400, "height": 900}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(MS)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "response",
            lambda r: self.errors.append(f"{r.status} {r.url}") if r.status >= 400 else None,
        )
        self.context.on("request", lambda request: self.requests.append(request.url))

    def open(self) -> LensPage:
        self.page.goto(self.live.url + "/lens")
        self.page.wait_for_selector("#send:not([disabled])")
        return self

    def set(self, **params: Any) -> None:
        for name, value in params.items():
            box = self.page.locator(f"#p-{name}")
            box.evaluate(OPEN)
            box.fill(str(value))
            box.dispatch_event("change")

    def start(self, prompt: str = PROMPT, button: str = "#send", **params: Any) -> None:
        self.page.check("text=Raw text")
        self.set(**params)
        self.page.fill("#prompt", prompt)
        self.page.click(button)

    @contextmanager
    def one_request(self) -> Iterator[None]:
        """Wait until the request that the body causes has ended and is drawn."""
        before = int(self.page.get_attribute("body", "data-requests") or 0)
        yield
        self.page.wait_for_selector(f"body[data-requests='{before + 1}']")

    def generate(self, prompt: str = PROMPT, **params: Any) -> list[int]:
        with self.one_request():
            self.start(prompt, **params)
        return self.tokens()

    def tokens(self) -> list[int]:
        """The ids on the tiles."""
        texts = self.page.locator(".tile small").all_text_contents()
        return [int(text.split(" ")[0]) for text in texts]

    def shows(self, ids: list[int]) -> None:
        """Wait until the tiles have these ids."""
        becomes(self.tokens, ids)

    def shows_tokens(self, count: int) -> None:
        expect(self.page.locator(".tile")).to_have_count(count)

    def select(self, index: int) -> None:
        self.page.click(f"#tile-{index}")
        self.page.wait_for_selector(f"#tile-{index}[aria-selected=true]")
        self.page.wait_for_selector(".stages")
        self.page.wait_for_selector("#outcome[data-token]:not([data-token=''])")

    def slide(self, **settings: float) -> int:
        """Move sliders; returns the id that the page draws."""
        for name, value in settings.items():
            self.page.locator(f"[data-what={name}]").evaluate(
                "(box, value) => { box.value = value;"
                " box.dispatchEvent(new Event(box.type === 'range' ? 'input' : 'change')); }",
                str(value),
            )
        self.page.evaluate("() => new Promise(r => requestAnimationFrame(() => r()))")
        self.page.wait_for_selector("#outcome[data-token]:not([data-token=''])")
        return int(str(self.page.get_attribute("#outcome", "data-token")))

    def expect_errors(self, status: int, path: str, *more: str) -> None:
        """Errors that the test has caused: the browser logs each failed request too, later."""
        caused, logged = f"{status} {self.live.url}{path}", f"status of {status} "

        def both() -> bool:
            self.page.evaluate("0")  # handles the events that have come
            answers = sum(error.startswith(f"{status} ") for error in self.errors)
            return caused in self.errors and answers == sum(logged in e for e in self.errors)

        eventually(both, lambda: f"the errors are {self.errors}")
        expected = (f"{status} ", *more)
        assert not [e for e in self.errors if not any(part in e for part in expected)]
        self.errors.clear()

    def save(self, path: Path) -> Path:
        with self.page.expect_download() as download:
            self.page.click("#save")
        download.value.save_as(path)
        return path

    def load(self, file: Path) -> None:
        """Open a saved run, and wait until the page shows it."""
        self.page.evaluate(
            "async () => { window.lens = (await import('/lens/store.js')).state;"
            " window.before = window.lens.branches; }"
        )
        self.page.set_input_files("#load", file)
        self.page.wait_for_function("() => window.lens.branches !== window.before")

    def prove(self) -> str:
        """The verdict."""
        self.page.evaluate(
            "async () => { window.lens = (await import('/lens/store.js')).state;"
            " window.lastProof = window.lens.proof; }"
        )
        self.page.click("#prove")
        self.page.wait_for_function(
            "() => window.lens.proof && window.lens.proof !== window.lastProof"
            " && window.lens.proof.state !== 'running'"
        )
        self.page.evaluate("() => new Promise((r) => requestAnimationFrame(() => r()))")
        self.page.wait_for_selector("#proof.identical, #proof.different")
        return str(self.page.text_content("#proof"))

    def close(self) -> None:
        self.context.close()


def run_of(saved: Path) -> dict[str, Any]:
    """The run in a saved file."""
    found = re.search(r'id="run">(.*?)</script>', saved.read_text(), re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def api(live: Live, prompt: Any, **params: Any) -> dict[str, Any]:
    """The same request without the page: the first choice, with its explanations and token ids."""
    body = {"prompt": prompt, "explain": 20, "receipt": True, **params}
    answer = live.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    data = answer.json()
    return {**data["choices"][0], "ids": data["receipt"]["choices"][0]["token_ids"], **data}


def prompt_ids(live: Live, prompt: str = PROMPT) -> list[int]:
    return list(live.post("/tokenize", {"prompt": prompt}).json()["tokens"])


def report(row: np.ndarray, spec: DrawSpec, position: int) -> dict[str, Any]:
    """What /lens/api/step sends for a row without bias, masks and penalties."""
    raw = row.astype(np.float64)
    out = step_report(raw, state_of(raw, Row(spec, position)), [], [], True)
    return {**out, "row": base64.b64encode(out["row"]).decode()}
