"""PageFiles: the files of a web page of the server (verbatim.chat, verbatim.lens).

In: the name of a file of page/. Out: its bytes and its media type. Invariant: only files found in
page/ are served; a name never becomes a path. A large vendored file is stored compressed (NAME.gz),
and served as NAME.
"""

from __future__ import annotations

import gzip
from functools import cached_property
from pathlib import Path

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".LICENSE": "text/plain; charset=utf-8",
}
# A page runs its own files only and talks to its own server only.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


class PageFiles:
    """The files below `folder`, which the server shows below `below`; index.html at `at`."""

    def __init__(self, folder: Path, at: str, below: str) -> None:
        self.folder, self.at, self.below = folder, at, below
        self._read: dict[str, tuple[bytes, str]] = {}

    @cached_property
    def names(self) -> frozenset[str]:
        """The files of the page, relative to its folder."""
        paths = (path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*.*"))
        return frozenset(n for path in paths if Path(n := path.removesuffix(".gz")).suffix in TYPES)

    def asset(self, name: str) -> tuple[bytes, str] | None:
        """(bytes, media type) of one file; None: there is no such file."""
        if name not in self._read and name in self.names:
            path = self.folder / name
            packed = path.with_name(path.name + ".gz")
            data = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
            self._read[name] = (data, TYPES[path.suffix])
        return self._read.get(name)

    def has(self, path: str) -> bool:
        """Whether a path of the server is the page or one of its files."""
        below = path.startswith(self.below) and path.removeprefix(self.below) in self.names
        return path == self.at or below
