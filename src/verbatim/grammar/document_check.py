"""Check documents against the keywords that no grammar enforces, and filter token masks by it.

    check = DocumentCheck(schema, tokens, eos_ids)     # one per structure; a normalised schema,
                                                       # or True: only names are checked
    state = CheckState()
    mask, reason = check.filter(mask, state)           # without tokens that make it invalid
    state = check.after(token, state)

A token is removed if it completes an invalid document, an item of a `uniqueItems` array that is
there already, or a name that its object has already (RFC 8259: names should be unique); the model
then continues with the other tokens. If none is left the sequence ends with an error that names the
keyword. Invariant: a complete document that passes the masks is valid.

States are immutable, so drafts and forks share them, and sequences are checked in several threads
at a time. The validator is jsonschema, with a limit on
its work and with llguidance's regular expressions, which take linear time.
"""

from __future__ import annotations

import json
import re
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple

from verbatim.base.errors import UnsupportedError
from verbatim.grammar.ecma_pattern import rust_pattern
from verbatim.grammar.json_schema import FORMATS
from verbatim.grammar.llguidance_tokenizer import byte_matcher, completions, string_matcher
from verbatim.grammar.lower import canonical, distinct, finite_items, target

MAX_EVALUATIONS = 20_000  # keywords per document; some tenths of a second
LITERALS = (b"true", b"false", b"null")
MAX_VERDICTS = 64  # documents whose verdicts are kept
MAX_INLINE = 1024  # bytes of a document up to which a step waits for a search of unused names
MAX_CURSORS = 16  # documents that a search of names follows at a time; another costs 1 ms per KB
ESCAPES_TRIED = 256  # most tokens of a mask that are tried one by one inside an escaped name
FIELD = "json_schema"


class Frame(NamedTuple):
    """An open array or object."""

    array: bool
    unique: bool = False
    choices: tuple[tuple[bytes, Any], ...] | None = None  # possible items: (JSON, key)
    seen: frozenset[Any] = frozenset()  # names of an object; keys of items that must be unique
    key: str = ""  # key of the member that is being written
    wants_key: bool = False


class CheckState(NamedTuple):
    """The document so far: what is open, and where the current value starts in the text."""

    text: bytes = b""
    stack: tuple[Frame, ...] = ()
    starts: tuple[int, ...] = ()  # offset of each open container
    scalar: int = -1  # offset of the open string, number or literal; -1: none
    string: bool = False
    escape: bool = False
    complete: bool = False


class Invalid(ValueError):
    """The text cannot become a valid document; the message says why."""


