"""Request validation. In: a parsed body. Out: the route's model and the plain JSON, or a Problem
that names the field.

Order: bytes -> JSON (json_body.py) -> the rules of the route's model (unknown and refused fields;
field_rules.py) -> the model itself (types and ranges; validation_errors.py).
null means "not given", as OpenAI's clients send it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from verbatim.base.json_io import JsonObject, has_big_integer
from verbatim.server.api.common.field_rules import RequestBody
from verbatim.server.api.common.route import ApiRoute
from verbatim.server.api.common.validation_errors import body_problem, suggestion
from verbatim.server.problem import Problem, invalid, unsupported

# Fields whose members may be null, which means "not given" as at the top.
NULLS_INSIDE = ("messages", "input", "tools", "tool_choice", "options")


def check(route: ApiRoute, data: Any) -> tuple[JsonObject, RequestBody]:
    """The body without nulls, as JSON and as the route's model; every field is known, supported and
    in range."""
    body, table = route.body, route.fields
    assert body is not None, route.path
    if not isinstance(data, dict):
        raise Problem("invalid_request", "the body must be a JSON object")
    given: JsonObject = {}
    for name, value in data.items():
        rule = table.get(name)
        if rule is None:
            why = f"{name[:64]}: {route.path} has no such field{suggestion(name, table)}"
            raise Problem("unknown_parameter", why, param=name[:64])
        if value is None:
            continue
        if rule.kind == "refused" and not rule.holds(value):
            raise unsupported(name, f"not supported; {rule.help}")
        given[name] = _without_nulls(value) if name in NULLS_INSIDE else value
    for name, rule in table.items():
        if rule.required and name not in given:
            raise Problem("missing_parameter", f"{name}: is required", param=name)
    try:
        made = body.model_validate(given)
    except ValidationError as error:
        raise body_problem(error, given, body) from None
    except RecursionError:
        raise Problem("json_too_deep", "the body is nested too deeply") from None
    for name, value in given.items():
        if has_big_integer(value):
            raise invalid(name, "contains an integer of more than 64 bits")
    return given, made


def check_query(route: ApiRoute, pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Validated query parameters: each known, well-formed and given once."""
    if route.any_query:
        return {}
    known = route.queries
    given: dict[str, str] = {}
    for name, value in pairs:
        metadata = name.startswith("metadata[") and name.endswith("]")
        rule = known.get("metadata[KEY]" if metadata else name)
        if rule is None:
            why = f"{name[:64]}: {route.method} {route.path} has no such parameter"
            raise Problem("unknown_parameter", why, param=name[:64])
        if name in given:
            raise invalid(name[:64], "is given twice")
        if re.fullmatch(rule.pattern, value, re.DOTALL) is None:
            raise invalid(name[:64], f"{value[:40]!r} is not valid; {rule.help}")
        given[name] = value
    return given


def _without_nulls(value: Any, depth: int = 3) -> Any:
    """Drop nulls in messages: clients send earlier output back with "refusal": null."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if v is not None}
        return {k: _without_nulls(v, depth - 1) for k, v in kept.items()} if depth else kept
    if isinstance(value, list) and depth:
        return [_without_nulls(v, depth - 1) for v in value]
    return value
