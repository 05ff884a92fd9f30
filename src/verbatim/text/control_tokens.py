"""Control tokens in text: where they are, and how typed ones stay text. In: strings. Out: cuts, or strings that cannot be mistaken.

A chat template writes control tokens as text ("<|im_end|>") between texts that came from people. After rendering, nobody can
tell whose "<|im_end|>" it is. So before rendering, the first character of every control token in a message is replaced by
a stand-in: a character that occurs nowhere in the conversation or the template. After rendering, whatever still reads as
a control token is the template's own; then the stand-ins are turned back. Lengths do not change, so template logic that counts or slices still works.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

from tokenizers import AddedToken


class ControlFinder:
    """Finds control tokens in a text: leftmost first, then longest; with the white space that a token's rule swallows."""

    def __init__(
        self, control: Mapping[str, int], added: Mapping[int, AddedToken] | None = None
    ) -> None:
        self.control = control
        self._rules = {
            t: r
            for t, i in control.items()
            if (r := (added or {}).get(i)) and (r.lstrip or r.rstrip or r.single_word)
        }
        self._lengths = sorted({len(t) for t in control}, reverse=True)
        self.firsts = frozenset(t[0] for t in control)
        self._lasts = frozenset(t[-1] for t in control)
        chars = "".join(re.escape(c) for c in sorted(self.firsts))
        self._begin = re.compile(f"[{chars}]" if chars else "(?!)")

    def longest_at(self, text: str, at: int) -> str | None:
        for length in self._lengths:
            piece = text[at : at + length]
            if piece in self.control:
                return piece
        return None

    def split(self, text: str) -> list[tuple[str, int | None]]:
        """(text, None) and (token with swallowed white space, id), in order; joined they are the text."""
        parts: list[tuple[str, int | None]] = []
        done = search = 0
        while found := self._begin.search(text, search):
            start = found.start()
            token = self.longest_at(text, start)
            if token is None:
                search = start + 1
                continue
            search = stop = start + len(token)
            rule = self._rules.get(token)
            if rule is not None:
                if rule.single_word and not _alone(text, start, stop):
                    continue
                if rule.lstrip:
                    start = max(done, len(text[:start].rstrip()))
                if rule.rstrip:
                    stop += len(text[stop:]) - len(text[stop:].lstrip())
            start = max(start, done)
            if start > done:
                parts.append((text[done:start], None))
            parts.append((text[start:stop], self.control[token]))
            done, search = stop, max(search, stop)
        if done < len(text):
            parts.append((text[done:], None))
        return parts

    def first(self, text: str) -> str | None:
        """The first control token that the text spells, if there is one. One scan, which most texts leave without a second look."""
        for found in self._opening.finditer(text):
            token = self.longest_at(text, found.start())
            rule = self._rules.get(token) if token is not None else None
            crowded = (
                rule is not None
                and rule.single_word
                and not _alone(text, found.start(), found.start() + len(token or ""))
            )
            if token is not None and not crowded:
                return token
        return None

    @cached_property
    def _opening(self) -> re.Pattern[str]:
        """Where a control token may begin, by its first two characters: "<" is all over a page of HTML, "<|" is not."""
        seconds: dict[str, set[str]] = {}
        for token in self.control:
            seconds.setdefault(token[0], set()).add(token[1:2])
        classes = {
            one: "".join(re.escape(c) for c in sorted(two))
            for one, two in seconds.items()
            if "" not in two
        }
        pattern = "|".join(
            re.escape(one) + (f"(?=[{classes[one]}])" if one in classes else "")
            for one in sorted(seconds)
        )
        return re.compile(pattern or "(?!)")

    def begins(self, text: str) -> list[int]:
        """Every index where `text` could be read as (part of) a control token: a whole one begins there, or one that goes on
        in whatever follows the text, or (index 0) one that began before it."""
        found = [m.start() for m in self._begin.finditer(text)]
        tail = len(text) - self._lengths[0] if self._lengths else 0
        at = [
            i
            for i in found
            if self.longest_at(text, i) is not None or (i > tail and text[i:] in self._heads)
        ]
        if text and at[:1] != [0] and self._ends_one(text):
            at.insert(0, 0)
        return at

    def _ends_one(self, text: str) -> bool:
        head = text[: self._lengths[0]] if self._lengths else ""
        return any(head[: i + 1] in self._tails for i, c in enumerate(head) if c in self._lasts)

    @cached_property
    def _heads(self) -> frozenset[str]:
        return frozenset(t[:i] for t in self.control for i in range(1, len(t)))

    @cached_property
    def _tails(self) -> frozenset[str]:
        return frozenset(t[i:] for t in self.control for i in range(1, len(t)))


class Shield:
    """Stand-ins for one conversation. `cover` goes over every string of it, `uncover` over what the template made of them."""

    def __init__(self, finder: ControlFinder, conversation: Any = ()) -> None:
        self._finder = finder
        self._conversation = conversation
        self._stand_in: dict[str, str] = {}
        self._back: dict[int, str] = {}

    @cached_property
    def _taken(self) -> set[str]:
        """Every character of the conversation; most conversations need no stand-in, and then nobody looks."""
        return set().union(*strings_in(self._conversation))

    def cover(self, text: str) -> str:
        at = self._finder.begins(text)
        if not at:
            return text
        chars = list(text)
        for i in at:
            chars[i] = self._for(chars[i])
        return "".join(chars)

    def _for(self, char: str) -> str:
        found = self._stand_in.get(char)
        if found is None:
            # Noncharacters first: U+FDD0 to U+FDEF are reserved for use inside a program and never exchanged.
            pool = (chr(c) for c in chain(range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE)))
            # Its escaped spelling must not occur either: templates that write JSON or lists may escape it.
            found = next(c for c in pool if c not in self._taken and not self._spelled(_escaped(c)))
            self._taken.add(found)
            self._stand_in[char] = found
            self._back[ord(found)] = char
        return found

    def fresh(self) -> str:
        """A character that occurs nowhere, as a mark that can be found again."""
        return self._for("")

    def _spelled(self, text: str) -> bool:
        return any(text in string for string in strings_in(self._conversation))

    def uncover(self, text: str) -> str:
        for stand_in, char in self._back.items():
            text = text.replace(chr(stand_in), char).replace(_escaped(chr(stand_in)), char)
        return text

    @property
    def used(self) -> bool:
        return bool(self._stand_in)


def _escaped(char: str) -> str:
    return f"\\u{ord(char):04x}"


def strings_in(value: Any, depth: int = 0) -> Iterable[str]:
    """Every string in plain data, keys included."""
    if isinstance(value, str):
        yield value
    elif depth > 100:
        return  # nothing this deep is rendered: chat.py refuses it
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key, depth + 1)
            yield from strings_in(item, depth + 1)
    elif isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        for item in value:
            yield from strings_in(item, depth + 1)


def _alone(text: str, start: int, stop: int) -> bool:
    before, after = text[start - 1 : start], text[stop : stop + 1]
    return not (_word(before) or _word(after))


def _word(char: str) -> bool:
    return bool(char) and (char.isalnum() or char == "_")