class DocumentCheck:
    def __init__(
        self,
        schema: Any,
        token_bytes: Sequence[bytes],
        eos_ids: Sequence[int],
        finite_names: str = "",
    ) -> None:
        """`finite_names`: the grammar of the document, if the names of an object may run out."""
        self._schema, self._tokens, self._eos = schema, token_bytes, frozenset(eos_ids)
        self._validate = None if schema is True else validator(schema)
        self._names = NameTokens(token_bytes)
        self._leads = LeadingTokens(token_bytes) if finite_names else None
        self._names_grammar = finite_names
        self._cursors: list[tuple[bytes, Any]] = []  # texts, and matchers that have read them
        self._lock = threading.Lock()  # sequences are checked in several threads
        self._rules: dict[tuple[Any, ...], Frame] = {}
        self._verdicts: dict[Any, str] = {}  # verdicts on the last documents, by key
        if self._validate is None:
            return
        # Tokens by what they can end: a string, a value, a number or literal that is open.
        self._closers = _by_closers(token_bytes)
        self._quotes, self._enders, self._blanks = (
            _bits(i for i, token in enumerate(token_bytes) if set(token) & set(ends))
            for ends in (b'"', b'",]}', b"\t\n\r ")
        )
        self._enders |= _bits(  # literals, and numbers with a blank behind them ("1 ")
            i
            for i, t in enumerate(token_bytes)
            if t.endswith((b"e", b"l")) or set(t.lstrip()) & set(b"\t\n\r ")
        )
        # Checked wherever they are allowed: end tokens, and tokens that may hold a whole array.
        self._always = _bits(iter(sorted(eos_ids))) | _bits(
            i for i, token in enumerate(token_bytes) if b"[" in token and b"," in token
        )

    @property
    def names_only(self) -> bool:
        """Whether the grammar enforces all of the schema but the names."""
        return self._validate is None

    def after(self, token: int, state: CheckState) -> CheckState:
        """The state after a token that the mask allows."""
        return state if token in self._eos else self._feed(state, self._tokens[token], known=True)

    def has_work(self, mask: bytes, state: CheckState) -> bool:
        """Whether filter() has tokens of this mask to check."""
        allowed = int.from_bytes(mask, "little")
        return bool(
            allowed & self._suspects(state)
            or self._repeats(allowed, state)
            or (len(state.text) > MAX_INLINE and self._leading(allowed, state))
            or self._dead_ends(allowed, state)
        )

    def filter(self, mask: bytes, state: CheckState) -> tuple[bytes, str]:
        """(the mask without the tokens that make the document invalid, the last reason)."""
        allowed = int.from_bytes(mask, "little")
        removed, reason = 0, ""
        for token in _set_bits(allowed & self._suspects(state)):
            try:
                if token not in self._eos:
                    self._feed(state, self._tokens[token])
                elif not state.complete:
                    self._complete(state.text)
            except Invalid as why:
                removed, reason = removed | 1 << token, str(why)
            except RecursionError:
                raise UnsupportedError(FIELD, "the document is too deep to check") from None
            except (ValueError, OverflowError):  # Python's limit of digits, or an infinite float
                raise UnsupportedError(FIELD, "a number is too long to check") from None
        if repeats := self._repeats(allowed & ~removed, state):
            removed, reason = removed | repeats, "a name is there already"
        if dead_ends := self._dead_ends(allowed & ~removed, state):
            removed, reason = removed | dead_ends, "every name is there already"
        return (allowed & ~removed).to_bytes(len(mask), "little"), reason

    def accepts(self, state: CheckState) -> bool:
        """Whether the text so far is a valid document."""
        try:
            if not state.complete:
                self._complete(state.text)
        except (Invalid, ValueError):
            return False
        return True

    def _suspects(self, state: CheckState) -> int:
        """The tokens that can complete the document, or an item that must be unique."""
        if self._validate is None:
            return 0
        if state.stack and state.stack[-1].choices is not None:
            return -1
        if state.string:
            ends = self._quotes
        else:
            ends = self._enders | (self._blanks if state.scalar >= 0 else 0)
        # Brackets that a token must close to reach the document or a unique array.
        outer = enumerate(reversed(state.stack))
        needed = next((i for i, frame in outer if frame.unique), len(state.stack))
        return (ends & self._closers[min(needed, len(self._closers) - 1)]) | self._always

    def _repeats(self, allowed: int, state: CheckState) -> int:
        """The allowed tokens that complete a name which the object has already."""
        top = state.stack[-1] if state.stack else None
        found = set(self._names.crossing)
        if top is not None and top.wants_key and top.seen:
            written = state.text[state.scalar + 1 :] if state.string else b""
            ends = self._names.ends if state.string else self._names.whole
            if b"\\" in written:
                found |= self._names.closing
            else:
                rest = [n[len(written) :] for n in map(_utf8, top.seen) if n.startswith(written)]
                found |= self._names.escaped if rest else set()
                for name in rest:
                    found.update(ends.get(name, ()))
        removed = 0
        for token in found:
            if allowed >> token & 1:
                try:
                    self._feed(state, self._tokens[token], known=True)
                except Invalid:
                    removed |= 1 << token
        return removed

    def _dead_ends(self, allowed: int, state: CheckState) -> int:
        """The allowed tokens after which an object needs a name that it does not have, and the
        grammar has none. Under {"^[ab]$": ...} no comma may follow {"a":1,"b":2, and no b {"b":1,".
        """
        removed = 0
        found: dict[tuple[int, bytes], bool] = {}  # depth and part of a name -> may it go on?
        for token in _set_bits(self._leading(allowed, state)):
            try:
                after = self._feed(state, self._tokens[token], known=True)
            except (ValueError, IndexError):  # it completes the document, or repeats an item
                continue
            if not after.stack or not after.stack[-1].wants_key:
                continue
            part = after.text[after.scalar + 1 :] if after.string else b""
            place = (len(after.stack), part)
            if place not in found:
                more = self._tokens[token] if after.string else self._tokens[token] + b'"'
                found[place] = self._has_unused(state.text, more, part, after.stack[-1].seen)
            removed |= 0 if found[place] else 1 << token
        return removed

    def _leading(self, allowed: int, state: CheckState) -> int:
        """The allowed tokens that lead towards a name which its object has, or to the start of
        one, where the names may run out."""
        if self._leads is None:
            return 0
        top = state.stack[-1] if state.stack else None
        if top is None or not top.wants_key:
            return allowed & (self._leads.closing if state.string else self._leads.commas)
        written = state.text[state.scalar + 1 :] if state.string else b""
        names, quote = [*map(_utf8, top.seen)], b"" if state.string else b'"'
        rests = [quote + name[len(written) :] for name in names if name.startswith(written)]
        leads = [
            part
            for rest in rests
            for end in range(min(len(rest), self._leads.longest))
            for part in self._leads.parts.get(rest[: end + 1], ())
        ]
        found = allowed & _bits(iter(leads))
        if b"\\" in written or any(map(_ESCAPED.search, names)):
            few = allowed.bit_count() <= ESCAPES_TRIED
            found |= allowed if few else allowed & self._leads.escapes
        return found

    def _has_unused(self, text: bytes, more: bytes, part: bytes, used: Collection[str]) -> bool:
        """Whether the name that `more` starts or continues can become one that is not in `used`.
        `part`: the name so far. The search goes along used names; the first byte that leads to
        another one ends it."""
        names = sorted(map(_utf8, used))
        if not _starts_one(part, names):
            return True  # a mask never leads nowhere
        with self._lock:
            for _ in range(2):  # copies share a lexer, which other documents may have used up
                matcher = self._follow(text).deep_copy()
                matcher.consume_tokens(list(more))
                found = completions(matcher, part, lambda part: _starts_one(part, names))
                unused = any(name is None or name not in used for name in found)
                if not matcher.is_error():
                    return unused
                self._cursors = []
        return True

    def _follow(self, text: bytes) -> Any:
        """A matcher over single bytes that has read the text; copy it before use."""
        cursors = self._cursors or [(b"", byte_matcher(self._names_grammar))]
        known = max(cursors, key=lambda one: len(one[0]) if text.startswith(one[0]) else -1)
        matcher = known[1].deep_copy()
        matcher.consume_tokens(list(text[len(known[0]) :]))
        others = [cursor for cursor in cursors[1:] if cursor is not known]
        self._cursors = [cursors[0], *others[1 - MAX_CURSORS :], (text, matcher)]
        return matcher

    # ------------------------------------------------------------------------------ scanner

    def _feed(self, state: CheckState, more: bytes, known: bool = False) -> CheckState:
        """The state after more bytes of JSON. Raises Invalid. `known`: a complete document is known
        to be valid."""
        text, stack, starts, scalar, string, escape, complete = state
        before = len(text)
        text += more
        for at in range(before, len(text)):
            byte = text[at]
            if string:
                if escape:
                    escape = False
                elif byte == 0x5C:
                    escape = True
                elif byte == 0x22:
                    string = False
                    top = stack[-1] if stack else None
                    if top is not None and top.wants_key:
                        name = json.loads(text[scalar : at + 1])
                        if name in top.seen:
                            raise Invalid(f"the name {name!r:.40} is there already")
                        top = top._replace(key=name, wants_key=False, seen=top.seen | {name})
                        stack = (*stack[:-1], top)
                    else:
                        value = text[scalar : at + 1]
                        stack, complete = self._value(value, text, at + 1, stack, known)
                    scalar = -1
                continue
            if byte in b" \t\n\r,]}" and scalar >= 0:
                stack, complete = self._value(text[scalar:at], text, at, stack, known)
                scalar = -1
            if byte == 0x22:
                scalar, string = at, True
            elif byte in b"[{":
                stack = (*stack, self._open(stack, byte == 0x5B))
                starts = (*starts, at)
            elif byte in b"]}":
                start, stack, starts = starts[-1], stack[:-1], starts[:-1]
                stack, complete = self._value(text[start : at + 1], text, at + 1, stack, known)
            elif byte == 0x2C:
                if not stack[-1].array:
                    stack = (*stack[:-1], stack[-1]._replace(wants_key=True))
            elif byte not in b" \t\n\r:" and scalar < 0:
                scalar = at
        if scalar >= 0 and text[scalar:] in LITERALS:  # nothing can extend it
            stack, complete = self._value(text[scalar:], text, len(text), stack, known)
            scalar = -1
        _check_prefix(text, stack, scalar)
        return CheckState(text, stack, starts, scalar, string, escape, complete)

    def _value(
        self, value: bytes, text: bytes, end: int, stack: tuple[Frame, ...], known: bool
    ) -> tuple[tuple[Frame, ...], bool]:
        """A value is complete: the document, or an item, or a member."""
        if not stack:
            if not known:
                self._complete(text[:end])
            return stack, True
        if stack[-1].unique:
            key = canonical(json.loads(value))
            if key in stack[-1].seen:
                raise Invalid("uniqueItems: an item is there already")
            stack = (*stack[:-1], stack[-1]._replace(seen=stack[-1].seen | {key}))
        return stack, False

    def _open(self, stack: tuple[Frame, ...], array: bool) -> Frame:
        if not array or self._validate is None:
            return Frame(array=array, wants_key=not array)
        path = tuple(None if frame.array else frame.key for frame in stack)
        if path not in self._rules:
            node = _unique_array(self._schema, path, self._schema)
            values = None if node is None else finite_items(node, self._schema)
            choices = None
            if values is not None:
                choices = tuple((_written(value), canonical(value)) for value in distinct(values))
            self._rules[path] = Frame(array=True, unique=node is not None, choices=choices)
        return self._rules[path]

    def _complete(self, text: bytes) -> None:
        if self._validate is None:
            return
        document = json.loads(text)
        key = canonical(document)  # tokens of one mask differ in white space only
        verdict = self._verdicts.get(key)
        if verdict is None:
            if len(self._verdicts) >= MAX_VERDICTS:
                self._verdicts.clear()
            verdict = self._verdicts[key] = self._validate(document)
        if verdict:
            raise Invalid(verdict)


