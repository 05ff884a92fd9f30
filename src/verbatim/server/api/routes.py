"""The route table: the routes of every protocol, and the two that describe them all.

A protocol is one folder beside this file and its name in NAMES.
"""

from __future__ import annotations

import asyncio
from importlib import import_module

from starlette.responses import Response

from verbatim import __version__
from verbatim.server.api.common.request_context import Json, RequestContext
from verbatim.server.api.common.route import ApiProtocol, ApiRoute
from verbatim.server.api.docs_page import POLICY, page
from verbatim.server.api.openapi import document
from verbatim.server.problem import Problem

NAMES = (  # folders, in the order of the documentation
    "openai",
    "native",
    "llamacpp",
    "anthropic",
    "ollama",
    "lens",
    "chat",
)


async def _openapi(call: RequestContext) -> Response:
    return Json(await asyncio.to_thread(document, ROUTES, call.state.names()))


async def _docs(call: RequestContext) -> Response:
    made = await asyncio.to_thread(page, ROUTES, call.state.names(), __version__)
    return Response(made, media_type="text/html", headers={"content-security-policy": POLICY})


def _protocol(name: str) -> ApiProtocol:
    found = import_module(f"verbatim.server.api.{name}.protocol").PROTOCOL
    assert isinstance(found, ApiProtocol)
    return found


REFERENCE = ApiProtocol(
    (
        ApiRoute("/openapi.json", _openapi, method="GET", any_query=True),
        ApiRoute("/docs", _docs, method="GET", any_query=True),
    )
)
PROTOCOLS = (*map(_protocol, NAMES), REFERENCE)
ROUTES = tuple(route for protocol in PROTOCOLS for route in protocol.routes)
BODIES = {route.path: route for route in ROUTES if route.body}  # the routes that take a body
QUEUED_PATHS = {route.path for route in ROUTES if route.is_queued}


def error_body(path: str, problem: Problem) -> dict[str, object]:
    """The error in the format of the path's protocol, known route or not."""
    return _owner(path).error_body(problem)


def is_open(path: str) -> bool:
    """Whether a path needs no API key."""
    return any(protocol.is_open(path) for protocol in PROTOCOLS)


def absent_route(path: str) -> str | None:
    """Why a route of a protocol is not here; None: no protocol has this path."""
    return next(filter(None, (protocol.absent_route(path) for protocol in PROTOCOLS)), None)


def unknown_route(path: str) -> str:
    """There is no such route, with a suggestion: the same path under /v1, else a similar one."""
    from difflib import get_close_matches

    known = [route.path for route in ROUTES if "{" not in route.path and route.path != "/"]
    under_v1 = f"/v1{path.rstrip('/')}"
    near = [under_v1] if under_v1 in known else get_close_matches(path[:64], known, 1, cutoff=0.8)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"no such route{meant}; /openapi.json lists them"


def _owner(path: str) -> ApiProtocol:
    """The protocol under whose prefix a path lies; without one, a protocol with OpenAI's errors."""
    owners = (protocol for protocol in PROTOCOLS if protocol.prefix)
    return next((owner for owner in owners if path.startswith(owner.prefix)), REFERENCE)
