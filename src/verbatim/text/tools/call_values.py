r"""Tool calls whose arguments are written in the model's own notation: Gemma's and Python's.

In: the text between the tags of a call, and the tools. Out: names with arguments; nothing if any
part of the text does not fit, so that the text stays text.

    gemma   call:NAME{KEY:VALUE,...}, strings between two quote tokens, without escapes
    python  [NAME(KEY=VALUE, ...), ...], strings with escapes

Both have lists, objects, numbers and the literals of JSON and of Python. Linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import Any

from verbatim.base.json_io import JsonObject, keep_pairs, loads_lossless

Call = tuple[str, JsonObject]  # name, arguments

MAX_DEPTH = 64  # nested lists and objects
LITERALS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[^\s{}()\[\],=\"']+")
_KEY = re.compile(r"[^\s{}()\[\],:=<>\"']+")
_STRING = re.compile(r"""(["'])((?:(?!\1)[^\\]|\\.)*)\1""", re.DOTALL)
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U00([0-9a-fA-F]{6})|(.))", re.DOTALL
)
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", '"': '"', "'": "'"}


def read_gemma(text: str, tools: Container[str], quote: str) -> list[Call]:
    """The calls of Gemma 4 or FunctionGemma; `quote` is the token around a string.

    >>> read_gemma('call:add{a:1,b:<|"|>x, "y"<|"|>,c:[true,{d:null}]}', {"add"}, '<|"|>')
    [('add', {'a': 1, 'b': 'x, "y"', 'c': [True, {'d': None}]})]
    """
    reader = _CallReader(text, quote)

    def call() -> Call:
        reader.expect("call:")
        return reader.match(_NAME), reader.object()

    return _known(reader, lambda: reader.items(call, ""), tools)


def read_python(text: str, tools: Container[str]) -> list[Call]:
    r"""The calls of LFM2.

    >>> read_python("[add(a=1, b='it\\'s'), stop()]", {"add", "stop"})
    [('add', {'a': 1, 'b': "it's"}), ('stop', {})]
    """
    reader = _CallReader(text)

    def argument() -> tuple[str, Any]:
        key = reader.match(_KEY)
        reader.expect("=")
        return key, reader.value(0)

    def call() -> Call:
        name = reader.match(_NAME)
        reader.expect("(")
        return name, keep_pairs(reader.items(argument, ")"))

    def calls() -> list[Call]:
        if not reader.skip("["):
            return [call()]
        return reader.items(call, "]")

    return _known(reader, calls, tools)


def _known(
    reader: _CallReader, calls: Callable[[], list[Call]], tools: Container[str]
) -> list[Call]:
    """The calls of the whole text, if all are calls of known tools."""
    try:
        found = calls()
    except ValueError:
        return []
    return found if reader.ended() and all(name in tools for name, _ in found) else []


class _CallReader:
    """Recursive descent. Every method raises ValueError where the text does not fit."""

    def __init__(self, text: str, quote: str = "") -> None:
        self._text, self._quote, self._at = text, quote, 0

    def ended(self) -> bool:
        self.match(_SPACE)
        return self._at == len(self._text)

    def skip(self, sign: str) -> bool:
        """Whether `sign` follows, which is then skipped."""
        self.match(_SPACE)
        follows = self._text.startswith(sign, self._at)
        self._at += follows * len(sign)
        return follows

    def expect(self, sign: str) -> None:
        if not self.skip(sign):
            raise ValueError(f"{sign!r} expected")

    def match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise ValueError("another sign expected")
        self._at = found.end()
        return found[0]

    def items(self, read: Callable[[], object], end: str) -> list[Any]:
        """Items with commas between them, up to `end`. "": up to the end of the text, and without
        commas too."""
        found: list[Any] = []
        while not (self.skip(end) if end else self.ended()):
            if found and not self.skip(",") and end:
                raise ValueError("a comma expected")
            self.match(_SPACE)
            found.append(read())
        return found

    def object(self, depth: int = 0) -> JsonObject:
        def pair() -> tuple[str, object]:
            key = self._string()
            if key is None:
                key = self.match(_KEY)
            self.expect(":")
            return key, self.value(depth + 1)

        self.expect("{")
        return keep_pairs(self.items(pair, "}"))

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        self.match(_SPACE)
        text = self._string()
        if text is not None:
            return text
        if self._text.startswith("{", self._at):
            return self.object(depth)
        if self.skip("["):
            return self.items(lambda: self.value(depth + 1), "]")
        word = self.match(_KEY)
        return LITERALS[word] if word in LITERALS else loads_lossless(word)

    def _string(self) -> str | None:
        if self._quote and self.skip(self._quote):
            end = self._text.index(self._quote, self._at)
            text, self._at = self._text[self._at : end], end + len(self._quote)
            return text
        found = _STRING.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        # A character beyond U+FFFF is two escapes in JSON; one alone is no text.
        text = _ESCAPE.sub(_character, found[2])
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")


def _character(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2] or escape[3]
    if code:
        return chr(int(code, 16))
    return _CONTROL.get(escape[4], escape[0])
