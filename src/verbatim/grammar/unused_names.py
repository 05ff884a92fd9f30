"""Look-ahead in objects whose names may run out: can the grammar still write an unused name?

In: an open document and the tokens that its mask allows. Out: the tokens after which its object
needs a name and every name that the grammar admits is there already. Example: under
`{"^[ab]$": ...}` no comma may follow `{"a":1,"b":2`, and no `b` may follow `{"b":1,"`.

A matcher of single bytes follows the document. The search goes along what the names share that
are there already; the first byte that leads to another name ends it, so most searches read one or
two masks. Invariant: a token is reported only if no document goes on with it.
"""

from __future__ import annotations

import json
import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import count
from typing import Any

from verbatim.grammar.llguidance_tokenizer import byte_tokenizer, string_matcher

MAX_CURSORS = 16  # documents that matchers follow at a time; one more costs 2 ms per KB of text
MAX_VISITS = 2000  # beginnings of names, to count the names of a pattern; some 50 ms
ESCAPES_TRIED = 256  # most tokens of a mask that are tried one by one inside an escaped name
_ESCAPED = re.compile(rb'[\x00-\x1f"\\\x7f]')  # bytes of a name that are written as an escape


class UnusedNames:
    def __init__(self, grammar: str, tokens: Sequence[bytes]) -> None:
        self._grammar, self._tokens = grammar, tokens
        self._origin: Any = None
        self._cursors: list[tuple[bytes, Any]] = []  # text, and the matcher that has read it
        self._lock = threading.Lock()  # sequences are checked in several threads
        self._parts: dict[bytes, list[int]] = {}  # tokens inside a name
        self._escapes: list[int] = []  # tokens with an escape
        self._opening: dict[bytes, list[int]] = {}  # tokens that start a name, by its part
        self._commas: list[int] = []  # tokens that end where a name may start, or inside it
        self._closing: list[int] = []  # the same where a string ends first
        for token, text in enumerate(tokens):
            before, comma, after = text.rpartition(b",")
            if comma and after.strip(b" \t\n\r").rfind(b'"') <= 0:
                self._commas.append(token)
                if b'"' in before:
                    self._closing.append(token)
            opened = text.lstrip(b" \t\n\r")
            if opened.rfind(b'"') == 0:
                self._opening.setdefault(opened[1:], []).append(token)
            elif b"\\" in text:
                self._escapes.append(token)
            elif b'"' not in text:
                self._parts.setdefault(text, []).append(token)

    def dead_ends(self, allowed: int, state: Any, feed: Callable[[Any, bytes, bool], Any]) -> int:
        """The allowed tokens that no unused name can follow. `feed`: DocumentCheck's scanner."""
        removed = 0
        fine: set[tuple[int, bytes]] = set()  # depth and written part of names that can go on
        for token in self._suspects(allowed, state):
            if not allowed >> token & 1:
                continue
            try:
                after = feed(state, self._tokens[token], True)
            except (ValueError, IndexError):  # it completes the document, or repeats an item
                continue
            if not after.stack or not after.stack[-1].wants_key:
                continue
            written = after.text[after.scalar + 1 :] if after.string else None
            place = (len(after.stack), written or b"")
            if place in fine:
                continue
            if self._can_go_on(state.text, self._tokens[token], written, after.stack[-1].seen):
                fine.add(place)
            else:
                removed |= 1 << token
        return removed

    def _suspects(self, allowed: int, state: Any) -> Iterator[int]:
        """Tokens that lead towards a name which the object has, or to the start of a name."""
        top = state.stack[-1] if state.stack else None
        if top is None or not top.wants_key:
            yield from self._closing if state.string else self._commas
            return
        written = state.text[state.scalar + 1 :] if state.string else b""
        if b"\\" in written and allowed.bit_count() <= ESCAPES_TRIED:
            yield from (i for i in range(allowed.bit_length()) if allowed >> i & 1)
        tokens = self._parts if state.string else self._opening
        for name in map(_utf8, top.seen):
            rest = name[len(written) :] if name.startswith(written) else b""
            if _ESCAPED.search(rest):
                yield from self._escapes
            for end in range(1, len(rest) + 1):
                yield from tokens.get(rest[:end], ())

    def _can_go_on(
        self, text: bytes, token: bytes, written: bytes | None, used: frozenset[str]
    ) -> bool:
        """Whether a name that is not in `used` may follow; `written`: its part so far, None: its
        quotation mark may follow. True where the matcher's limits do not allow an answer."""
        names = sorted(map(_utf8, used))
        if not used or (written and not _is_prefix(written, names)):
            return True
        start = token if written is not None else token + b'"'
        with self._lock:
            for _ in range(2):  # copies share a lexer, which other documents may have used up
                matcher = self._follow(text)
                if matcher.consume_tokens(list(start)):
                    found = _names(matcher, written or b"", lambda more: _is_prefix(more, names))
                    with closing(found):
                        unused = any(
                            not name.endswith(b'"') or json.loads(b'"' + name) not in used
                            for name in found
                        )
                    if matcher.rollback(len(start)) and not matcher.is_error():
                        return unused
                self._origin, self._cursors = None, []
        return True

    def _follow(self, text: bytes) -> Any:
        """A matcher that has read the text."""
        known = [cursor for cursor in self._cursors if text.startswith(cursor[0])]
        if known:
            cursor = max(known, key=lambda cursor: len(cursor[0]))
            self._cursors.remove(cursor)
            done, matcher = len(cursor[0]), cursor[1]
        else:
            self._origin = self._origin or _byte_matcher(self._grammar)
            done, matcher = 0, self._origin.deep_copy()
        matcher.consume_tokens(list(text[done:]))
        self._cursors = [*self._cursors[1 - MAX_CURSORS :], (text, matcher)]
        return matcher


