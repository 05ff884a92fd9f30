"""A pytest plugin for OpenAI's SDK tests: deselects the tests that sdk_exclusions.txt lists, and
reports them.

The tests were written for a mock that accepts any id. A real server needs an existing object: if a
test uses `completion_id` or `response_id`, the plugin first creates such an object and puts its id
into the URL; a response that is asked for without an input gets one. The rest of the test is
unchanged.
"""

from __future__ import annotations

import json
import os
import re
import urllib.request
from pathlib import Path
from typing import Any

PLACEHOLDERS = ("completion_id", "response_id", "resp_677efb5139a88190b512bc3fef8e535d")
CLIENT = re.compile(r"\[(loose|aiohttp)\]$")
ASK: dict[str, Any] = {"model": "m", "store": True, "seed": 1}


def exclusions() -> list[tuple[list[str], str]]:
    rows = [
        line
        for line in (Path(__file__).parent / "sdk_exclusions.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    return [(row.split(" | ")[0].split(" & "), row.split(" | ")[1]) for row in rows]


def excludes(needles: list[str], test: str) -> bool:
    # these tests send no request
    return all(n in test for n in needles) and "path_params" not in test


def one_client_each(items: list[Any]) -> list[Any]:
    """Each test with the strict client, where it has one. The loose and the aiohttp client send the
    same request, and the strict one checks more of the answer."""
    ids = {item.nodeid for item in items}
    return [i for i in items if CLIENT.sub("[strict]", i.nodeid) not in ids - {i.nodeid}]


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    rules = [needles for needles, _ in exclusions()]
    out = [item for item in items if any(excludes(needles, item.nodeid) for needles in rules)]
    kept = [item for item in items if item not in set(out)]
    if not os.environ.get("SDK_ALL_CLIENTS"):
        kept = one_client_each(kept)
    wanted = out if os.environ.get("SDK_ONLY_EXCLUDED") else kept
    Path(os.environ["SDK_REPORT"]).write_text(
        json.dumps({"run": [i.nodeid for i in kept], "out": [i.nodeid for i in out]})
    )
    items[:] = wanted


def stored(kind: str) -> str:
    """The id of a newly stored answer."""
    body = (
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        if kind == "chat"
        else {"input": "hi", "max_output_tokens": 4}
    )
    path = "/chat/completions" if kind == "chat" else "/responses"
    request = urllib.request.Request(
        os.environ["TEST_API_BASE_URL"] + path,
        json.dumps({**ASK, **body}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return str(json.load(answer)["id"])


def pytest_configure() -> None:
    from openai._base_client import BaseClient

    prepare = BaseClient._prepare_url

    def with_real_id(self: Any, url: str) -> Any:
        parts = url.split("/")
        if len(parts) > 2 and any(p in PLACEHOLDERS for p in parts):
            kind = "chat" if "chat" in parts else "response"
            url = "/".join(stored(kind) if p in PLACEHOLDERS else p for p in parts)
        return prepare(self, url)

    build = BaseClient._build_request

    def with_input(self: Any, options: Any, **more: Any) -> Any:
        if options.url in ("/responses", "/responses/input_tokens"):
            options.json_data = {"input": "hi", **(options.json_data or {})}
        return build(self, options, **more)

    BaseClient._prepare_url = with_real_id  # type: ignore[method-assign]
    BaseClient._build_request = with_input  # type: ignore[method-assign]
