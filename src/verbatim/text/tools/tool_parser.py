"""Tool calls in the text of an output: parsed as they arrive, or text where they are none.

In: the output text, delta by delta, the tools of the request and the model's format. Out: text and
calls, each as soon as it is certain. A call that cannot be parsed stays text, so nothing of the
output is lost.

    hermes   <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>, or the XML of Qwen3-Coder
             or GLM between the tags
    mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]NAME[ARGS]{...}
    llama3   {"name": ..., "parameters": {...}}
    further  tags and notations of their own (call_formats.py)
    any      an output that consists of one such object, or a list of them
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from verbatim.base.json_io import dumps_lossless, loads_lossless
from verbatim.text.reasoning.tag_splitter import partial_tag_length
from verbatim.text.tools.call_formats import CALL_FORMATS, Tools

_NEXT_ITEM = re.compile(r"\s*[\[,]\s*")


@dataclass(frozen=True, slots=True)
class ParsedCall:
    name: str
    arguments: str  # JSON text, as in OpenAI's API
    id: str = field(default_factory=lambda: "call_" + secrets.token_hex(12))

    @property
    def text(self) -> str:
        name = json.dumps(self.name, ensure_ascii=False)
        return f'{{"name": {name}, "arguments": {self.arguments}}}'


def read_calls(text: str, names: Container[str]) -> list[ParsedCall]:
    """Parse JSON into calls: an object, or a list of objects, with a known name and an object of
    arguments. [] if it is anything else."""
    try:
        data = loads_lossless(text)
    except ValueError:
        return []
    calls = []
    for item in data if isinstance(data, list) else [data]:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            return []
        if item["name"] not in names:
            return []
        arguments = item.get("arguments", item.get("parameters", {}))
        if isinstance(arguments, str):  # some models write the arguments as a JSON string
            try:
                arguments = loads_lossless(arguments)
            except ValueError:
                return []
        if not isinstance(arguments, dict):
            return []
        calls.append(ParsedCall(item["name"], dumps_lossless(arguments)))
    return calls


def _end_of_items(text: str) -> int:
    """Where the last complete item ends in a list that a token limit cut.

    >>> _end_of_items('[{"a": 1}, {"b')
    9
    """
    end, decoder = 0, json.JSONDecoder()
    try:
        while start := _NEXT_ITEM.match(text, end):
            end = decoder.raw_decode(text, start.end())[1]
    except (ValueError, RecursionError):
        pass
    return end


class ToolParser:
    """Incremental parser. push(text) and finish() return ("text", str) and ("call", ParsedCall) in
    the order of the output. `tools`: name -> JSON schema of the parameters."""

    def __init__(
        self,
        form: str,
        tools: Tools,
        *,
        forced: bool = False,
        single: bool = False,
        midway: bool = False,
    ) -> None:
        self._format = CALL_FORMATS[form]
        self._open, self._close = self._format.open, self._format.close
        self._tools = tools
        self._single, self._forced = single, forced
        self._held = ""
        self._at = 0  # offset of `_held` in the output, in characters
        self._inside = False
        self._called = False  # the last thing parsed was a call
        self._fresh = True  # no text yet, or none since the last call
        self._whole = forced  # hold all text: only the end shows whether it is a call
        self._begun = forced or midway  # midway: the output continues a given message
        self.calls = 0
        # (start, end) offset in the output of each text that was returned
        self.spans: list[tuple[int, int]] = []

    def push(self, text: str) -> list[tuple[str, Any]]:
        self._held += text
        if not self._begun:
            start = self._held.lstrip()
            if not start or (len(start) < len(self._open) and self._open.startswith(start)):
                return []  # too short to tell text from a call
            self._begun = True
            self._whole = start[0] in "{[" and not start.startswith(self._open)
        return [] if self._whole else self._scan()

    def finish(self) -> list[tuple[str, Any]]:
        """Parse what is held at the end of the output: a complete call, or text."""
        if not self._held or (self._fresh and self.calls and not self._held.strip()):
            return []
        body = self._held.lstrip().removeprefix(self._open) if self._inside else self._held
        found = self._limit_calls(self._read(body)) if self._whole or self._inside else []
        size = len(self._held)
        if not found and self._forced:
            size = _end_of_items(self._held)
            found = self._limit_calls(read_calls(self._held[:size] + "]", self._tools))
        if not found:
            return [self._text(len(self._held))]
        self._take(size)
        return [*found, self._text(len(self._held))] if self._held else found

    def _read(self, body: str, *, closed: bool = False) -> list[ParsedCall]:
        """Parse the text of a call without its opening tag. `closed`: its closing tag follows."""
        body = body.strip()
        found = read_calls(body, self._tools)
        read = self._format.read
        if found or not self._inside or read is None or (self._format.needs_close and not closed):
            return found
        made = read(body, self._tools)
        return [ParsedCall(name, dumps_lossless(arguments)) for name, arguments in made]

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        self._at += size
        return taken

    def _text(self, size: int) -> tuple[str, str]:
        self._fresh = False
        self.spans.append((self._at, self._at + size))
        return "text", self._take(size)

    def _scan(self) -> list[tuple[str, Any]]:
        out: list[tuple[str, Any]] = []
        while self._held:
            if self._called:  # line ends between calls belong to the format
                self._take(len(self._held) - len(self._held.lstrip("\n")))
                if not self._held:
                    break
                self._called = False
            if not self._inside:
                at = safe = self._held.find(self._open)
                if at < 0:
                    safe = len(self._held) - partial_tag_length(self._held, self._open)
                # White space before a call belongs to the format, so it waits for what follows.
                if safe and not (self._fresh and not self._held[:safe].strip()):
                    out.append(self._text(safe))
                if at < 0:
                    break
                self._inside = True
            end = self._held.find(self._close) if self._close else -1
            if end < 0:
                break
            body = self._held[:end].lstrip().removeprefix(self._open)
            found = self._limit_calls(self._read(body, closed=True))
            size = end + len(self._close)
            if found:
                self._take(size)
                self._fresh = True
            out += found or [self._text(size)]
            self._inside, self._called = False, bool(found)
        return out

    def _limit_calls(self, calls: list[ParsedCall]) -> list[tuple[str, Any]]:
        """Limit to one call for parallel_tool_calls: false. Further calls stay text."""
        if self._single and self.calls:
            return []
        kept = calls[:1] if self._single else calls
        self.calls += len(kept)
        # Calls rendered back to text contain no output token: empty spans.
        self.spans += [(self._at, self._at)] * (len(calls) - len(kept))
        rest = [("text", call.text) for call in calls[len(kept) :]]
        return [*(("call", call) for call in kept), *rest]
