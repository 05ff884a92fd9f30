"""The documentation site builds without a warning, is complete, asks nothing outside for a file,
and works in a browser. One file, because its tests share the built site, which takes 13 s.
test_docs_tables.py checks the links of the sources in `make test`."""

from __future__ import annotations

import dataclasses
import html
import inspect
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

import verbatim
from eventually import HANG_SECONDS
from verbatim import EngineConfig
from verbatim.base.params import FIELDS
from verbatim.cli import main as cli_main
from verbatim.server.api.routes import BODIES

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.soak


def page(site: Path, name: str) -> str:
    return html.unescape((site / name).read_text("utf-8"))


def plain(text: str) -> str:
    """The text of a page without its tags, entities and line breaks."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", "", text)))


def test_every_public_name_has_its_entry(site: Path) -> None:
    reference = "".join(page(site, p.relative_to(site)) for p in site.glob("reference/*.html"))
    for name in verbatim.__all__:
        if name.startswith("__"):
            assert f"verbatim.{name}" in plain(reference), name
        else:
            assert f'id="verbatim.{name}"' in reference, name


@pytest.mark.parametrize("owner", ["LLM", "AsyncEngine", "Stream", "AsyncStream"])
def test_every_public_method_has_its_entry(owner: str, site: Path) -> None:
    internal = {"from_loaded", "from_parts", "submit_to", "call"}
    engines = page(site, "reference/engines.html")
    for name, _ in inspect.getmembers_static(getattr(verbatim, owner), callable):
        if not name.startswith("_") and name not in internal:
            assert f'id="verbatim.{owner}.{name}"' in engines, f"{owner}.{name}"


def test_every_command_has_its_section(site: Path) -> None:
    """Its flags are compared with the file that the page is made from (test_docs_tables.py)."""
    text = page(site, "cli.html")
    for name in cli_main.COMMANDS:
        assert f'id="verbatim-{name}"' in text, name


def test_every_setting_and_parameter_is_shown(site: Path) -> None:
    text = page(site, "reference/parameters.html")
    for name in [*FIELDS, *(field.name for field in dataclasses.fields(EngineConfig))]:
        assert f"<code>{name}</code>" in text, name


def test_every_request_field_and_route_is_shown(
    site: Path, default_model: Path, doc_server: Callable[[], int]
) -> None:
    fields, routes = plain(page(site, "api-fields.html")), page(site, "server.html")
    for path, route in BODIES.items():
        for name in route.fields:
            assert f" {name} " in fields, f"{path}: {name}"
    schema = get(doc_server(), "/openapi.json").json()
    for path in schema["paths"]:
        assert f"<code>{path}</code>" in routes, path


def test_every_metric_is_shown(
    site: Path, default_model: Path, doc_server: Callable[[], int]
) -> None:
    text = page(site, "operations.html")
    metrics = get(doc_server(), "/metrics").text
    names = re.findall(r"^# TYPE (\w+)", metrics, re.MULTILINE)
    assert len(names) > 20
    for name in names:
        assert f"<code>{name}</code>" in text, name


def get(port: int, path: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=HANG_SECONDS)


class Links(HTMLParser):
    """The addresses on a page, the anchors that an address may name, and the addresses that a
    browser fetches when it shows the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: set[str] = set()
        self.anchors: set[str] = set()
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag in ("script", "img", "iframe", "source", "audio", "video"):
            self.fetched.append(values.get("src", ""))
        elif tag == "link" and values.get("rel") not in ("canonical", "next", "prev"):
            self.fetched.append(values.get("href", ""))
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.addresses.add(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


@pytest.fixture(scope="module")
def parsed(site: Path) -> dict[Path, Links]:
    """Every page of the site; parsing all takes seconds."""
    return {path.resolve(): Links(path.read_text("utf-8")) for path in site.rglob("*.html")}


def test_no_page_asks_anything_outside(site: Path, parsed: dict[Path, Links]) -> None:
    for path, links in parsed.items():
        outside = [u for u in links.fetched if re.match(r"(https?:)?//", u)]
        assert not outside, f"{path.name}: {outside}"
        assert 'class="mermaid"' not in path.read_text("utf-8"), "Material would fetch mermaid"
    for path in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        text = path.read_text("utf-8")
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", text), path.relative_to(site)


def test_search_works_without_a_server(site: Path) -> None:
    """From the file system the index is a script, and a shim stands in for the web worker."""
    index = (site / "search" / "search_index.js").read_text("utf-8")
    assert index.startswith("var __index")
    assert "min_p" in index
    assert "adr/0012" in index
    assert "assets/iframe-worker.js" in (site / "index.html").read_text("utf-8")
    assert "source/examples" not in index, "source files stay out of the index"


def test_no_link_is_broken(parsed: dict[Path, Links]) -> None:
    """Every address inside the site leads to a file and, with #, to an anchor in it. 404.html is
    for a server: its addresses start at the root."""
    pages = {path: links for path, links in parsed.items() if path.name != "404.html"}
    broken = []
    for path, links in pages.items():
        for address in links.addresses:
            if re.match(r"[a-z]+:|//", address):
                continue
            file, _, anchor = unquote(address).partition("#")
            target = (path.parent / file).resolve() if file else path
            target = target / "index.html" if target.is_dir() else target
            known = pages[target].anchors if target in pages else {anchor}
            if not target.exists() or (anchor and anchor not in known):
                broken.append(f"{path.name}: {address}")
    assert not broken


def test_the_list_of_decisions_is_complete(site: Path) -> None:
    for folder in ("adr", "log"):
        index = page(site, f"{folder}/index.html")
        for decision in (ROOT / "docs" / folder).glob("0*.md"):
            assert f'href="{decision.stem}.html"' in index, decision.name


# ---- in a browser, from the file system: pages open, search works without a network

WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}


@pytest.mark.parametrize("words", ["grammar", "prefix cache"])
def test_a_search_finds_guides_before_decisions_and_logs(
    site: Path, browser: Any, words: str
) -> None:
    page = browser.new_page()
    page.set_default_timeout(1000 * HANG_SECONDS)
    page.goto((site / "index.html").as_uri())
    page.locator("input.md-search__input").press_sequentially(words)
    results = page.locator("a.md-search-result__link")
    results.first.wait_for()
    found = [link.get_attribute("href") or "" for link in results.all()[:4]]
    assert not [link for link in found if re.search("/(adr|log)/|/changelog", link)]
    page.close()


@pytest.mark.parametrize("size", [pytest.param(size, id=name) for name, size in WIDTHS.items()])
def test_a_reader_searches_and_follows_a_result(
    site: Path, browser: Any, size: tuple[int, int]
) -> None:
    wide, high = size
    page = browser.new_page(viewport={"width": wide, "height": high})
    page.set_default_timeout(1000 * HANG_SECONDS)
    wrong: list[str] = []
    asked: list[str] = []
    page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / "index.html").as_uri())
    assert page.inner_text("h1").startswith("Verbatim")
    assert page.evaluate("document.documentElement.scrollWidth") <= wide, "it scrolls sideways"
    if wide < 1000:
        page.click("label.md-header__button[for=__search]")
    page.locator("input.md-search__input").press_sequentially("keep_alive")  # as keys: keyup
    page.locator("a.md-search-result__link").first.click()
    page.wait_for_url(lambda url: "index.html" not in url)
    assert "keep_alive" in page.inner_text("article")
    assert page.evaluate("document.documentElement.scrollWidth") <= wide
    page.close()
    assert wrong == []
    outside = [url for url in asked if not url.startswith((site.as_uri(), "data:", "blob:"))]
    assert outside == []
