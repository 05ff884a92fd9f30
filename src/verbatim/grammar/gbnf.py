r"""GBNF, the grammar notation of llama.cpp, as Lark text in llguidance's dialect.

In: a grammar with `::=`. Out: Lark text. A grammar without recursion becomes one terminal, so
that llguidance matches it as one regular expression, exactly. In a recursive grammar each rule
without recursion becomes a terminal, which the lexer matches greedily: per-character terminals
would exceed llguidance's limit of parser items per mask with an ordinary vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from verbatim.base.errors import ParameterError, UnsupportedError

RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.M)  # the first line of a rule

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[\w-]+")
_REPEAT = re.compile(r"[*+?]|\{\s*(?P<low>[0-9]+)\s*(?P<comma>,?)\s*(?P<high>[0-9]*)\s*\}")
_TOKEN = re.compile(r"!?<[^>\n]*>")
_ESCAPE = re.compile(r'\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([trn\\"\[\]-]))')
_CONTROL = {"t": "\t", "r": "\r", "n": "\n"}


class _RuleReference(NamedTuple):
    rule: str


_Part = str | _RuleReference  # Lark text, or a rule whose Lark name is not known yet


def gbnf_to_lark(text: str) -> str:
    """The grammar in Lark. Raises ParameterError (invalid) or UnsupportedError (token references).

    >>> print(gbnf_to_lark('root ::= "a" [^b-c] digit{2}\\ndigit ::= [0-9]'))
    %llguidance {}
    start: R0
    R0: ("a" /[^\\x{62}-\\x{63}]/ (R1){2,2})
    R1: (/[\\x{30}-\\x{39}]/)
    """
    rules = dict(_GbnfReader(text).rules())
    if "root" not in rules:
        raise ParameterError("grammar", "is not valid GBNF: it has no rule `root`")
    used = {
        rule: {part.rule for part in parts if not isinstance(part, str)}
        for rule, parts in rules.items()
    }
    for rule, others in used.items():
        if unknown := sorted(others - rules.keys()):
            raise ParameterError(
                "grammar", f"is not valid GBNF: {rule} uses the rule {unknown[0]}, which is missing"
            )
    terminals: set[str] = set()
    while found := {rule for rule in rules.keys() - terminals if used[rule] <= terminals}:
        terminals |= found
    # Names of our own: two names of GBNF may differ only in case or in `-` and `_`.
    names = {rule: f"{'R' if rule in terminals else 'r'}{i}" for i, rule in enumerate(rules)}
    lines = ["%llguidance {}", f"start: {names['root']}"]
    for rule, parts in rules.items():
        body = "".join(part if isinstance(part, str) else names[part.rule] for part in parts)
        lines.append(f"{names[rule]}: {body}")
    return "\n".join(lines)


class _GbnfReader:
    """Recursive descent over llama.cpp's notation."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def rules(self) -> Iterator[tuple[str, list[_Part]]]:
        self.skip(_LINES)
        while self.at < len(self.text):
            name = self.name()
            self.skip(_SPACE)
            if not self.text.startswith("::=", self.at):
                self.fail("`::=` expected")
            self.at += 3
            self.skip(_LINES)
            yield name, self.alternatives(_SPACE)
            if self.sign() not in ("", "\r", "\n"):
                self.fail("the end of the line expected")
            self.skip(_LINES)

    def alternatives(self, space: re.Pattern[str]) -> list[_Part]:
        """Up to the end of the rule or group; `space` is what may separate two items."""
        parts: list[_Part] = ["(", *self.sequence(space)]
        while self.sign() == "|":
            self.at += 1
            self.skip(_LINES)
            parts += [" | ", *self.sequence(space)]
        return [*parts, ")"]

    def sequence(self, space: re.Pattern[str]) -> list[_Part]:
        parts: list[_Part] = []
        while (item := self.item()) is not None:
            self.skip(space)
            while found := _REPEAT.match(self.text, self.at):
                item = self.repeated(item, found)
                self.skip(space)
            parts += [" ", *item] if parts else item
        return parts or ['""']

    def item(self) -> list[_Part] | None:
        sign = self.sign()
        if sign == '"':
            return [json.dumps("".join(self.characters('"')), ensure_ascii=False)]
        if sign == "[":
            return [self.character_class()]
        if sign == ".":
            self.at += 1
            return [r"/(?s:.)/"]
        if sign == "(":
            self.at += 1
            self.skip(_LINES)
            parts = self.alternatives(_LINES)
            if self.sign() != ")":
                self.fail("`)` expected")
            self.at += 1
            return parts
        if _NAME.match(self.text, self.at):
            return [_RuleReference(self.name())]
        if found := _TOKEN.match(self.text, self.at):
            raise UnsupportedError(
                "grammar", f"{found[0]}: token references are not supported; write text in quotes"
            )
        return None

    def repeated(self, item: list[_Part], found: re.Match[str]) -> list[_Part]:
        if found[0] in ("*", "+", "?"):
            self.at = found.end()
            return ["(", *item, ")", found[0]]
        self.at = found.end()
        low = int(found["low"])
        high = int(found["high"]) if found["high"] else None if found["comma"] else low
        if high is not None and high < low:
            self.fail(f"{found[0]} allows no number of repetitions")
        if high == 0:
            return ['""']
        return ["(", *item, f"){{{low},{'' if high is None else high}}}"]

    def character_class(self) -> str:
        negated = self.text.startswith("[^", self.at)
        self.at += negated
        members, ranges = list(self.characters("]", ranges=True)), ""
        if not members:
            self.fail("a character class is empty")
        for member in members:
            first, last = ord(member[0]), ord(member[-1])
            if last < first:
                self.fail(f"the range {member[0]}-{member[-1]} is empty")
            ranges += rf"\x{{{first:x}}}" + (rf"-\x{{{last:x}}}" if len(member) > 1 else "")
        return f"/[{'^' * negated}{ranges}]/"

    def characters(self, end: str, *, ranges: bool = False) -> Iterator[str]:
        """The characters up to `end`. A range in a class is one string of two characters."""
        self.at += 1
        while self.sign() != end:
            member = self.character()
            if ranges and self.sign() == "-" and self.text[self.at + 1 : self.at + 2] != end:
                self.at += 1
                member += self.character()
            yield member
        self.at += 1

    def character(self) -> str:
        sign = self.sign()
        if not sign:
            self.fail("a quotation mark or a bracket is not closed")
        if sign != "\\":
            self.at += 1
            return sign
        found = _ESCAPE.match(self.text, self.at)
        if not found:
            self.fail("an escape that GBNF does not have")
        if found[4]:
            self.at = found.end()
            return _CONTROL.get(found[4], found[4])
        code = int(found[1] or found[2] or found[3], 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            self.fail("an escape of no character of Unicode")
        self.at = found.end()
        return chr(code)

    def name(self) -> str:
        found = _NAME.match(self.text, self.at)
        if not found:
            self.fail("the name of a rule expected")
        self.at = found.end()
        return found[0]

    def sign(self) -> str:
        return self.text[self.at : self.at + 1]

    def skip(self, space: re.Pattern[str]) -> None:
        found = space.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def fail(self, why: str) -> NoReturn:
        line = self.text.count("\n", 0, self.at) + 1
        here = self.text[self.at : self.at + 20]
        raise ParameterError("grammar", f"is not valid GBNF: {why}, in line {line} at {here!r}")
