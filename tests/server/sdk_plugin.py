"""A pytest plugin for the run of OpenAI's SDK tests: leaves out what sdk_exclusions.txt lists, and says what it left out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def exclusions() -> list[tuple[list[str], str]]:
    rows = [
        line
        for line in (Path(__file__).parent / "sdk_exclusions.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    return [(row.split(" | ")[0].split(" & "), row.split(" | ")[1]) for row in rows]


def excludes(needles: list[str], test: str) -> bool:
    return all(n in test for n in needles) and "path_params" not in test  # those never leave the client


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    rules = [needles for needles, _ in exclusions()]
    out = [item for item in items if any(excludes(needles, item.nodeid) for needles in rules)]
    kept = [item for item in items if item not in set(out)]
    wanted = out if os.environ.get("SDK_ONLY_EXCLUDED") else kept
    Path(os.environ["SDK_REPORT"]).write_text(json.dumps({"run": [i.nodeid for i in kept], "out": [i.nodeid for i in out]}))
    items[:] = wanted
