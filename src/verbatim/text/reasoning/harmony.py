"""The harmony format of gpt-oss: an output is a list of messages, each in a channel.

    <|channel|>analysis<|message|>The user greets.<|end|><|start|>assistant<|channel|>final
    <|message|>Hello!

In: the output text, and its markers. Out: pieces of the reasoning (channel analysis) and of the
answer (channel final, and commentary to the user). A message to a tool (`to=functions.NAME`)
becomes `<tool_call>{"name": ..., "arguments": ...}</tool_call>` in the answer, the form that the
tool-call parser reads. An output that does not start as a message does is an answer.

Messages that are not for the user are reasoning: a call of a built-in tool (`to=python`), which no
client can run, and a message of another role that the model writes itself (`<|start|>user`, or a
result `<|start|>functions.NAME to=assistant`).

Invariant: a marker that is a token of the vocabulary is recognised by its id (`mark`). The same
letters in ordinary tokens, as in an answer that explains the format, are text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from verbatim.text.reasoning.tag_splitter import Kind, Piece, partial_tag_length

CHANNEL, MESSAGE, CONSTRAIN = "<|channel|>", "<|message|>", "<|constrain|>"
# Markers that end the text of a message. MESSAGE and CONSTRAIN belong into a header; inside a text
# they are a fault of the model and are dropped.
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", CHANNEL)
MARKERS = (*ENDS, MESSAGE, CONSTRAIN)
# What a header is made of, beside markers and the recipient `to=functions.NAME`.
HEADER_WORDS = ("assistant", "analysis", "commentary", "final", "json", "to=")
_FUNCTION = re.compile(r"to=functions\.([\w.-]+)")


class HarmonySplitter:
    """`special`: markers that are tokens, which come by mark(); the others are found in the
    text."""

    def __init__(self, special: Collection[str] = ()) -> None:
        self._written = tuple(marker for marker in MARKERS if marker not in special)
        self._held = ""  # text that may become a marker
        self._author: str | None = None  # the header before its channel; None without a channel
        self._header = ""  # the header behind it
        self._body = False  # inside the text of a message, not in its header
        self._kind: Kind = "answer"
        self._tool: str | None = None
        self._seen = False  # a marker was there
        self._call = ""  # the arguments of a tool call so far

    @property
    def in_reasoning(self) -> bool:
        """Headers count as reasoning, as the markers do."""
        return self._kind == "reasoning" if self._body else self._seen

    @property
    def answering(self) -> bool:
        """Whether text that follows is a message to the user."""
        return self._body and self._tool is None and self._kind == "answer"

    @property
    def in_header(self) -> bool:
        """Whether text that follows belongs to the header of a message."""
        return self._seen and not self._body

    @property
    def calling(self) -> bool:
        """Whether the message is one to a tool."""
        return self._tool is not None or (self.in_header and self._read_header()[1] is not None)

    def push(self, text: str) -> list[Piece]:
        self._held += text
        out: list[Piece] = []
        while found := [(at, m) for m in self._written if (at := self._held.find(m)) >= 0]:
            at, marker = min(found)
            self._text(self._held[:at], out)
            self._marker(marker, out)
            self._held = self._held[at + len(marker) :]
        keep = max((partial_tag_length(self._held, m) for m in self._written), default=0)
        self._release(keep, out)
        return out

    def mark(self, marker: str) -> list[Piece]:
        """The output continues with a token that is this marker."""
        out: list[Piece] = []
        self._release(0, out)
        self._marker(marker, out)
        return out

    def finish(self) -> list[Piece]:
        out: list[Piece] = []
        self._release(0, out)
        if self._body and self._tool is not None and not _is_json(self._call):
            out.append(("answer", self._call))  # cut off, so no call
        elif self._body:
            self._end_message(out)
        elif not self._seen and self._header.strip():
            out.append(("answer", self._header))  # the model did not use the format
        return out

    def _release(self, keep: int, out: list[Piece]) -> None:
        """Process the held text up to its last `keep` characters."""
        safe = len(self._held) - keep
        self._text(self._held[:safe], out)
        self._held = self._held[safe:]

    def _text(self, text: str, out: list[Piece]) -> None:
        if not self._body:
            self._header += text
            if self._seen or _may_be_header(self._header):
                return
            text, self._header, self._body = self._header, "", True  # no message, so an answer
        if self._tool is not None:
            self._call += text
        elif text:
            out.append((self._kind, text))

    def _marker(self, marker: str, out: list[Piece]) -> None:
        self._seen = True
        if self._body and marker in ENDS:
            self._end_message(out)
        if self._body:
            return
        if marker == MESSAGE:
            self._kind, self._tool = self._read_header()
            self._body, self._call = True, ""
        elif marker == CHANNEL:
            self._author, self._header = f"{self._author or ''} {self._header}", ""
        elif marker == CONSTRAIN:
            self._header += " "
        else:  # the end of a message, or of a header that no message follows
            self._author, self._header = None, ""

    def _read_header(self) -> tuple[Kind, str | None]:
        """What the text behind the header is, and the tool that it is for."""
        role = (self._header if self._author is None else self._author).split()[:1]
        if role and not role[0].startswith(HEADER_WORDS):
            return "reasoning", None
        header = f"{self._author or ''} {self._header}"  # a recipient is on either side
        if function := _FUNCTION.search(header):
            return "answer", function.group(1)
        channel = re.split(r"\W", self._header)[0]
        built_in = "to=" in header and channel != "final"
        return "reasoning" if channel == "analysis" or built_in else "answer", None

    def _end_message(self, out: list[Piece]) -> None:
        if self._tool is not None:
            name = json.dumps(self._tool)
            arguments = self._call.strip() or "{}"
            out.append(
                ("answer", f'<tool_call>{{"name": {name}, "arguments": {arguments}}}</tool_call>')
            )
        self._body, self._tool, self._author, self._header = False, None, None, ""


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return False
    return True


def _may_be_header(text: str) -> bool:
    """Whether a header can start with this text.

    >>> [_may_be_header(text) for text in (" to=functions.f", "fin", "final ", "fine", "final on")]
    [True, True, True, False, False]
    """
    words = text.split()
    last = words.pop() if words and not text[-1].isspace() else ""
    return all(word.startswith("to=") or word in HEADER_WORDS for word in words) and (
        last.startswith("to=") or any(word.startswith(last) for word in HEADER_WORDS)
    )
