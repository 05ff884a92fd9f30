"""The Lens: the web page that `verbatim serve` shows at `/`. See README.md for its data flow.

In: the name of a file of page/. Out: its bytes and its media type. Invariant: only files
found in page/ are served; a name never becomes a path. A large vendored file is stored
compressed (NAME.gz), and served as NAME.
"""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}
# The page runs its own files only and talks to its own server only.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@cache
def names() -> frozenset[str]:
    """The files of the page, relative to page/."""
    found = (path.relative_to(PAGE).as_posix().removesuffix(".gz") for path in PAGE.rglob("*.*"))
    return frozenset(name for name in found if Path(name).suffix in TYPES)


@cache
def asset(name: str) -> tuple[bytes, str] | None:
    """(bytes, media type) of one file; None: there is no such file."""
    if name not in names():
        return None
    path, kind = PAGE / name, TYPES[Path(name).suffix]
    if path.exists():
        return path.read_bytes(), kind
    return gzip.decompress(path.with_name(path.name + ".gz").read_bytes()), kind
