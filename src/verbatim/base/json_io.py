"""JSON encoding of responses, and parsing of JSON strings inside messages (tool call arguments).

dumps() writes compact UTF-8 and never NaN. The loads_* functions return the whole value or raise
ValueError; they never drop part of the input.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

JsonObject = dict[str, Any]  # a JSON object whose members are checked elsewhere
JsonMapping = Mapping[str, Any]  # the same, only read
MAX_DEPTH = 64  # nesting levels of a JSON string; far below Python's recursion limit
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
_escape = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def dumps(value: object) -> bytes:
    try:
        return _encode(value).encode()
    except UnicodeEncodeError:  # a lone surrogate, which a model may write as an escape
        return _escape(value).encode()


# -------------------------------------------------------------------- JSON strings inside messages


def loads_strict(text: str) -> object:
    """Parse a JSON string from a client. ValueError for a duplicate key, NaN or infinity, an
    integer above 64 bits, a lone surrogate, or nesting deeper than MAX_DEPTH: json.loads() accepts
    all of these, and encoding the value for the engine process would fail later."""
    data = _loads(text, no_key_twice)
    if has_big_integer(data):
        raise ValueError("a whole number of more than 64 bits")
    if "\\u" in text:  # only an escape can produce a lone surrogate
        _encode(data).encode()
    return data


def loads_lossless(text: str) -> object:
    """Parse a JSON string that a model generated. dumps_lossless() writes the value back without
    loss, duplicate keys included. ValueError: not JSON."""
    return _loads(text, keep_pairs)


def dumps_lossless(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if _is_utf8(text) else json.dumps(value)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _loads(text: str, pairs: Callable[[list[tuple[str, Any]]], dict[str, object]]) -> object:
    try:
        data = json.loads(
            text, object_pairs_hook=pairs, parse_constant=_not_json, parse_float=_finite
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if depth_of(data, MAX_DEPTH) > MAX_DEPTH:
        raise ValueError("nested too deeply")
    return data


class _Pairs(dict[str, Any]):
    """An object with a duplicate key. Lookup returns the last value; items() returns every pair."""

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        self._pairs = pairs

    def items(self) -> Any:
        return self._pairs


def keep_pairs(pairs: list[tuple[str, Any]]) -> JsonObject:
    """An object that dumps_lossless() writes with all of these pairs, duplicate keys included."""
    out = dict(pairs)
    return out if len(out) == len(pairs) else _Pairs(pairs)


def _not_json(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("a number too large for a float")
    return number


def depth_of(data: object, limit: int) -> int:
    """Nesting depth, counted breadth-first without recursion; stops above `limit`."""
    level, depth = [data], 0
    while level and depth <= limit:
        level, depth = _members(level), depth + 1
    return depth


def _members(values: list[object]) -> list[object]:
    """The members of all objects and lists among the values."""
    out: list[object] = []
    for value in values:
        if isinstance(value, (dict, list)):
            out += value.values() if isinstance(value, dict) else value
    return out


def has_big_integer(value: object) -> bool:
    """Whether any integer exceeds 64 bits, which msgpack cannot encode for the engine process."""
    level = [value]
    while level:
        if any(isinstance(v, int) and not -(2**63) <= v < 2**63 for v in level):
            return True
        level = _members(level)
    return False


def no_key_twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """object_pairs_hook for json.loads: a repeated key raises; Python would drop a value
    silently."""
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        twice = next(
            key
            for key, _ in pairs
            if key in seen or seen.add(key)  # type: ignore[func-returns-value]
        )
        raise ValueError(f"the key {twice[:40]!r} appears twice in one object")
    return out