def _check_prefix(text: bytes, stack: tuple[Frame, ...], scalar: int) -> None:
    """uniqueItems over an enum: raise Invalid unless the item that is being written can still
    become a value that the array does not hold yet."""
    if scalar >= 0 and stack and stack[-1].choices is not None:
        part, seen = text[scalar:], stack[-1].seen
        left = (choice for choice, key in stack[-1].choices if key not in seen)
        if not any(choice.startswith(part) for choice in left):
            raise Invalid("uniqueItems: every such item is there already")


def _written(value: Any) -> bytes:
    """The value as llguidance writes it: no exponents, and DEL escaped.

    >>> _written(1e22), _written(1.0), _written("\x7f")
    (b'10000000000000000000000', b'1', b'"\\\\u007f"')
    """
    if isinstance(value, float):
        return f"{Decimal(repr(value)):f}".removesuffix(".0").encode()
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f").encode()


# --- token sets


class NameTokens:
    """The tokens that can complete a name, by what they have before its closing quote."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.ends: dict[bytes, list[int]] = {}  # tokens that end an open name, by that part of it
        self.whole: dict[bytes, list[int]] = {}  # tokens that hold a name, by the name
        self.escaped: set[int] = set()  # the same with escapes before the quote
        self.closing: set[int] = set()  # all tokens that may end an open name
        self.crossing: set[int] = set()  # tokens that may end one value and hold the next name
        for token, text in enumerate(tokens):
            if b'"' not in text:
                continue
            end = text.index(b'"')
            self.ends.setdefault(text[:end], []).append(token)
            self.closing.add(token)
            opened = text.lstrip(b" \t\n\r")
            if opened[:1] == b'"' and b'"' in opened[1:]:
                self.whole.setdefault(opened[1 : opened.index(b'"', 1)], []).append(token)
            if b"\\" in text:
                self.escaped.add(token)
            if b"," in text and b'"' in text[text.index(b",") :].partition(b'"')[2]:
                self.crossing.add(token)


class LeadingTokens:
    """The tokens that may lead towards a name, for a search of unused ones."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.parts: dict[bytes, list[int]] = {}  # tokens by what they add to the quote and the name
        self.longest = max(map(len, tokens), default=0)
        commas, closing = [], []
        for token, text in enumerate(tokens):
            opened = text.lstrip(b" \t\n\r")
            self.parts.setdefault(opened if opened[:1] == b'"' else text, []).append(token)
            before, comma, after = text.rpartition(b",")
            if comma and after.strip(b" \t\n\r").rfind(b'"') <= 0:
                commas.append(token)
                if b'"' in before:
                    closing.append(token)
        self.commas = _bits(iter(commas))  # tokens that end where a name may start, or inside it
        self.closing = _bits(iter(closing))  # the same where a string ends first
        self.escapes = _bits(i for i, text in enumerate(tokens) if b"\\" in text)


