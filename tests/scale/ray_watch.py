"""What the tests and the benchmark on a real Ray share: Ray's processes, and answers of a batch
without what differs between any two runs."""

from __future__ import annotations

import contextlib
import json
import os
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


def descendants(pid: int) -> set[int]:
    """Processes that `pid` has started, and those that they have started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # After the name in parentheses: the state, then the parent.
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, last = {pid}, 0
    while len(found) > last:
        last = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found - {pid}


def open_ports(pids: set[int]) -> dict[int, int]:
    """Ports beyond loopback on which one of these processes listens: port -> process."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    # The kernel writes ADDRESS:PORT in hexadecimal, the state (0A: listening), and the inode.
    listening = {f"socket:[{row[9]}]": row[1].split(":") for row in rows if row[3] == "0A"}
    found = {}
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError, KeyError):
                address, port = listening[os.readlink(path)]
                if not address.endswith(("0100007F", "01000000")):
                    found[int(port, 16)] = pid
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    # Not splitlines(): a text may contain other line separators, such as U+2028.
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def stable_lines(path: Path) -> list[str]:
    """The lines of a batch's answers byte for byte, without what differs between two runs of any
    batch: random ids and times."""
    text = re.sub(r'"(request_id|id)": "[^"]*"', r'"\1": ""', path.read_text())
    text = re.sub(r'"(created|[a-z_]*seconds)": [0-9.e+-]+', r'"\1": 0', text)
    return text.split("\n")
