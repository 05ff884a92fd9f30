"""The harmony format of gpt-oss: an output is a list of messages, each in a channel.

    <|channel|>analysis<|message|>The user greets.<|end|><|start|>assistant<|channel|>final
    <|message|>Hello!

In: the output text with its control tokens. Out: pieces of the thought (channel analysis) and of
the answer (channel final, and commentary to the user). A message to a tool (`to=functions.NAME`)
becomes `<tool_call>{"name": ..., "arguments": ...}</tool_call>` in the answer, the form that the
tool-call parser reads.
"""

from __future__ import annotations

import json
import re

from verbatim.text.tag_splitter import Piece, partial_tag_length

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
# Control tokens that end the text of a message.
DROPPED = (MESSAGE, "<|constrain|>")  # belong into a header; inside a text, a fault of the model
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", CHANNEL, *DROPPED)
_MARKER = re.compile(r"<\|[a-z]+\|>")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


class HarmonySplitter:
    def __init__(self) -> None:
        self._held = ""
        self._body = False  # inside the text of a message, not in its header
        self._channel = ""
        self._tool: str | None = None
        self._seen = False  # a message has begun
        self._call = ""  # the arguments of a tool call so far

    @property
    def thinking(self) -> bool:
        return not self._body or self._channel == "analysis"

    def push(self, text: str) -> list[Piece]:
        self._held += text
        out: list[Piece] = []
        while self._take_body(out) if self._body else self._take_header():
            pass
        return out

    def finish(self) -> list[Piece]:
        out: list[Piece] = []
        rest, self._held = self._held, ""
        if self._body:
            self._emit(rest, out)
            self._end_message(out)
        elif not (self._seen or _MARKER.search(rest)) and rest.strip():
            out.append(("answer", rest))  # the model did not use the format
        return out

    def _take_header(self) -> bool:
        """Read up to the start of a message's text. False: more text is needed."""
        at = self._held.find(MESSAGE)
        if at < 0:
            return False
        header = self._held[:at]  # the recipient stands before or after the channel
        self._held = self._held[at + len(MESSAGE) :]
        name = re.match(r"\w*", header.rpartition(CHANNEL)[2])
        self._channel = name.group() if name else ""
        found = _RECIPIENT.search(header)
        self._tool = found.group(1) if found else None
        self._body, self._seen, self._call = True, True, ""
        return True

    def _take_body(self, out: list[Piece]) -> bool:
        ends = [(at, end) for end in ENDS if (at := self._held.find(end)) >= 0]
        if not ends:
            keep = max(partial_tag_length(self._held, end) for end in ENDS)
            safe = len(self._held) - keep
            self._emit(self._held[:safe], out)
            self._held = self._held[safe:]
            return False
        at, end = min(ends)
        self._emit(self._held[:at], out)
        self._held = self._held[at + len(end) :]
        if end not in DROPPED:
            self._end_message(out)
        return True

    def _emit(self, text: str, out: list[Piece]) -> None:
        if self._tool is not None:
            self._call += text
        elif text:
            out.append(("thought" if self._channel == "analysis" else "answer", text))

    def _end_message(self, out: list[Piece]) -> None:
        if self._tool is not None:
            name = json.dumps(self._tool)
            arguments = self._call.strip() or "{}"
            out.append(
                ("answer", f'<tool_call>{{"name": {name}, "arguments": {arguments}}}</tool_call>')
            )
        self._body, self._tool = False, None
