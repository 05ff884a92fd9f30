"""Request validation. In: a parsed body. Out: a plain dict, or a Problem that names the field.

Order: bytes -> JSON (json_body.py) -> the protocol's field table (unknown and refused fields) ->
the pydantic model made from that table (types and ranges; validation_errors.py).
null means "not given", as OpenAI's clients send it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from verbatim.base.json_io import has_big_integer
from verbatim.server.api.common.field_rules import Rule
from verbatim.server.api.common.field_table import ANY_QUERY, PROTOCOLS, QUERIES
from verbatim.server.api.common.validation_errors import problem_of, suggestion
from verbatim.server.problem import Problem

# Fields whose members may be null, which means "not given" as at the top.
NULLS_INSIDE = ("messages", "input", "tools", "tool_choice", "options")


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
                f"{name[:64]}: {route} has no such field{suggestion(name, table)}",
                param=name[:64],
            )
        if value is None:
            continue
        if rule.kind == "refused" and not rule.holds(value):
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
        raise problem_of(error, given, _options(table)) from None
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


def _options(table: Mapping[str, Rule]) -> Collection[str]:
    """The names of Ollama's `options` on this route; empty without that field."""
    return getattr(table["options"].type, "model_fields", ()) if "options" in table else ()


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
