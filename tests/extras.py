"""The requirements of extras of pyproject.toml, one per line, for pip's -r:

    python tests/extras.py dev      or: core server docs

`core` stands for what the package itself needs. pip is never asked for our own distribution by
name: an index could answer with somebody else's.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))[
    "project"
]
OWN = re.compile(rf"{PROJECT['name']}\[(.*)\]")


def requirements(*extras: str) -> list[str]:
    found: list[str] = []
    for extra in extras:
        wanted = PROJECT["optional-dependencies"] | {"core": PROJECT["dependencies"]}
        for line in wanted[extra]:
            own = OWN.fullmatch(line)
            found += requirements(*own[1].split(",")) if own else [line]
    return found


if __name__ == "__main__":
    print(*requirements(*sys.argv[1:]), sep="\n")