_ESCAPED = re.compile(rb'[\x00-\x1f"\\\x7f]')  # bytes of a name that are written as an escape


def _starts_one(part: bytes, names: list[bytes]) -> bool:
    """Whether one of the sorted names starts so, or may: an escape is not complete."""
    if b"\\" in part:
        try:
            part = _utf8(json.loads(b'"' + part + b'"'))
        except ValueError:
            return True
    at = bisect_left(names, part)
    return at < len(names) and names[at].startswith(part)


def _utf8(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def _by_closers(tokens: Sequence[bytes]) -> list[int]:
    """Element n: the tokens with at least n closing brackets, as a bit set; the last is empty."""
    counts = [token.count(b"]") + token.count(b"}") for token in tokens]
    return [
        _bits(i for i, count in enumerate(counts) if count >= n)
        for n in range(max(counts, default=0) + 2)
    ]


def _bits(ids: Iterator[int]) -> int:
    flags = bytearray()
    for token in ids:
        flags.extend(bytes(max(0, token // 8 + 1 - len(flags))))
        flags[token // 8] |= 1 << token % 8
    return int.from_bytes(flags, "little")


def _set_bits(value: int) -> Iterator[int]:
    for place, byte in enumerate(value.to_bytes((value.bit_length() + 7) // 8, "little")):
        while byte:
            low = byte & -byte
            yield place * 8 + low.bit_length() - 1
            byte ^= low


# --- uniqueItems by path


def _unique_array(node: Any, path: tuple[Any, ...], root: Any, depth: int = 0) -> Any:
    """The schema that requires the array at this path to be unique, in every alternative; None if
    there is none, or if it depends on the rest of the document."""
    if not isinstance(node, Mapping) or depth > 64:
        return None
    if not path and node.get("uniqueItems") is True:
        return node
    inner = [target(node["$ref"], root)] if "$ref" in node else []
    inner += node.get("allOf", ())
    for part in inner:
        if (found := _unique_array(part, path, root, depth + 1)) is not None:
            return found
    kind = "array" if not path or path[0] is None else "object"
    for keyword in ("anyOf", "oneOf"):
        parts = [part for part in node.get(keyword, ()) if _admits(part, kind, root)]
        found = [_unique_array(part, path, root, depth + 1) for part in parts]
        if found and None not in found:
            return found[0] if len(found) == 1 else {"uniqueItems": True}
    if path and (child := _child(node, path[0])) is not None:
        return _unique_array(child, path[1:], root, depth + 1)
    return None


def _child(node: Mapping[str, Any], step: str | None) -> Any:
    if step is None:
        return None if "prefixItems" in node else node.get("items")
    if step in node.get("properties", {}):
        return node["properties"][step]
    return None if "patternProperties" in node else node.get("additionalProperties")


def _admits(node: Any, kind: str, root: Any, depth: int = 0) -> bool:
    if not isinstance(node, Mapping) or depth > 8:
        return bool(node)
    if "$ref" in node and not _admits(target(node["$ref"], root), kind, root, depth + 1):
        return False
    types = node.get("type", kind)
    return types == kind or (isinstance(types, list) and kind in types)


# --- the validator


def validator(schema: Any) -> Callable[[Any], str]:
    """A function: document -> "" or what is wrong with it."""
    from jsonschema import Draft202012Validator, FormatChecker
    from jsonschema.validators import extend
    from referencing import Registry

    spent = threading.local()  # .count: keywords evaluated in this document

    def counted(rule: Any) -> Any:
        def run(*arguments: Any) -> Any:
            spent.count += 1
            if spent.count > MAX_EVALUATIONS:
                raise UnsupportedError(FIELD, "the document is too complex to check")
            return rule(*arguments)

        return run

    rules = {name: counted(rule) for name, rule in Draft202012Validator.VALIDATORS.items()}
    rules |= {"pattern": _pattern, "patternProperties": _pattern_properties}
    rules |= {"additionalProperties": _additional_properties}
    rules |= {"uniqueItems": _unique_items, "format": _format}
    kind = extend(Draft202012Validator, rules)
    inner = kind(schema, registry=Registry(), format_checker=FormatChecker(()))

    def problem(document: Any) -> str:
        spent.count = 0
        error = next(inner.iter_errors(document), None)
        if error is None:
            return ""
        while error.context:  # follow the alternative that the document is closest to
            faults = Counter(inner.schema_path[0] for inner in error.context)

            def distance(inner: Any, faults: Counter[Any] = faults) -> tuple[Any, ...]:
                other = inner.validator in ("const", "enum")  # says which alternative is meant
                return faults[inner.schema_path[0]], other, -len(inner.absolute_path)

            error = min(error.context, key=distance)
        where = "/".join(map(str, error.absolute_path))
        return f"{error.validator}: not met" + (f" at {where!r}" if where else "")

    return problem


def _fault(text: str) -> Any:
    from jsonschema import ValidationError

    return ValidationError(text)


def _pattern(_: Any, pattern: str, instance: Any, __: Any) -> Iterator[Any]:
    if isinstance(instance, str) and not _searches(pattern, instance):
        yield _fault("does not match")


def _pattern_properties(check: Any, patterns: Any, instance: Any, _: Any) -> Iterator[Any]:
    for name, value in instance.items() if isinstance(instance, dict) else ():
        for pattern in _found(tuple(patterns), name):
            yield from check.descend(value, patterns[pattern], path=name, schema_path=pattern)


def _additional_properties(check: Any, part: Any, instance: Any, schema: Any) -> Iterator[Any]:
    known, patterns = schema.get("properties", {}), tuple(schema.get("patternProperties", ()))
    for name, value in instance.items() if isinstance(instance, dict) else ():
        if name not in known and not _found(patterns, name):
            yield from check.descend(value, part, path=name)


def _unique_items(_: Any, wanted: Any, instance: Any, __: Any) -> Iterator[Any]:
    if wanted is True and isinstance(instance, list):
        keys = [canonical(item) for item in instance]
        if len(set(keys)) < len(keys):
            yield _fault("has an item twice")


def _format(_: Any, named: Any, instance: Any, __: Any) -> Iterator[Any]:
    if not isinstance(instance, str):
        return
    if named in FORMATS and not _matches("format", named, instance):
        yield _fault(f"is not of the format {named}")
    if named == "regex":
        try:
            re.compile(instance)
        except (re.error, RecursionError, OverflowError):
            yield _fault("is not a regular expression")


@lru_cache(4096)  # the documents of one mask have the same names
def _found(patterns: tuple[str, ...], name: str) -> tuple[str, ...]:
    return tuple(pattern for pattern in patterns if _searches(pattern, name))


def _searches(pattern: str, text: str) -> bool:
    """Whether the pattern occurs in the text, in linear time."""
    return _matches("pattern", rust_pattern(pattern, common=False), text)


def _matches(keyword: str, value: str, text: str) -> bool:
    matcher = string_matcher(keyword, value).deep_copy()
    written = list(_written(text))
    return bool(
        matcher.validate_tokens(written) == len(written)
        and matcher.consume_tokens(written)
        and matcher.is_accepting()
    )
