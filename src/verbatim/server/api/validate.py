"""Request validation. In: body bytes. Out: a plain dict, or a Problem that names the field.

Order: bytes -> JSON (valid UTF-8, no NaN, no duplicate key, bounded depth) -> the protocol's field
table (unknown and refused fields) -> the pydantic model made from that table (types and ranges).
null means "not given", as OpenAI's clients send it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import ErrorDetails

from verbatim.base.habits import PARAMETERS
from verbatim.server.api.api_errors import Problem
from verbatim.server.api.field_rules import Rule
from verbatim.server.api.field_table import ANY_QUERY, OTHER_NAMES, PROTOCOLS, QUERIES
from verbatim.server.json_io import depth_of, has_big_integer


def parse_json(raw: bytes, max_depth: int, max_values: int) -> Any:
    if too_many_values(raw, max_values):
        raise Problem(
            "json_too_large", f"the body contains more than {max_values} values (--max-json-values)"
        )
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
            raise _json_problem(
                _path_of_first(data, _has_surrogate), "a string contains an unpaired surrogate"
            ) from None
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
        return Problem(
            "invalid_json", f"the body is not JSON: {error.msg} at character {error.pos}"
        )
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
            return _format_path(path[::-1]).encode(errors="backslashreplace").decode()
        inside = (
            value.items()
            if isinstance(value, dict)
            else enumerate(value)
            if isinstance(value, list)
            else ()
        )
        waiting += reversed([((place, step), v) for step, v in inside])
    return ""


def _format_path(path: Sequence[str | int]) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")[:256]


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise Problem(
            "invalid_json", f"the key {twice[:40]!r} appears twice in one object", param=twice[:64]
        )
    return out


SHOULD = "Input should be "  # how pydantic's messages start
TYPE_MISMATCHES = (
    "string_type",
    "int_type",
    "float_type",
    "bool_type",
    "list_type",
    "dict_type",
    "model_type",
    "literal_error",
)

# Fields whose members may be null, which means "not given" as at the top.
NULLS_INSIDE = ("messages", "input", "tools", "options")

# content part types that are not text, in all protocols
MEDIA = (
    "image_url",
    "input_image",
    "image",
    "image_file",
    "input_audio",
    "audio",
    "video_url",
    "input_video",
    "video",
    "file",
    "input_file",
    "document",
)

# ---------------------------------------------------------------------------------- models


@functools.cache
def request_model(route: str) -> type[BaseModel]:
    title, table = PROTOCOLS[route]
    members: dict[str, Any] = {}
    for name, rule in table.items():
        kind = allowed_type(rule)
        if kind is None:
            continue
        members[_safe(name)] = (kind, ...) if rule.required else (kind | None, None)
    config = ConfigDict(
        extra="forbid", strict=True, protected_namespaces=(), alias_generator=_unsafe, title=title
    )
    return create_model(title, __config__=config, **members)


def _safe(name: str) -> str:
    """pydantic reserves leading underscores."""
    return f"private{name}" if name.startswith("_") else name


def _unsafe(name: str) -> str:
    return name.removeprefix("private") if name.startswith("private_") else name


def allowed_type(rule: Rule) -> Any:
    """The accepted type; None for a field that is refused with every value."""
    if rule.kind != "refused":
        return rule.type
    if not rule.only:
        return None
    plain = tuple(v for v in rule.only if isinstance(v, (str, bool, int)))
    return Literal[plain] if len(plain) == len(rule.only) else Any


def check(route: str, data: Any) -> dict[str, Any]:
    """The body without nulls; every field is known, supported and in range."""
    table = PROTOCOLS[route][1]
    if not isinstance(data, dict):
        raise Problem("invalid_request", "the body must be a JSON object")
    given: dict[str, Any] = {}
    for name, value in data.items():
        rule = table.get(name)
        if rule is None:
            raise Problem(
                "unknown_parameter",
                f"{name[:64]}: {route} has no such field{_suggestion(name, table)}",
                param=name[:64],
            )
        if value is None:
            continue
        if rule.kind == "refused" and not _has_no_effect(rule, value):
            raise Problem(
                "unsupported_parameter", f"{name}: not supported; {rule.help}", param=name
            )
        given[name] = _without_nulls(value) if name in NULLS_INSIDE else value
    for name, rule in table.items():
        if rule.required and name not in given:
            raise Problem("missing_parameter", f"{name}: is required", param=name)
    try:
        request_model(route).model_validate(given)
    except ValidationError as error:
        raise _problem(error, given) from None
    except RecursionError:
        raise Problem("json_too_deep", "the body is nested too deeply") from None
    for name, value in given.items():
        if has_big_integer(value):
            raise Problem(
                "invalid_parameter",
                f"{name}: contains an integer of more than 64 bits",
                param=name,
            )
    return given


def check_query(method: str, route: str, pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Validated query parameters: each known, well-formed and given once."""
    if route in ANY_QUERY:
        return {}
    known = QUERIES.get(f"{method} {route}", {})
    given: dict[str, str] = {}
    for name, value in pairs:
        rule = known.get(
            "metadata[KEY]" if name.startswith("metadata[") and name.endswith("]") else name
        )
        if rule is None:
            raise Problem(
                "unknown_parameter",
                f"{name[:64]}: {method} {route} has no such parameter",
                param=name[:64],
            )
        if name in given:
            raise Problem("invalid_parameter", f"{name[:64]}: is given twice", param=name[:64])
        if re.fullmatch(rule.pattern, value, re.DOTALL) is None:
            raise Problem(
                "invalid_parameter",
                f"{name[:64]}: {value[:40]!r} is not valid; {rule.help}",
                param=name[:64],
            )
        given[name] = value
    return given


