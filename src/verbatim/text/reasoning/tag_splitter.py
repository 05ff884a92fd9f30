"""Reasoning between two tags: split it from the answer.

In: the output text in pieces. Out: pieces of the reasoning and of the answer, without the tags.

Invariant: the result does not depend on how the output is cut into pieces, so a streamed output
concatenates to the whole one. Text that may still become a tag is held back.

>>> splitter = TagSplitter("<think>", "</think>")
>>> splitter.push("<thi"), splitter.push("nk>So 4.\\n</th"), splitter.push("ink>\\n\\nFour.")
([], [('reasoning', 'So 4.')], [('answer', 'Four.')])
"""

from __future__ import annotations

from typing import Literal

Kind = Literal["reasoning", "answer"]
Piece = tuple[Kind, str]
# Tags that models also write in another way: quantised Granite 3.2 (vLLM's parser knows it too).
OTHER_SPELLINGS = {
    "Here is my thought process:": ("Here's my thought process:",),
    "Here is my response:": ("Here's my response:",),
}


class TagSplitter:
    """Reasoning between two tags at the start of the output.

    Whitespace around the tags belongs to the format and is dropped. A tag later in the output is
    text, except opening tags that reasoning starts with. An output that ends inside the reasoning
    has no answer. `wrapper`: tags around the answer behind reasoning; the closing one is dropped at
    the end of the output only. `opener`: the start of the opening tag that is a control token; an
    output that is cut off behind it has no answer either."""

    def __init__(
        self,
        open_tag: str,
        close: str,
        start: str = "",
        wrapper: tuple[str, str] | None = None,
        opener: str = "",
    ) -> None:
        self._open, self._close = spellings(open_tag), spellings(close)
        self._wrapper, self._opener = wrapper, opener
        self._state = {"": "start", "open": "reasoning", "closed": "answer"}[start]
        if start == "closed" and wrapper:
            self._state = "behind"
        self._held = ""
        self._trim = start == "open"  # drop whitespace before the next text
        self._may_repeat = True  # the reasoning may start with the opening tag again

    @property
    def in_reasoning(self) -> bool:
        return self._state == "reasoning" or self._opens

    @property
    def _opens(self) -> bool:
        """Whether the output so far is a part of the opening tag with its control token."""
        start = self._held.lstrip() if self._state == "start" else ""
        return bool(self._opener) and start.startswith(self._opener)

    def push(self, text: str) -> list[Piece]:
        self._held += text
        out: list[Piece] = []
        if self._state == "start":
            self._begin()
        if self._state == "reasoning":
            self._reason(out)
        if self._state == "behind":
            self._unwrap()
        if self._state == "wrapped":
            self._emit_wrapped(out)
        if self._state == "answer":
            self._emit("answer", self._held, out)
            self._held = ""
        return out

    def mark(self, marker: str) -> list[Piece]:
        """The output continues with a token that is part of a tag: as text, so that a tag in
        ordinary tokens counts too."""
        return self.push(marker)

    def finish(self) -> list[Piece]:
        out: list[Piece] = []
        rest, self._held = "" if self._opens else self._held, ""
        if self._state == "wrapped" and self._wrapper and rest.rstrip().endswith(self._wrapper[1]):
            rest = rest.rstrip().removesuffix(self._wrapper[1]).rstrip()
        self._emit("reasoning" if self._state == "reasoning" else "answer", rest, out)
        return out

    def _begin(self) -> None:
        """Decide whether the output starts with reasoning, once enough of it is there."""
        start = self._held.lstrip()
        if start.startswith(self._open):
            self._state, self._trim = "reasoning", True
            self._held = self._behind_open(start)
        elif not self._may_open(start):
            self._state = "answer"

    def _may_open(self, start: str) -> bool:
        return any(tag.startswith(start) for tag in self._open)

    def _behind_open(self, start: str) -> str:
        return next(start[len(tag) :] for tag in self._open if start.startswith(tag))

    def _repeats(self) -> bool:
        """Drop further opening tags. True: the text may become reasoning."""
        start = self._held.lstrip()
        while start.startswith(self._open):
            self._held = self._behind_open(start)
            start = self._held.lstrip()
        if not start or self._may_open(start):
            return bool(start)
        self._may_repeat = False
        return False

    def _reason(self, out: list[Piece]) -> None:
        if self._may_repeat and self._repeats():
            return
        found = [(at, tag) for tag in self._close if (at := self._held.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            self._emit("reasoning", self._held[:at].rstrip(), out)
            self._held = self._held[at + len(tag) :]
            self._state, self._trim = "behind" if self._wrapper else "answer", True
            return
        safe = len(self._held) - max(partial_tag_length(self._held, tag) for tag in self._close)
        safe = len(self._held[:safe].rstrip())  # whitespace before the closing tag is dropped
        self._emit("reasoning", self._held[:safe], out)
        self._held = self._held[safe:]

    def _unwrap(self) -> None:
        """Drop the tag that opens the answer, if there is one."""
        assert self._wrapper is not None
        start, tag = self._held.lstrip(), self._wrapper[0]
        if start.startswith(tag):
            self._state, self._trim, self._held = "wrapped", True, start[len(tag) :]
        elif not tag.startswith(start):
            self._state = "answer"

    def _emit_wrapped(self, out: list[Piece]) -> None:
        """All but what may be the end of the answer: its closing tag, and white space around it."""
        assert self._wrapper is not None
        tag, body = self._wrapper[1], self._held.rstrip()
        if body.endswith(tag):
            body = body.removesuffix(tag)
        else:
            body = body[: len(body) - partial_tag_length(body, tag)]
        safe = len(body.rstrip())
        self._emit("answer", self._held[:safe], out)
        self._held = self._held[safe:]

    def _emit(self, kind: Kind, text: str, out: list[Piece]) -> None:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        if text:
            out.append((kind, text))


def spellings(tag: str) -> tuple[str, ...]:
    """The tag, and its other spellings."""
    return tag, *OTHER_SPELLINGS.get(tag, ())


def partial_tag_length(text: str, tag: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `tag`."""
    return next(
        (n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0
    )