def fewer_names(patterns: Iterable[str], names: Iterable[str], least: int) -> int | None:
    """The number of names in `names` or under a pattern if it is less than `least`; otherwise, or
    where a search of MAX_VISITS beginnings does not show it, None."""
    found, visits = set(names), count()
    for pattern in patterns:
        matcher = string_matcher("pattern", pattern).deep_copy()
        matcher.consume_tokens([0x22])
        for name in _names(matcher, b"", lambda _: next(visits) < MAX_VISITS):
            if not name.endswith(b'"') or len(found) >= least:
                return None
            found.add(json.loads(b'"' + name))
    return len(found) if len(found) < least else None


def _byte_matcher(grammar: str) -> Any:
    from llguidance import LLMatcher

    return LLMatcher(byte_tokenizer(), grammar, log_level=0)


def _names(matcher: Any, start: bytes, follow: Callable[[bytes], bool]) -> Generator[bytes]:
    """The names that a matcher inside a name, whose part `start` it has read, can complete, with
    their quotation marks. A beginning of a name that `follow` rejects stands for all names with it;
    it exists, because a mask never leads nowhere. The matcher is as before at the end."""
    at, open_names = len(start), [start]
    try:
        while open_names:
            written = open_names.pop()
            if len(written) > len(start):
                matcher.rollback(at - len(written) + 1)
                matcher.consume_token(written[-1])
            at = len(written)
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            for byte in (i for i in range(256) if mask >> i & 1):
                more = written + bytes([byte])
                if byte == 0x22 or not follow(more):
                    yield more
                else:
                    open_names.append(more)  # the highest is next: models count upwards
    finally:
        matcher.rollback(at - len(start))


def _is_prefix(written: bytes, names: list[bytes]) -> bool:
    """Whether one of the sorted names starts so, or may: an escape is not complete."""
    if b"\\" in written:
        try:
            written = _utf8(json.loads(b'"' + written + b'"'))
        except ValueError:
            return True
    at = bisect_left(names, written)
    return at < len(names) and names[at].startswith(written)


def _utf8(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")
