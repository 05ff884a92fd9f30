"""JSON as it leaves: compact, UTF-8, never NaN; one encoder, made once. And JSON inside texts, such as the arguments of calls: all of it, or none."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from verbatim.base.params import no_key_twice

MAX_DEPTH = 64  # of JSON inside a text
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
_escape = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def dumps(value: Any) -> bytes:
    try:
        return _encode(value).encode()
    except (
        UnicodeEncodeError
    ):  # half a surrogate pair, which a model may write as an escape: it leaves as one
        return _escape(value).encode()


# ------------------------------------------------------------------------------------------------------- JSON inside texts


def sound(text: str) -> Any:
    """The value of a JSON text from a client, if plain data can hold all of it: no key twice, no number that is none or beyond 64 bits, no half a
    character, not absurdly deep. ValueError for any other. (Python would take them all, and fail when the value is handed on.)"""
    data = _loads(text, no_key_twice)
    if has_huge(data):
        raise ValueError("a whole number of more than 64 bits")
    if "\\u" in text:  # only an escape can make half a surrogate pair
        _encode(data).encode()
    return data


def written(text: str) -> Any:
    """The value of a JSON text that a model wrote, which `spelled` writes again without loss, even where a key is there twice. ValueError: it is no JSON."""
    return _loads(text, _faithful)


def spelled(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if _whole(text) else json.dumps(value)


def _whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _loads(text: str, pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]]) -> Any:
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
    """An object with a key that is there twice. Whoever looks it up gets the last; whoever writes it writes all."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self._pairs = pairs

    def items(self) -> Any:
        return self._pairs


def _faithful(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    return out if len(out) == len(pairs) else _Pairs(pairs)


def _not_json(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("a number beyond all bounds")
    return number


def depth_of(data: Any, limit: int) -> int:
    """Level by level, without recursion, and no further than the limit."""
    level, depth = [data], 0
    while level and depth <= limit:
        level = [
            v
            for item in level
            if isinstance(item, (dict, list))
            for v in (item.values() if isinstance(item, dict) else item)
        ]
        depth += 1
    return depth


def has_huge(value: Any) -> bool:
    """Schemas and arguments are free-form JSON; what is passed on must fit the messages between the processes."""
    level = [value]
    while level:
        if any(isinstance(v, int) and not -(2**63) <= v < 2**63 for v in level):
            return True
        level = [
            v
            for item in level
            if isinstance(item, (dict, list))
            for v in (item.values() if isinstance(item, dict) else item)
        ]
    return False
