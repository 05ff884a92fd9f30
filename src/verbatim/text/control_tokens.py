"""Control tokens in text: find them, and escape typed ones. In: strings. Out: split or escaped
strings.

A chat template writes control tokens as text ("<|im_end|>") between user texts, so the rendered
prompt does not show whether a "<|im_end|>" was typed. Therefore, before rendering, the first
character of every control token in a message is replaced by a placeholder: a character that occurs
nowhere in the conversation or the template. After rendering, every remaining control token is the
template's own, and the placeholders are replaced back. Lengths do not change, so template code that
counts or slices still works.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain

from tokenizers import AddedToken


class ControlFinder:
    """Finds control tokens in a text: leftmost, then longest, including the white space that an
    AddedToken's lstrip and rstrip rules consume."""

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
        self._first_character = re.compile(f"[{chars}]" if chars else "(?!)")

    def longest_at(self, text: str, at: int) -> str | None:
        for length in self._lengths:
            piece = text[at : at + length]
            if piece in self.control:
                return piece
        return None

    def split(self, text: str) -> list[tuple[str, int | None]]:
        """Split into (text, None) and (control token with consumed white space, id). The parts
        concatenate to the text."""
        parts: list[tuple[str, int | None]] = []
        done = search = 0
        while found := self._first_character.search(text, search):
            start = found.start()
            token = self.longest_at(text, start)
            if token is None:
                search = start + 1
                continue
            search = stop = start + len(token)
            rule = self._rules.get(token)
            if rule is not None:
                if rule.single_word and not _is_whole_word(text, start, stop):
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
        """The first literal control token in the text, if any. One regex scan."""
        for found in self._first_two_characters.finditer(text):
            token = self.longest_at(text, found.start())
            rule = self._rules.get(token) if token is not None else None
            inside_word = (
                rule is not None
                and rule.single_word
                and not _is_whole_word(text, found.start(), found.start() + len(token or ""))
            )
            if token is not None and not inside_word:
                return token
        return None

    @cached_property
    def _first_two_characters(self) -> re.Pattern[str]:
        """Matches the first two characters of a control token: "<" is frequent in HTML, "<|" is
        not."""
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
        """Every index where `text` could start a control token: a whole one, one that continues in
        the text that follows, or (index 0) the rest of one that started before."""
        found = [m.start() for m in self._first_character.finditer(text)]
        tail = len(text) - self._lengths[0] if self._lengths else 0
        at = [
            i
            for i in found
            if self.longest_at(text, i) is not None or (i > tail and text[i:] in self._heads)
        ]
        if text and at[:1] != [0] and self._starts_with_tail(text):
            at.insert(0, 0)
        return at

    def _starts_with_tail(self, text: str) -> bool:
        head = text[: self._lengths[0]] if self._lengths else ""
        return any(head[: i + 1] in self._tails for i, c in enumerate(head) if c in self._lasts)

    @cached_property
    def _heads(self) -> frozenset[str]:
        return frozenset(t[:i] for t in self.control for i in range(1, len(t)))

    @cached_property
    def _tails(self) -> frozenset[str]:
        return frozenset(t[i:] for t in self.control for i in range(1, len(t)))


class ControlEscaper:
    """Placeholders of one conversation. `escape` is applied to its strings, `unescape` to the
    rendered text."""

    def __init__(self, finder: ControlFinder, conversation: object = ()) -> None:
        self._finder = finder
        self._conversation = conversation
        self._placeholders: dict[str, str] = {}
        self._originals: dict[int, str] = {}

    @cached_property
    def _used_characters(self) -> set[str]:
        """Every character of the conversation. Lazy: most conversations need no placeholder."""
        return set().union(*strings_in(self._conversation))

    def escape(self, text: str) -> str:
        at = self._finder.begins(text)
        if not at:
            return text
        chars = list(text)
        for i in at:
            chars[i] = self._placeholder(chars[i])
        return "".join(chars)

    def _placeholder(self, char: str) -> str:
        found = self._placeholders.get(char)
        if found is None:
            # Noncharacters first: U+FDD0 to U+FDEF are reserved for internal use by programs.
            pool = (chr(c) for c in chain(range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE)))
            # Its JSON escape must not occur either: templates that write JSON may escape it.
            found = next(
                c
                for c in pool
                if c not in self._used_characters and not self._occurs(_json_escape(c))
            )
            self._used_characters.add(found)
            self._placeholders[char] = found
            self._originals[ord(found)] = char
        return found

    def unused_character(self) -> str:
        """A character that occurs nowhere in the conversation, to mark a position."""
        return self._placeholder("")

    def _occurs(self, text: str) -> bool:
        return any(text in string for string in strings_in(self._conversation))

    def unescape(self, text: str) -> str:
        for placeholder, char in self._originals.items():
            text = text.replace(chr(placeholder), char).replace(
                _json_escape(chr(placeholder)), char
            )
        return text

    @property
    def used(self) -> bool:
        return bool(self._placeholders)


def _json_escape(char: str) -> str:
    return f"\\u{ord(char):04x}"


def strings_in(value: object, depth: int = 0) -> Iterable[str]:
    """Every string in plain data, keys included."""
    if isinstance(value, str):
        yield value
    elif depth > 100:
        return  # chat_template.py rejects nesting this deep
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key, depth + 1)
            yield from strings_in(item, depth + 1)
    elif isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        for item in value:
            yield from strings_in(item, depth + 1)


def _is_whole_word(text: str, start: int, stop: int) -> bool:
    before, after = text[start - 1 : start], text[stop : stop + 1]
    return not (_is_word_character(before) or _is_word_character(after))


def _is_word_character(char: str) -> bool:
    return bool(char) and (char.isalnum() or char == "_")
