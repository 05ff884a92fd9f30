"""Where the reasoning of an output starts and ends, followed token by token.

In: the drawn tokens of one sequence. Out: whether the sequence is before its reasoning, inside it
or in the answer, and which tokens a grammar must forbid there. A grammar starts with the first
token of the answer, so no token may hold the end of reasoning and the start of an answer: such
tokens are forbidden, except where only white space follows the marker, which the splitter drops.

Invariant: a tracker changes to the answer at the token at which the splitter
(text/reasoning/tag_splitter.py, text/reasoning/harmony.py) does, wherever the borders of the tokens
are.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection
from copy import copy
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

from verbatim.engine.loaded_model import EngineTokenizer
from verbatim.text.reasoning.harmony import HarmonySplitter
from verbatim.text.reasoning.reasoning_format import ReasoningFormat
from verbatim.text.reasoning.tag_splitter import spellings

State = Literal["start", "reasoning", "answer"]
Ids = Collection[int]
_UTF8 = codecs.getincrementaldecoder("utf-8")


class ReasoningTracker(Protocol):
    """The state of one sequence. `opened`: reasoning has begun. `calling`: a call of a tool is
    being written, which is no reasoning, and which no budget ends."""

    state: State
    opened: bool

    @property
    def calling(self) -> bool: ...

    def push(self, token: int) -> None: ...

    def copy(self) -> ReasoningTracker: ...

    def opening(self) -> tuple[Ids, Ids]:
        """Before reasoning: the tokens that continue its opening marker, and the tokens that hold a
        all of the reasoning and the start of the answer."""
        ...

    def crossing(self) -> Ids:
        """Inside reasoning: the tokens that a grammar forbids, because they hold the end of the
        thought and the start of the answer, or because they start an answer without a grammar."""
        ...


class TagMarkers:
    """The tags of a format in the bytes of a vocabulary, shared by the sequences of a model.

    `open`, `close`: the spellings of both tags. `crossing`: the tokens that cross the end of a
    closing tag, by the bytes of it that precede the token."""

    def __init__(
        self, reasoning: ReasoningFormat, tokenizer: EngineTokenizer, skip_special: bool = True
    ) -> None:
        self.open, self.close = _spelled(reasoning.open), _spelled(reasoning.close)
        self._open_id = reasoning.open_id
        self._tokenizer, self._skip, self._visible = tokenizer, skip_special, reasoning.marker_ids
        self._letters = frozenset(b"".join(self.open))
        suffixes = tuple(tag[i:] for tag in self.open for i in range(len(tag)))
        last = {tag[-1] for tag in self.close}
        openers, closers = [], []
        for token in range(tokenizer.vocab_size):
            data = self.shown(token)
            part = _without_space(data)
            if self._overlaps(data, suffixes) or (part != data and self._overlaps(part, suffixes)):
                openers.append((token, data, part))
            if not last.isdisjoint(data[:-1]):
                closers.append((token, data))
        self._openers = openers
        self._opening: dict[bytes, tuple[Ids, Ids]] = {}
        self.crossing = {
            held: frozenset(token for token, data in closers if self._crosses(held, data))
            for held in {tag[:i] for tag in self.close for i in range(len(tag))}
        }

    def _overlaps(self, data: bytes, suffixes: tuple[bytes, ...]) -> bool:
        """Whether the bytes are a part of an opening tag, or start with one of its suffixes."""
        if not data or data[0] not in self._letters:  # most tokens
            return False
        return data.startswith(suffixes) or any(data in tag for tag in self.open)

    def shown(self, token: int) -> bytes:
        """The bytes of a token in the text of the output, as TextDecoder shows it."""
        if self._skip and self._tokenizer.is_control(token) and token not in self._visible:
            return b""
        return self._tokenizer.token_bytes(token)

    def scan(self, held: bytes, data: bytes) -> tuple[bool, bytes]:
        """Follow a closing tag, of which `held` precedes `data`: (it is complete, its bytes at the
        end of the text)."""
        text = held + data
        if any(tag in text for tag in self.close):
            return True, b""
        ends = (text[i:] for i in range(len(text)))  # the longest one first
        return False, next((e for e in ends if any(t.startswith(e) for t in self.close)), b"")

    def _crosses(self, held: bytes, data: bytes) -> bool:
        text = held + data
        ends = [at + len(tag) for tag in self.close if (at := text.find(tag)) >= 0]
        return bool(ends and _without_space(text[min(ends) :]))

    def opening(self, head: bytes) -> tuple[Ids, Ids]:
        """ReasoningTracker.opening() behind `head`, the output without its leading white space."""
        if head not in self._opening:
            self._opening[head] = self._compute_opening(head)
        return self._opening[head]

    def _compute_opening(self, head: bytes) -> tuple[Ids, Ids]:
        allowed: list[int] = []
        forbidden: list[int] = []
        for token, data, part in self._openers:
            text = head + (data if head else part)
            if text.startswith(self.open):
                crosses = self._crosses(b"", self.behind_open(text))
                (forbidden if crosses else allowed).append(token)
            elif self.may_open(text) and text != head:
                allowed.append(token)
        if not head and self._open_id is not None:  # a model writes its tag as that token
            allowed = [token for token in allowed if token == self._open_id]
        return tuple(allowed), tuple(forbidden)

    def may_open(self, text: bytes) -> bool:
        return any(tag.startswith(text) for tag in self.open)

    def behind_open(self, text: bytes) -> bytes:
        return next(text[len(tag) :] for tag in self.open if text.startswith(tag))


class TagTracker:
    """Follows reasoning between two tags. `told`: the prompt says that the model may think, so a
    grammar allows the opening tag."""

    calling = False

    def __init__(self, markers: TagMarkers, start: str, told: bool) -> None:
        self._markers, self._told = markers, told
        self.state: State = "start"
        if start:
            self.state = "reasoning" if start == "open" else "answer"
        self.opened = start == "open"
        self._head = b""  # the output before reasoning, without its leading white space
        self._held = b""  # part of a closing tag at the end of the reasoning so far

    def push(self, token: int) -> None:
        data = self._markers.shown(token)
        if self.state == "start":
            self._open(self._head + data)
        elif self.state == "reasoning":
            self._close(data)

    def _open(self, output: bytes) -> None:
        decoder = _UTF8("replace")
        text = decoder.decode(output).lstrip().encode()
        pending = decoder.getstate()[0]  # bytes of an incomplete character
        self._head = text + pending
        if text.startswith(self._markers.open):
            self.state, self.opened = "reasoning", True
            self._close(self._markers.behind_open(self._head))
        elif not self._markers.may_open(text):
            self.state = "answer"

    def _close(self, data: bytes) -> None:
        closed, self._held = self._markers.scan(self._held, data)
        if closed:
            self.state = "answer"

    def opening(self) -> tuple[Ids, Ids]:
        allowed, forbidden = self._markers.opening(self._head)
        return allowed if self._told else (), forbidden

    def crossing(self) -> Ids:
        return self._markers.crossing[self._held]

    def copy(self) -> TagTracker:
        return copy(self)


class HarmonyTracker:
    """Follows the channels of the harmony format, whose markers are tokens: everything is reasoning
    up to the first message to the user, whose channel is not analysis. A grammar binds that message
    and no call of a tool (`to=functions.NAME`), so beside a grammar no header has a `=`.

    `equals`: the tokens with that character."""

    def __init__(
        self, reasoning: ReasoningFormat, tokenizer: EngineTokenizer, equals: frozenset[int]
    ) -> None:
        self._reasoning, self._tokenizer, self._equals = reasoning, tokenizer, equals
        self.state: State = "start"
        self.opened = False
        self._splitter = HarmonySplitter(reasoning.special)

    def push(self, token: int) -> None:
        text = self._tokenizer.token_bytes(token).decode("utf-8", "replace")
        marker = token in self._reasoning.marker_ids
        if self.state == "start" and (marker or not text.isspace()):
            self.opened = token == self._reasoning.open_id
            self.state = "reasoning" if self.opened else "answer"
        if self.state == "reasoning":
            self._splitter.mark(text) if marker else self._splitter.push(text)
            if self._splitter.answering:
                self.state = "answer"

    def opening(self) -> tuple[Ids, Ids]:
        assert self._reasoning.open_id is not None
        return (self._reasoning.open_id,), ()

    @property
    def calling(self) -> bool:
        return self._splitter.calling

    def crossing(self) -> Ids:
        return self._equals if self._splitter.in_header else ()

    def copy(self) -> HarmonyTracker:
        twin = copy(self)
        twin._splitter = copy(self._splitter)
        return twin


def make_tracker(
    reasoning: ReasoningFormat, tokenizer: EngineTokenizer, skip_special: bool = True
) -> ReasoningTracker:
    """A tracker at the first token to draw. The first one of a model walks the vocabulary, so
    Request validation makes one before the engine does."""
    if reasoning.harmony:
        equals = _EQUALS.get(tokenizer)
        if equals is None:
            ids = range(tokenizer.vocab_size)
            equals = frozenset(token for token in ids if b"=" in tokenizer.token_bytes(token))
            _EQUALS[tokenizer] = equals
        return HarmonyTracker(reasoning, tokenizer, equals)
    kept = _MARKERS.setdefault(tokenizer, {})
    key = reasoning.open, reasoning.close, reasoning.open_id, skip_special
    if key not in kept:
        kept[key] = TagMarkers(reasoning, tokenizer, skip_special)
    return TagTracker(kept[key], reasoning.start, reasoning.told)


_MARKERS: WeakKeyDictionary[EngineTokenizer, dict[Any, TagMarkers]] = WeakKeyDictionary()
_EQUALS: WeakKeyDictionary[EngineTokenizer, frozenset[int]] = WeakKeyDictionary()


def _spelled(tag: str) -> tuple[bytes, ...]:
    return tuple(each.encode() for each in spellings(tag))


def _without_space(data: bytes) -> bytes:
    """The bytes without leading white space. Part of a character is no white space."""
    if b" " < data[:1] < b"\x7f":
        return data
    return data.decode("utf-8", "surrogateescape").lstrip().encode("utf-8", "surrogateescape")
