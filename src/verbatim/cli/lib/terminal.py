"""Output of the command line: answers on stdout, everything else on stderr.

In a pipe, stdout carries the plain text of the answer and nothing more. Colour and the progress
line appear on a terminal only, and never with NO_COLOR set. This module does not use `rich`, whose
import would delay the first token.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

DIM, RED, YELLOW, GREEN, BOLD = "2", "31", "33", "32", "1"


def use_colour(stream: object) -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return is_terminal(stream)


def is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except ValueError:  # a closed stream
        return False


def paint(text: str, code: str, stream: object = None) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if text and use_colour(stream or sys.stderr) else text


def write(text: str) -> None:
    """Write a piece of the answer and flush. `text` has whole characters, never a lone
    surrogate."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: object) -> None:
    """Write one JSON value on one line. Characters that stdout cannot encode are escaped."""
    line = json.dumps(value, ensure_ascii=False)
    if not _can_encode(sys.stdout, line):
        line = json.dumps(value)
    sys.stdout.write(line + "\n")


def note(text: str, code: str = DIM) -> None:
    """Write a line to stderr, wrapped between words on a terminal. A closed stderr is ignored: the
    answer still counts."""
    with contextlib.suppress(OSError):
        sys.stderr.write(paint(wrapped(_ascii_fallback(text)), code) + "\n")
        sys.stderr.flush()


def wrapped(text: str) -> str:
    """The text wrapped between words where stderr is a terminal."""
    if not is_terminal(sys.stderr):
        return text
    import textwrap

    keep = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
    width = max(columns() - 1, 20)
    return "\n".join(
        line if len(line) <= width else textwrap.fill(line, width, **keep)  # type: ignore[arg-type]
        for line in text.split("\n")
    )


def _ascii_fallback(text: str) -> str:
    """Replace the separators of our own lines with ASCII if stderr cannot encode them. Python
    escapes the rest."""
    return text if _can_encode(sys.stderr, text) else text.replace(" · ", ", ").replace("…", "...")


def _can_encode(stream: object, text: str) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def warn(text: str) -> None:
    note(f"warning: {text}", YELLOW)


class ReasoningView:
    """Streams the reasoning of a reasoning model to stderr, dimmed, or between <think> tags without
    colours. Shown on a terminal only: logs and pipes carry answers and notices."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._shown = not quiet and is_terminal(sys.stderr)
        self._dim = use_colour(sys.stderr)
        self._open = False
        self._at_line_start = True

    def push(self, text: str) -> None:
        if not self._shown:
            return
        if not self._open and not self._dim:
            self._write("<think>\n")
        self._open = True
        self._at_line_start = text.endswith("\n")
        self._write(paint(text, DIM))

    def close(self) -> None:
        """End the reasoning; the answer starts below it."""
        if self._open:
            line_end = "" if self._at_line_start else "\n"
            self._write(line_end + ("\n" if self._dim else "</think>\n"))
            self._open = False

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a closed stderr: the answer still counts
            sys.stderr.write(text)
            sys.stderr.flush()


class Progress:
    """One line on stderr, rewritten in place on a terminal. In a log or a pipe: one line when a
    download starts, and nothing else, because a line there could not be erased.

    Used as the `progress` callback of LLM and of the catalog: (description, bytes done, bytes
    total)."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.live = use_colour(sys.stderr)
        self._width = 0
        self._last = ""

    def __call__(self, line: str, done: int = 0, total: int = 0) -> None:
        if self.quiet:
            return
        line = " ".join(line.split())
        if total and self.live:
            amount = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"
            line = f"fetching {line}: {self._bar(done / total)} {amount}"
        elif total:
            line = f"fetching {line} ({total / 1e6:.0f} MB)"
        if self.live:
            width = columns()
            shown = line if len(line) < width else line[: width - 2] + "…"
            sys.stderr.write("\r\x1b[2K" + paint(shown, DIM))
            sys.stderr.flush()
            self._width = len(shown)
        elif total and line != self._last:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        self._last = line

    def _bar(self, share: float) -> str:
        full = round(20 * min(share, 1.0))
        return "[" + "#" * full + "-" * (20 - full) + "]"

    def clear(self) -> None:
        if self._width:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
            self._width = 0


def columns() -> int:
    import shutil

    return shutil.get_terminal_size().columns
