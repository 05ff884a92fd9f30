"""A request body in, a checked plain dict out, or a Problem that names the field.

Order: bytes -> JSON (sound UTF-8, no NaN, no duplicate key, bounded depth) -> the protocol's table (unknown and refused fields by name) ->
the request model made from that table (types and ranges). null means "not given", as OpenAI's clients send it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import ErrorDetails

from verbatim.server.api.api_errors import Problem
from verbatim.server.api.field_table import ANY_QUERY, PROTOCOLS, QUERIES, Rule
from verbatim.server.json_io import depth_of, has_huge


def parse_json(raw: bytes, max_depth: int, max_values: int) -> Any:
    if too_many_values(raw, max_values):
        raise Problem(
            "json_too_large", f"the body holds more than {max_values} values (--max-json-values)"
        )
    try:
        data = json.loads(
            raw.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_object
        )
    except Problem:
        raise
    except RecursionError:
        raise Problem("json_too_deep", f"the body is nested deeper than {max_depth}") from None
    except ValueError as error:  # bad UTF-8, bad JSON, NaN, a number of thousands of digits
        raise _unreadable(raw, error) from None
    if depth_of(data, max_depth) > max_depth:
        raise Problem("json_too_deep", f"the body is nested deeper than {max_depth}")
    if b"\\u" in raw or b"\\U" in raw:  # only an escape can make half a surrogate pair
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise _named(
                _place_of(data, _half), "a string holds half a surrogate pair, which is not text"
            ) from None
    return data


def too_many_values(raw: bytes, limit: int) -> bool:
    """Whether a body surely holds more values than that, before anything is made of them: yes above twice the limit, no up to the limit.
    Reading and checking a million small values takes seconds in which nobody else is served; counting commas takes milliseconds."""
    if _fewest_values(raw) <= limit:
        return False
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # what is inside strings does not count
    if plain.count(b'"') > 4 * limit:  # a string has two, and may be a key
        return True
    return _fewest_values(b"".join(plain.split(b'"')[::2])) > limit


def _fewest_values(raw: bytes) -> int:
    """A comma stands between two values, and a list or an object is one."""
    return max(raw.count(b",") + 1, raw.count(b"[") + raw.count(b"{"))


def _unreadable(raw: bytes, error: ValueError) -> Problem:
    """Why the body could not be read. Where all but some values could, it is read again with marks in their places, to name the first."""
    if isinstance(error, UnicodeDecodeError):
        return Problem("invalid_json", "the body is not JSON: invalid UTF-8")
    if isinstance(error, json.JSONDecodeError):
        return Problem(
            "invalid_json", f"the body is not JSON: {error.msg} at character {error.pos}"
        )
    why = str(error) if isinstance(error, _NotJson) else "a number that cannot be read"
    try:
        data = json.loads(
            raw.decode(), parse_constant=_Unread, parse_int=_whole_number, object_pairs_hook=_object
        )
    except (
        json.JSONDecodeError,
        RecursionError,
    ):  # what follows is no better, and there are no fields to name
        return Problem("invalid_json", f"the body is not JSON: {why}")
    return _named(_place_of(data, lambda value: isinstance(value, _Unread)), why)


class _NotJson(ValueError):
    """A word that Python's json would take."""


class _Unread(str):
    """A value that is in the JSON and cannot be read."""


def _whole_number(digits: str) -> int | _Unread:
    try:
        return int(digits)
    except ValueError:  # Python reads some thousands of digits, and no more
        return _Unread(digits)


def _no_constant(name: str) -> Any:
    raise _NotJson(f"{name} is not JSON")


def _half(value: Any) -> bool:
    return isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value)


def _named(param: str, why: str) -> Problem:
    return Problem("invalid_json", f"{param}: {why}" if param else why, param or None)


def _place_of(data: Any, wrong: Callable[[Any], bool]) -> str:
    """Where the first wrong value or key is, in the order of the text; without recursion, since the depth was not looked at yet."""
    waiting: list[tuple[Any, Any]] = [
        (None, data)
    ]  # (the steps to a value as a linked list, the value)
    while waiting:
        place, value = waiting.pop()
        if wrong(value) or (place and wrong(place[1])):
            path: list[str | int] = []
            while place:
                place, step = place
                path.append(step)
            return _spelled(path[::-1]).encode(errors="backslashreplace").decode()
        inside = (
            value.items()
            if isinstance(value, dict)
            else enumerate(value)
            if isinstance(value, list)
            else ()
        )
        waiting += reversed([((place, step), v) for step, v in inside])
    return ""


def _spelled(path: Sequence[str | int]) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")[:256]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise Problem(
            "invalid_json", f"the key {twice[:40]!r} appears twice in one object", param=twice[:64]
        )
    return out


OF_ANOTHER_KIND = (
    "string_type",
    "int_type",
    "float_type",
    "bool_type",
    "list_type",
    "dict_type",
    "model_type",
    "literal_error",
)

# parts of a message that hold something else than text, as the protocols call them
MEDIA = (
    "image_url", "input_image", "image", "image_file", "input_audio", "audio", "video_url", "input_video", "video", "file", "input_file", "document",
)  # fmt: skip

# -------------------------------------------------------------------------------------------------------------- models


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
    """pydantic keeps leading underscores for itself."""
    return f"private{name}" if name.startswith("_") else name


def _unsafe(name: str) -> str:
    return name.removeprefix("private") if name.startswith("private_") else name