def _has_no_effect(rule: Rule, value: Any) -> bool:
    return any(type(value) is type(harmless) and value == harmless for harmless in rule.only)


def _suggestion(name: str, table: Mapping[str, Rule]) -> str:
    from difflib import get_close_matches

    near = [other for other in OTHER_NAMES.get(name, ()) if other in table]
    # The library's answer to the name, if this route has every field that the answer names
    habit = PARAMETERS.get(name, "")
    words = set(re.findall(r"\w+", habit.removeprefix("write "))) - {"or"}
    if not near and habit.startswith("write ") and words <= table.keys():
        return f"; {habit}"
    near = near or get_close_matches(name[:64], table, 1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def _without_nulls(value: Any, depth: int = 3) -> Any:
    """Drop nulls in messages: clients send earlier output back with "refusal": null."""
    if isinstance(value, dict):
        return {
            k: _without_nulls(v, depth - 1) if depth else v
            for k, v in value.items()
            if v is not None
        }
    if isinstance(value, list) and depth:
        return [_without_nulls(v, depth - 1) for v in value]
    return value


def _problem(error: ValidationError, data: Any) -> Problem:
    """Choose the most useful of pydantic's errors.

    The deepest path wins, because a union reports errors for every branch. At equal depth, an error
    that is not a mere type mismatch wins."""
    paths = [(_path(e, data), e) for e in error.errors(include_url=False)]
    # A built-in tool: report its type, not the function fields that it lacks.
    for path, complaint in paths:
        if path[:1] == ["tools"] and path[2:] == ["type"] and isinstance(complaint["input"], str):
            kind = complaint["input"][:64]
            where = _format_path(path)
            return Problem(
                "unsupported_parameter",
                f"{where}: {kind!r} tools are not supported; {_message(complaint)}",
                where,
            )
    media = next((found for path, _ in paths if (found := _media_at(path, data))), None)
    if media is not None:
        where, kind = media
        return Problem(
            "unsupported_parameter", f"only text input is supported; {where} is {kind}", where
        )
    path, chosen = max(
        paths, key=lambda item: (len(item[0]), item[1]["type"] not in TYPE_MISMATCHES)
    )
    if chosen["type"].startswith("union_tag_"):  # a missing or unknown role or type
        path.append(chosen["ctx"]["discriminator"].strip("'"))
        if chosen["type"] == "union_tag_invalid":
            expected, got = chosen["ctx"]["expected_tags"], chosen["ctx"]["tag"]
            param = _format_path(path)
            return Problem(
                "invalid_parameter",
                f"{param}: input should be one of {expected} (got {got!r:.40})",
                param,
            )
        chosen["type"] = "missing"
    param = _format_path(path)
    if chosen["type"] == "missing":
        return Problem("missing_parameter", f"{param}: is required", param=param)
    if chosen["type"] == "extra_forbidden":
        return Problem("unknown_parameter", f"{param}: unknown field", param=param)
    accepted = ""
    # The branches of a union: all that would be accepted.
    kinds = dict.fromkeys(
        _kind(e) for where, e in paths if where == path and e["type"] in TYPE_MISMATCHES
    )
    if chosen["type"] in TYPE_MISMATCHES and all(kind.startswith(SHOULD) for kind in kinds):
        accepted = SHOULD + " or ".join(kind.removeprefix(SHOULD) for kind in kinds)
    return Problem("invalid_parameter", f"{param}: {_message(chosen, accepted)}", param=param)


def _media_at(path: Sequence[str | int], data: Any) -> tuple[str, str] | None:
    """(path, kind) of a non-text part on the path of an error. pydantic only reports that it is not
    a text part."""
    if path[:1] not in (["messages"], ["input"], ["system"]):
        return None
    here = data
    for i, step in enumerate(path):
        part = isinstance(here, list)
        here = here[step] if part else here.get(step)  # None: a missing key, which is the last step
        if part and isinstance(here, dict) and here.get("type") in MEDIA:
            return _format_path(
                path[: i + 1]
            ), f"{'an' if here['type'][0] in 'aeiou' else 'a'} {here['type']}"
        if step == "images" and here:
            return _format_path(path[: i + 1]), "no text"
    return None


def _path(error: ErrorDetails, data: Any) -> list[str | int]:
    """pydantic's location without union branch names: only steps that exist in the data."""
    out: list[str | int] = []
    here = data
    location = error["loc"]
    for i, step in enumerate(location):
        last = i == len(location) - 1
        if isinstance(here, dict) and not last and _is_tag(here, step, location[i + 1]):
            continue
        if (isinstance(here, dict) and step in here) or (
            isinstance(here, list) and isinstance(step, int) and step < len(here)
        ):
            here = here[step]  # type: ignore[index]
            out.append(step)
        elif error["type"] == "missing" and last:
            out.append(step)
    return out


def _is_tag(here: dict[str, Any], step: int | str, following: int | str) -> bool:
    """Whether a step of pydantic's location is the tag of a union's branch, and not a field. A part
    {"type": "text", "text": ..} has both; the value of the field shows where the next step is."""
    if not isinstance(step, str) or step != here.get("type"):
        return False
    value = here.get(step)
    inside = isinstance(value, dict) and following in value
    return isinstance(value, str) or (following in here and not inside)


def _kind(error: ErrorDetails) -> str:
    """pydantic's message, without the name of our class."""
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{SHOULD}an object"
    return error["msg"]


def _message(error: ErrorDetails, message: str = "") -> str:
    value = repr(error["input"])
    shown = value if len(value) <= 40 else value[:37] + "..."
    message = message or _kind(error)
    return f"{message[0].lower()}{message[1:]} (got {shown})"
