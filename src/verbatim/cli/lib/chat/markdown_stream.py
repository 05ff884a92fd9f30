"""MarkdownStream: pieces of an answer come in; rendered Markdown goes to the terminal.

A block (paragraph, list, code block) that is complete is rendered once and stays. The block that
still grows is redrawn in place below it, at most as high as the screen. Every character of the
answer is shown: HTML tags stay text, line breaks stay line breaks, and links show their address.
"""

from __future__ import annotations

import re
import time
from typing import Any

from markdown_it import MarkdownIt
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, Segments

INTERVAL = 1 / 15  # seconds between redraws; a redraw takes about a millisecond per block
FENCE = re.compile(r"^ {0,3}(```|~~~)")


class AnswerMarkdown(Markdown):
    """rich's Markdown, which drops HTML and joins lines; a chat answer keeps both."""

    def __init__(self, text: str) -> None:
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        parser = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
        self.markup = text
        self.parsed = parser.parse(text)
        _keep_line_breaks(self.parsed)


def _keep_line_breaks(tokens: list[Any]) -> None:
    for token in tokens:
        if token.type == "softbreak":
            token.type = "hardbreak"
        _keep_line_breaks(token.children or [])


def split_blocks(text: str) -> tuple[list[str], str]:
    """(complete blocks, the rest). A block ends at a blank line outside a code fence, once the next
    line begins: an indented line would still belong to it.

    >>> split_blocks("one\\n\\ntwo")
    (['one'], 'two')
    >>> split_blocks("```\\na\\n\\nb")
    ([], '```\\na\\n\\nb')
    """
    blocks: list[str] = []
    lines: list[str] = []
    fence = ""
    blank = False
    for line in text.split("\n"):
        if blank and not fence and line[:1].strip():
            blocks.append("\n".join(lines).strip("\n"))
            lines = []
        if found := FENCE.match(line):
            fence = "" if fence == found[1] else fence or found[1]
        blank = not line.strip() and bool(lines)
        lines.append(line)
    return blocks, "\n".join(lines)


class MarkdownStream:
    """Shows one answer. push() each piece; close() at the end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pending = ""
        self._printed = False
        self._live: Live | None = None
        self._drawn_at = 0.0

    def push(self, text: str) -> None:
        blocks, self._pending = split_blocks(self._pending + text)
        if blocks:
            self._erase()
            for block in blocks:
                self._print(block)
        now = time.monotonic()
        if self._pending.strip() and (blocks or now - self._drawn_at >= INTERVAL):
            self._draw()
            self._drawn_at = now

    def close(self) -> None:
        self._erase()
        if self._pending.strip():
            self._print(self._pending.strip("\n"))
        self._pending = ""

    def _print(self, block: str) -> None:
        if self._printed:
            self._console.print()
        self._console.print(AnswerMarkdown(block))
        self._printed = True

    def _draw(self) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        lines = self._console.render_lines(AnswerMarkdown(self._pending), pad=False)
        shown: list[Segment] = [Segment.line()] if self._printed else []
        for line in lines[-max(self._console.height - 3, 1) :]:
            shown += [*line, Segment.line()]
        self._live.update(Segments(shown[:-1]), refresh=True)

    def _erase(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
