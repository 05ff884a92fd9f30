"""Parse the body of a request: bytes in, JSON values out, or a Problem that names the field.

Refused: invalid UTF-8, NaN, duplicate keys, unpaired surrogates, too many values, too deep nesting.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from verbatim.base.json_io import JsonObject, depth_of
from verbatim.server.problem import Problem


def parse_json(raw: bytes, max_depth: int, max_values: int) -> Any:
    if too_many_values(raw, max_values):
        why = f"the body contains more than {max_values} values (--max-json-values)"
        raise Problem("json_too_large", why)
    try:
        data = json.loads(
            raw.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_unique_keys
        )
    except Problem:
        raise
    except RecursionError:
        raise Problem("json_too_deep", f"the body is nested deeper than {max_depth}") from None
    except ValueError as error:  # invalid UTF-8 or JSON, NaN, a number with thousands of digits
        raise _parse_error(raw, error) from None
    if depth_of(data, max_depth) > max_depth:
        raise Problem("json_too_deep", f"the body is nested deeper than {max_depth}")
    if b"\\u" in raw or b"\\U" in raw:  # only an escape can produce an unpaired surrogate
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            where = _path_of_first(data, _has_surrogate)
            raise _json_problem(where, "a string contains an unpaired surrogate") from None
    return data


def too_many_values(raw: bytes, limit: int) -> bool:
    """Whether a body contains too many values, estimated before parsing.

    True above twice the limit, False up to the limit. Parsing a million small values blocks the
    event loop for seconds; counting commas takes milliseconds."""
    if _min_value_count(raw) <= limit:
        return False
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # do not count inside strings
    if plain.count(b'"') > 4 * limit:  # a string has two quotes, and may be a key
        return True
    return _min_value_count(b"".join(plain.split(b'"')[::2])) > limit


def _min_value_count(raw: bytes) -> int:
    """A lower bound: commas separate values, and each list or object is one."""
    return max(raw.count(b",") + 1, raw.count(b"[") + raw.count(b"{"))


def _parse_error(raw: bytes, error: ValueError) -> Problem:
    """The error for a body that does not parse. If only some values are invalid, parse again with
    markers in their place, to name the first."""
    if isinstance(error, UnicodeDecodeError):
        return Problem("invalid_json", "the body is not JSON: invalid UTF-8")
    if isinstance(error, json.JSONDecodeError):
        why = f"{error.msg} at character {error.pos}"
        return Problem("invalid_json", f"the body is not JSON: {why}")
    why = str(error) if isinstance(error, _NotJson) else "a number that cannot be parsed"
    try:
        data = json.loads(
            raw.decode(),
            parse_constant=_Unparsed,
            parse_int=_int_or_marker,
            object_pairs_hook=_unique_keys,
        )
    except (json.JSONDecodeError, RecursionError):  # the rest is invalid too: no field to name
        return Problem("invalid_json", f"the body is not JSON: {why}")
    return _json_problem(_path_of_first(data, lambda value: isinstance(value, _Unparsed)), why)


class _NotJson(ValueError):
    """NaN or Infinity, which Python's json accepts and JSON does not."""


class _Unparsed(str):
    """Marker for a JSON value that cannot be parsed."""


def _int_or_marker(digits: str) -> int | _Unparsed:
    try:
        return int(digits)
    except ValueError:  # Python limits the number of digits
        return _Unparsed(digits)


def _no_constant(name: str) -> Any:
    raise _NotJson(f"{name} is not JSON")


def _has_surrogate(value: Any) -> bool:
    return isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value)


def _json_problem(param: str, why: str) -> Problem:
    return Problem("invalid_json", f"{param}: {why}" if param else why, param or None)


def _path_of_first(data: Any, wrong: Callable[[Any], bool]) -> str:
    """Path of the first wrong value or key, in document order. Iterative, because the depth has not
    been checked yet."""
    # (path to a value as a linked list, the value)
    waiting: list[tuple[Any, Any]] = [(None, data)]
    while waiting:
        place, value = waiting.pop()
        if wrong(value) or (place and wrong(place[1])):
            path: list[str | int] = []
            while place:
                place, step = place
                path.append(step)
            return format_path(path[::-1]).encode(errors="backslashreplace").decode()
        inside = enumerate(value) if isinstance(value, list) else ()
        members = value.items() if isinstance(value, dict) else inside
        waiting += reversed([((place, step), v) for step, v in members])
    return ""


def format_path(path: Sequence[str | int]) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")[:256]


def _unique_keys(pairs: list[tuple[str, Any]]) -> JsonObject:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        why = f"the key {twice[:40]!r} appears twice in one object"
        raise Problem("invalid_json", why, param=twice[:64])
    return out
