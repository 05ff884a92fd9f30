"""A thought between two tags: split it from the answer.

In: the output text in pieces. Out: pieces of the thought and of the answer, without the tags.

Invariant: the result does not depend on how the output is cut into pieces, so a streamed output
concatenates to the whole one. Text that may still become a tag is held back.

>>> splitter = TagSplitter("<think>", "</think>")
>>> splitter.push("<thi"), splitter.push("nk>So 4.\\n</th"), splitter.push("ink>\\n\\nFour.")
([], [('thought', 'So 4.')], [('answer', 'Four.')])
"""

from __future__ import annotations

from typing import Literal

Kind = Literal["thought", "answer"]
Piece = tuple[Kind, str]


class TagSplitter:
    """A thought between two tags at the start of the output.

    Whitespace around the tags belongs to the format and is dropped. A tag later in the output is
    text. An output that ends inside the thought has no answer."""

    def __init__(self, open_tag: str, close: str, start: str = "") -> None:
        self._open, self._close = open_tag, close
        self._state = {"": "start", "open": "thought", "closed": "answer"}[start]
        self._held = ""
        self._trim = start == "open"  # drop whitespace before the next text

    @property
    def thinking(self) -> bool:
        return self._state == "thought"

    def push(self, text: str) -> list[Piece]:
        self._held += text
        out: list[Piece] = []
        if self._state == "start":
            self._begin()
        if self._state == "thought":
            self._think(out)
        if self._state == "answer":
            self._emit("answer", self._held, out)
            self._held = ""
        return out

    def finish(self) -> list[Piece]:
        out: list[Piece] = []
        rest, self._held = self._held, ""
        self._emit("thought" if self._state == "thought" else "answer", rest, out)
        return out

    def _begin(self) -> None:
        """Decide whether the output starts with a thought, once enough of it is there."""
        start = self._held.lstrip()
        if start.startswith(self._open):
            self._state, self._trim = "thought", True
            self._held = start[len(self._open) :]
        elif not self._open.startswith(start):
            self._state = "answer"

    def _think(self, out: list[Piece]) -> None:
        at = self._held.find(self._close)
        if at >= 0:
            self._emit("thought", self._held[:at].rstrip(), out)
            self._held = self._held[at + len(self._close) :]
            self._state, self._trim = "answer", True
            return
        safe = len(self._held) - partial_tag_length(self._held, self._close)
        safe = len(self._held[:safe].rstrip())  # whitespace before the closing tag is dropped
        self._emit("thought", self._held[:safe], out)
        self._held = self._held[safe:]

    def _emit(self, kind: Kind, text: str, out: list[Piece]) -> None:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        if text:
            out.append((kind, text))


def partial_tag_length(text: str, tag: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `tag`."""
    return next(
        (n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0
    )