def allowed_type(rule: Rule) -> Any:
    """What may be sent: None for a field that is refused whatever its value."""
    if rule.kind != "refused":
        return rule.type
    if not rule.only:
        return None
    plain = tuple(v for v in rule.only if isinstance(v, (str, bool, int)))
    return Literal[plain] if len(plain) == len(rule.only) else Any


def check(route: str, data: Any) -> dict[str, Any]:
    """The body without its nulls, every field known, offered and in range."""
    table = PROTOCOLS[route][1]
    if not isinstance(data, dict):
        raise Problem("invalid_request", "the body must be a JSON object")
    given: dict[str, Any] = {}
    for name, value in data.items():
        rule = table.get(name)
        if rule is None:
            raise Problem(
                "unknown_parameter",
                f"{name[:64]}: no such field of {route}{_near(name, table)}",
                param=name[:64],
            )
        if value is None:
            continue
        if rule.kind == "refused" and not _asks_nothing(rule, value):
            raise Problem("unsupported_parameter", f"{name}: not offered; {rule.help}", param=name)
        given[name] = _without_nulls(value) if name in ("messages", "input", "tools") else value
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
        if has_huge(value):
            raise Problem(
                "invalid_parameter",
                f"{name}: holds a whole number of more than 64 bits",
                param=name,
            )
    return given


def check_query(method: str, route: str, pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The parameters of an address, each known, in its form, and there once."""
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
                f"{name[:64]}: no such parameter of {method} {route}",
                param=name[:64],
            )
        if name in given:
            raise Problem("invalid_parameter", f"{name[:64]}: is there twice", param=name[:64])
        if re.fullmatch(rule.pattern, value, re.DOTALL) is None:
            raise Problem(
                "invalid_parameter",
                f"{name[:64]}: {value[:40]!r} is not its form; {rule.help}",
                param=name[:64],
            )
        given[name] = value
    return given


def _asks_nothing(rule: Rule, value: Any) -> bool:
    return any(type(value) is type(harmless) and value == harmless for harmless in rule.only)


def _near(name: str, table: Mapping[str, Rule]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name[:64], table, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _without_nulls(value: Any, depth: int = 3) -> Any:
    """Clients send back what they got, nulls and all ("refusal": null): in messages a null is a field not given."""
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
    """Of a union's many complaints, the one that got deepest into the data is the one the client can use; of two, not the one that
    only says that the value is of another branch's kind."""
    paths = [(_path(e, data), e) for e in error.errors(include_url=False, include_context=False)]
    for (
        path,
        complaint,
    ) in paths:  # a built-in tool lacks what a function has; what matters is that it is one
        if path[:1] == ["tools"] and path[2:] == ["type"] and isinstance(complaint["input"], str):
            kind = complaint["input"][:64]
            where = _spelled(path)
            return Problem(
                "unsupported_parameter",
                f"{where}: {kind!r} tools are not offered; {_words(complaint)}",
                where,
            )
    media = next((found for path, _ in paths if (found := _media_at(path, data))), None)
    if media is not None:
        where, kind = media
        return Problem("unsupported_parameter", f"this server reads text; {where} is {kind}", where)
    path, chosen = max(
        paths, key=lambda item: (len(item[0]), item[1]["type"] not in OF_ANOTHER_KIND)
    )
    param = _spelled(path)
    if chosen["type"] == "missing":
        return Problem("missing_parameter", f"{param}: is required", param=param)
    if chosen["type"] == "extra_forbidden":
        return Problem("unknown_parameter", f"{param}: no such field", param=param)
    return Problem("invalid_parameter", f"{param}: {_words(chosen)}", param=param)


def _media_at(path: Sequence[str | int], data: Any) -> tuple[str, str] | None:
    """Where on the way to a complaint something else than text was sent, and what it is. A validator only sees that it is no text part."""
    if path[:1] not in (["messages"], ["input"], ["system"]):
        return None
    here = data
    for i, step in enumerate(path):
        part = isinstance(here, list)
        here = here[step] if part else here.get(step)  # a key that is missing is the last step
        if part and isinstance(here, dict) and here.get("type") in MEDIA:
            return _spelled(
                path[: i + 1]
            ), f"{'an' if here['type'][0] in 'aeiou' else 'a'} {here['type']}"
        if step == "images" and here:
            return _spelled(path[: i + 1]), "no text"
    return None


def _path(error: ErrorDetails, data: Any) -> list[str | int]:
    """pydantic's location without the names of union branches: only what can be followed in the data."""
    out: list[str | int] = []
    here = data
    location = error["loc"]
    for i, step in enumerate(location):
        last = i == len(location) - 1
        if (
            isinstance(here, dict)
            and not last
            and step == here.get("type")
            and isinstance(here.get(step), str)
        ):
            continue  # the tag of a union's branch ("text"), and not the field of that name
        if (isinstance(here, dict) and step in here) or (
            isinstance(here, list) and isinstance(step, int) and step < len(here)
        ):
            here = here[step]  # type: ignore[index]
            out.append(step)
        elif error["type"] == "missing" and last:
            out.append(step)
    return out


def _words(error: ErrorDetails) -> str:
    value = repr(error["input"])
    shown = value if len(value) <= 40 else value[:37] + "..."
    message = error["msg"]
    return f"{message[0].lower()}{message[1:]} (got {shown})"
