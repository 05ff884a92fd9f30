"""What the tests and the benchmark on a real Ray share: Ray's processes, and answers of a batch
without what differs between any two runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


def processes(words: str) -> list[int]:
    """Processes of Ray whose title contains `words`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if title.startswith("ray::") and words in title:
            found.append(int(path.parent.name))
    return sorted(found)


def read_lines(path: Path) -> list[dict[str, Any]]:
    # Not splitlines(): a text may contain other line separators, such as U+2028.
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def stable_lines(path: Path) -> list[str]:
    """The lines of a batch's answers byte for byte, without what differs between two runs of any
    batch: random ids and times."""
    text = re.sub(r'"(request_id|id)": "[^"]*"', r'"\1": ""', path.read_text())
    text = re.sub(r'"(created|[a-z_]*seconds)": [0-9.e+-]+', r'"\1": 0', text)
    return text.split("\n")
