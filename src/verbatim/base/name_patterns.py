"""Regular expressions of a model's config, matched in bounded time.

In: a pattern in Python's syntax and a module name. Out: what `re.match` or `re.fullmatch` finds, as
a bool. Config files are untrusted, and Python's `re` backtracks: `(a+)+$` or `.*.*.*.*.*.*x` takes
hours on a name of 60 characters. Here a pattern is applied to a set of positions at once (the
simulation of an automaton), so its cost is polynomial, and the operations of all matches of one
file are counted against one limit, which grows with the number of matches.

A set of positions is an int with bit p for the position before character p. Backreferences,
conditions, atomic groups and possessive repeats need backtracking order; they are refused.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from verbatim.base.errors import ModelError

MAX_PATTERN = 500  # characters of a pattern; those in use have at most some 200
MAX_NAME = 1000  # characters of a name
# Operations on sets of positions in all matches of one file; one takes about 1 µs. A pattern in use
# takes about 50 per name (measured), so a model of 25,000 modules with ten patterns needs 13
# million. The limit is FIRST_OPERATIONS and MATCH_OPERATIONS more for each match: a pattern that
# looks ahead at each character, as `(?:(?!visual).)*`, takes 250 to 600. So a hostile pattern is
# refused at its first name, within 0.2 s.
MAX_OPERATIONS = 20_000_000
FIRST_OPERATIONS, MATCH_OPERATIONS = 100_000, 1000

# Python's own parser of patterns (private, the same in 3.11 to 3.14): a list of (operation, value).
_PARSER: Any = importlib.import_module("re._parser")
_FLAGS = re.IGNORECASE | re.DOTALL | re.VERBOSE | re.UNICODE
_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda c: c.isalnum() or c == "_",
}


class _TooLongError(Exception):
    """The operations of a file are spent."""


class NamePatterns:
    """The patterns of one file, and the operations that their matches take."""

    def __init__(self, operations: int = MAX_OPERATIONS) -> None:
        self._most, self._limit, self._spent = operations, FIRST_OPERATIONS, 0
        self._compiled: dict[str, list[_Node]] = {}
        self._name = ""
        self._characters: dict[str, int] = {}  # character of the name -> its positions
        self._masks: dict[int, int] = {}  # id of a character class -> its positions in the name

    def match(self, pattern: str, name: str) -> bool:
        """re.match(pattern, name) is not None"""
        return self._ends(pattern, name) != 0

    def fullmatch(self, pattern: str, name: str) -> bool:
        """re.fullmatch(pattern, name) is not None"""
        return bool(self._ends(pattern, name) >> len(name) & 1)

    def _ends(self, pattern: str, name: str) -> int:
        """The positions at which a match that starts at the first character can end."""
        if len(name) > MAX_NAME:
            raise ModelError(f"the name {name[:40]!r}… has more than {MAX_NAME} characters")
        nodes = self._compiled.get(pattern)
        if nodes is None:
            nodes = self._compiled[pattern] = _compile(pattern)
        if name != self._name:
            self._name, self._characters, self._masks = name, {}, {}
            for position, character in enumerate(name):
                self._characters[character] = self._characters.get(character, 0) | 1 << position
        self._limit = min(self._limit + MATCH_OPERATIONS, self._most)
        try:
            return self._sequence(nodes, 1)
        except (_TooLongError, RecursionError):
            raise ModelError(
                f"the pattern {pattern!r:.60} takes too long to match module names; write it with "
                "fewer repeats"
            ) from None

    def _sequence(self, nodes: Iterable[_Node], at: int) -> int:
        """The ends of consecutive nodes for the starts `at`."""
        for node in nodes:
            if not at:
                break
            self._spend()
            match node:
                case _Class():
                    at = (at & self._mask(node)) << 1
                case _Repeat():
                    at = self._repeat(node, at)
                case _Branch(choices):
                    ends = 0
                    for nodes_of_choice in choices:
                        ends |= self._sequence(nodes_of_choice, at)
                    at = ends
                case _Anchor(code):
                    at &= self._anchor(code)
                case _Look():
                    found = self._look(node, at)
                    at &= ~found if node.negated else found
        return at

    def _spend(self, operations: int = 1) -> None:
        self._spent += operations
        if self._spent > self._limit:
            raise _TooLongError

    def _repeat(self, node: _Repeat, at: int) -> int:
        low, high, nodes = node
        if high is None and low < 2 and len(nodes) == 1 and isinstance(nodes[0], _Class):
            mask = self._mask(nodes[0])
            at = (at & mask) << 1 if low else at
            # A carry runs through each run of matching characters that a start begins.
            return (((at & mask) + mask) ^ mask) | at
        for _ in range(low):
            ends = self._sequence(nodes, at)
            if ends == at:  # and so it stays
                break
            at = ends
        reached, done = at, low
        while at and (high is None or done < high):
            at = self._sequence(nodes, at) & ~reached
            reached, done = reached | at, done + 1
        return reached

    def _look(self, node: _Look, at: int) -> int:
        """The positions of `at` where the nodes match ahead, or end behind."""
        found, width = 0, node.width
        rest = at >> width  # starts of the nodes
        while rest:
            start = rest & -rest
            rest ^= start
            self._spend()
            ends, here = self._sequence(node.nodes, start), start << width
            found |= here if ends & (here if node.behind else -1) else 0
        return found

    def _mask(self, node: _Class) -> int:
        """The positions whose character is in the class."""
        if node.literal:
            return self._characters.get(node.literal, 0)
        found = self._masks.get(id(node))
        if found is None:
            found = 0
            for character, positions in self._characters.items():
                found |= positions if node.has(character) else 0
            self._masks[id(node)] = found
            self._spend(len(self._characters))
        return found

    def _anchor(self, code: str) -> int:
        end = len(self._name)
        if code in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return 1
        if code == "AT_END_STRING":
            return 1 << end
        if code == "AT_END":  # also before a line feed that ends the name
            return 1 << end | (1 << (end - 1) if self._name.endswith("\n") else 0)
        if not self._name:  # no boundary; \B matches in Python 3.14, and not before
            return int(code == "AT_NON_BOUNDARY" and _EMPTY_HAS_NO_BOUNDARY)
        word = self._mask(_WORD)
        boundary = word ^ (word << 1)
        return boundary if code == "AT_BOUNDARY" else ~boundary & ((2 << end) - 1)


# ----------------------------------------------------------------------------- compiled patterns


@dataclass(slots=True, eq=False)
class _Class:
    """A character class, also of one character."""

    test: Callable[[str], bool]
    literal: str = ""  # the one character of the class, if it is one
    known: dict[str, bool] = field(default_factory=dict)

    def has(self, character: str) -> bool:
        found = self.known.get(character)
        if found is None:
            found = self.known[character] = self.test(character)
        return found


class _Repeat(NamedTuple):
    low: int
    high: int | None
    nodes: list[_Node]


class _Branch(NamedTuple):
    choices: list[list[_Node]]


class _Anchor(NamedTuple):
    code: str  # the parser's name of it


class _Look(NamedTuple):
    """A look ahead, or behind over `width` characters."""

    nodes: list[_Node]
    negated: bool
    behind: bool
    width: int


_Node = _Class | _Repeat | _Branch | _Anchor | _Look
_WORD = _Class(_CATEGORIES["CATEGORY_WORD"])
_EMPTY_HAS_NO_BOUNDARY = re.match(r"\B", "") is not None


def _compile(pattern: str) -> list[_Node]:
    if len(pattern) > MAX_PATTERN:
        raise ModelError(f"a pattern has more than {MAX_PATTERN} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(pattern)
            parsed = _PARSER.parse(pattern)
        return _nodes(parsed, parsed.state.flags)
    except (re.error, OverflowError, RecursionError) as error:
        raise ModelError(f"{pattern!r:.60} is not a regular expression: {error}") from None


def _nodes(parts: Iterable[Any], flags: int) -> list[_Node]:
    if flags & ~_FLAGS:
        raise ModelError("a pattern of module names can have the flags i, s and x only")
    found: list[_Node] = []
    for operation, value in parts:
        match str(operation):
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                found.append(_character_class(str(operation), value, flags))
            case "MAX_REPEAT" | "MIN_REPEAT":
                low, high, inner = value
                most = None if high is _PARSER.MAXREPEAT else int(high)
                found.append(_Repeat(int(low), most, _nodes(inner, flags)))
            case "SUBPATTERN":
                _, added, removed, inner = value
                found += _nodes(inner, (flags | added) & ~removed)
            case "BRANCH":
                found.append(_Branch([_nodes(inner, flags) for inner in value[1]]))
            case "AT":
                found.append(_Anchor(str(value)))
            case "ASSERT" | "ASSERT_NOT":
                direction, inner = value
                behind = direction < 0
                width = inner.getwidth()[0] if behind else 0
                negated = str(operation) == "ASSERT_NOT"
                found.append(_Look(_nodes(inner, flags), negated, behind, width))
            case other:
                raise ModelError(f"{other} is not supported in a pattern of module names")
    return found


def _character_class(operation: str, value: Any, flags: int) -> _Class:
    if operation == "ANY":
        return _Class(lambda c: bool(flags & re.DOTALL) or c != "\n")
    if operation == "IN":
        items = [(str(kind), item) for kind, item in value if str(kind) != "NEGATE"]
        negated = len(items) < len(value)
    else:
        items, negated = [("LITERAL", value)], operation == "NOT_LITERAL"
    literal = chr(value) if operation == "LITERAL" and not flags & re.IGNORECASE else ""

    def test(character: str) -> bool:
        forms = {character}
        if flags & re.IGNORECASE:
            forms |= {character.lower(), character.upper()}
        return any(_in_class(items, form) for form in forms) is not negated

    return _Class(test, literal)


def _in_class(items: Sequence[tuple[str, Any]], character: str) -> bool:
    for kind, value in items:
        if kind == "CATEGORY":
            name = str(value)
            plain = name.replace("_NOT_", "_")
            found = _CATEGORIES[plain](character) is (plain == name)
        else:
            low, high = value if kind == "RANGE" else (value, value)
            found = len(character) == 1 and low <= ord(character) <= high
        if found:
            return True
    return False
