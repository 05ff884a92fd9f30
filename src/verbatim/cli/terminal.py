"""What a person sees: answers on stdout, everything else on stderr.

Piped, stdout holds the plain text of the answer and nothing more. Colour and the progress line appear on a terminal only
(and never with NO_COLOR set). No rich here: the first token should not wait for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

DIM, RED, YELLOW, GREEN, BOLD = "2", "31", "33", "32", "1"


def _colour(stream: Any) -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    try:
        return bool(stream.isatty())
    except ValueError:  # a closed stream
        return False


def paint(text: str, code: str, stream: Any = None) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if text and _colour(stream or sys.stderr) else text


def write(text: str) -> None:
    """A piece of the answer, shown at once. A lone surrogate cannot occur: text comes whole characters at a time."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: Any) -> None:
    """One value on one line, for a machine. What stdout cannot say is escaped, never lost."""
    line = json.dumps(value, ensure_ascii=False)
    if not _can_say(sys.stdout, line):
        line = json.dumps(value)
    sys.stdout.write(line + "\n")


def note(text: str, code: str = DIM) -> None:
    """A line for the person, not for the pipe. Where nobody can read it, the answer still counts."""
    with contextlib.suppress(OSError):
        sys.stderr.write(paint(_spelled(text), code) + "\n")
        sys.stderr.flush()


def _spelled(text: str) -> str:
    """Our own marks in plain ASCII where the terminal knows no others; the rest is escaped by Python itself."""
    return text if _can_say(sys.stderr, text) else text.replace(" · ", ", ").replace("…", "...")


def _can_say(stream: Any, text: str) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def warn(text: str) -> None:
    note(f"warning: {text}", YELLOW)


class Progress:
    """One line on stderr that rewrites itself on a terminal. Elsewhere it says only what takes long: a download.

    Used as the `progress` callback of LLM and of the catalog: each call says what is being done, and may count bytes."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.live = _colour(sys.stderr)
        self._width = 0
        self._last = ""

    def __call__(self, line: str, done: int = 0, total: int = 0) -> None:
        if self.quiet:
            return
        line = " ".join(line.split())
        if total:
            line = f"fetching {line}: {self._bar(done / total)} {done / 1e6:.0f} of {total / 1e6:.0f} MB"
        if self.live:
            columns = _columns()
            shown = line if len(line) < columns else line[: columns - 2] + "…"
            sys.stderr.write("\r\x1b[2K" + paint(shown, DIM))
            sys.stderr.flush()
            self._width = len(shown)
        elif _phase(line) != self._last:  # a log gets one line a phase, not one a percent
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        self._last = _phase(line)

    def _bar(self, share: float) -> str:
        full = round(20 * min(share, 1.0))
        return "[" + "#" * full + "-" * (20 - full) + "]" if self.live else "…"

    def clear(self) -> None:
        if self._width:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
            self._width = 0


def _phase(line: str) -> str:
    """The first word: "fetching", "loading", "writing"."""
    return line.split(" ", 1)[0]


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size().columns
