"""What a protocol registers: its routes, with the fields and query parameters that each takes, and
the shape of its errors.

A protocol is one folder of `server/api` with a module `protocol.py` that defines PROTOCOL; the
list of them is in `server/api/routes.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from verbatim.base.json_io import JsonMapping, JsonObject
from verbatim.server.api.common.field_rules import RequestBody, Rule, rules_of
from verbatim.server.model_pool import ServedModel
from verbatim.server.problem import Problem

Handler = Callable[[Any], Awaitable[Response]]  # takes a RequestContext (request_context.py)


@dataclass(frozen=True, slots=True)
class Query:
    """A query parameter. Its value must match `pattern`."""

    help: str
    pattern: str = ".*"


@dataclass(frozen=True, eq=False, slots=True)
class ApiRoute:
    """One method of one path."""

    path: str
    handler: Handler
    body: type[RequestBody] | None = None  # None: the route takes no body
    is_form: bool = False  # the body is multipart/form-data instead of JSON
    method: str = "POST"
    is_queued: bool = False  # counts against max_queue, and holds its model
    shows_model: bool = False  # answers from the model's facts: waits for its first load, as queued
    queries: Mapping[str, Query] = field(default_factory=dict)
    any_query: bool = False  # ignores query parameters, which probes and browsers add
    # (body, model) -> the request needs no loaded model; of several models
    loads_nothing: Callable[[JsonMapping, ServedModel], bool] = lambda body, model: False

    @property
    def fields(self) -> Mapping[str, Rule]:
        return rules_of(self.body) if self.body is not None else {}

    @property
    def shown_path(self) -> str:
        return self.path.replace(":path", "")


queued = functools.partial(ApiRoute, is_queued=True)


@dataclass(frozen=True, eq=False, slots=True)
class ApiProtocol:
    routes: tuple[ApiRoute, ...]
    defaults: str = "openai"  # whose sampling defaults hold (PROTOCOLS of base/defaults.py)
    prefix: str = ""  # errors of every path that starts with it have the shape of `error_body`
    error_body: Callable[[Problem], JsonObject] = Problem.body
    absent_route: Callable[[str], str | None] = lambda path: None  # why a path is no route here
    is_open: Callable[[str], bool] = lambda path: False  # whether a path needs no API key
    # Ollama's documentation calls curl without a content type, and its client spells names of
    # models in any case.
    any_content_type: bool = False
    any_case: bool = False
