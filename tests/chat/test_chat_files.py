"""The files of the chat page: few, small, known libraries, served under a strict policy."""

from __future__ import annotations

import gzip
import hashlib
import re

import pytest
from live_server import Live

from verbatim import chat
from verbatim.base.page_files import POLICY

VENDOR = chat.PAGE.folder / "vendor"
# SHA-256 of the files as they are on npm; README.md states the versions
DIGESTS = {
    "marked.esm.js": "162194ea902a9d6eca6011bb42b5732991ca650e017d0375b76f4204810c6c14",
    "purify.min.js": "8053ee2a6a09f9d50f7fcd6fb7f07072f52c7f3fa9aa12147cab4feaf65ee970",
    "highlight.min.js": "1ed8fc5256b738b8875b74e4d3f0754f60d6411fb034d618dfbc4e6e6c9999d7",
    "temml.min.js": "1ab19148afe0dbc836b7a74f344071b3f3a70a7a8259ae4049e76894fcdf8d95",
}


def test_the_page_is_small_and_its_libraries_are_those_of_npm() -> None:
    own = [p for p in chat.PAGE.folder.iterdir() if p.suffix in (".js", ".css", ".html")]
    lines = sum(len(path.read_text().splitlines()) for path in own)
    assert lines <= 3500, lines
    for name, digest in DIGESTS.items():
        source = gzip.decompress((VENDOR / f"{name}.gz").read_bytes())
        assert hashlib.sha256(source).hexdigest() == digest, name
        licence = (VENDOR / f"{name.split('.')[0]}.LICENSE").read_text()
        assert re.search(r"(?i)copyright|license", licence), name
    assert {"index.html", "app.js", "vendor/temml.css", "vendor/purify.min.js"} <= chat.PAGE.names
    assert chat.PAGE.asset("../__init__.py") is None


@pytest.mark.server
def test_files_are_served_without_a_key_and_under_a_strict_policy(live: Live) -> None:
    page = live.client.get("/")
    assert page.status_code == 200
    assert "<title>Verbatim</title>" in page.text
    assert not re.search(r"<script(?![^>]*src=)|<style|style=|\son\w+=", page.text)
    assert "unsafe" not in POLICY
    assert "http" not in POLICY
    for name in sorted(chat.PAGE.names):
        answer = live.client.get(f"/chat-page/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert live.client.get("/chat-page/nothing.js").status_code == 404
    assert live.client.get("/chat-page/../__init__.py").status_code == 404
    assert live.client.get("/lens").status_code == 200
