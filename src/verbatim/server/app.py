"""The ASGI application: the route table, and the middleware in front of it (request id, Host check,
API key, CORS, error responses, access log).

An ASGI scope comes in; a response in the format of the route's protocol goes out. Every response
has an x-request-id. No response contains a traceback, a file path or an address.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verbatim.base.json_io import JsonObject, dumps
from verbatim.server.api.common.request_context import (
    ClientDisconnected,
    EventStream,
    Json,
    RequestContext,
    new_id,
    to_problem,
)
from verbatim.server.api.common.route import ApiProtocol, ApiRoute
from verbatim.server.api.common.to_params import count_seeds
from verbatim.server.api.common.validate import check_query
from verbatim.server.api.routes import (
    PROTOCOLS,
    QUEUED_PATHS,
    absent_route,
    error_body,
    is_open,
    unknown_route,
)
from verbatim.server.auth import AUTH_AND_CORS_HEADERS, OPEN_ROUTES, Access
from verbatim.server.http_metrics import METRICS_TYPE
from verbatim.server.problem import Problem
from verbatim.server.server_state import State
from verbatim.server.traces import trace

log = logging.getLogger("verbatim.server")
RejectedResponse = tuple[int, list[tuple[bytes, bytes]], bytes]  # status, headers, body
Methods = dict[str, tuple[ApiProtocol, ApiRoute]]


def make_app(state: State) -> Middleware:
    if state.settings.test_engine:
        count_seeds()
    paths: dict[str, Methods] = {}
    for protocol in PROTOCOLS:
        for route in protocol.routes:
            paths.setdefault(route.path, {})[route.method] = (protocol, route)
    routes = [Route(at, _endpoint(state, found), methods=[*found]) for at, found in paths.items()]
    inner = Starlette(routes=routes, exception_handlers={HTTPException: _http_exception})
    inner.router.redirect_slashes = False
    return Middleware(inner, state)


def make_metrics_app(state: State) -> ASGIApp:
    """The application of --metrics-address: /metrics without a key. The Host check holds."""
    access = Access(state.settings, lambda path: True)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        problem = access.check(scope, {})
        if problem is None and scope["path"] != "/metrics":
            problem = Problem("not_found", "this address has no route but /metrics")
        response = Response(state.metrics_text(), media_type=METRICS_TYPE)
        answer = response if problem is None else problem_response("/", problem)
        await answer(scope, receive, send)

    return app


def _endpoint(
    state: State, methods: Mapping[str, tuple[ApiProtocol, ApiRoute]]
) -> Callable[[Request], Awaitable[Response]]:
    async def run(request: Request) -> Response:
        protocol, route = methods["GET" if request.method == "HEAD" else request.method]
        call = RequestContext(request, state, route, protocol)
        response: Response | None = None
        try:
            if route.method != "POST":  # a POST is admitted when its body has arrived
                call.admit()
                await call.first_load()
            call.query = check_query(route, request.query_params.multi_items())
            if route.is_queued and route.method != "POST":
                await call.choose_model(None)  # a POST names its model in the body
            response = await route.handler(call)
        except (ClientDisconnected, ClientDisconnect):
            response = Response(status_code=499)
        except Exception as error:
            response = problem_response(route.path, to_problem(error, call.id))
        finally:
            # A stream closes its call itself, after its last byte.
            if not isinstance(response, EventStream):
                call.close()
        return response

    return run


def problem_response(path: str, problem: Problem) -> Response:
    return Json(error_body(path, problem), problem.status, headers=problem.headers())


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    why = absent_route(path)
    problem = (
        Problem("method_not_allowed", "no such method on this route")
        if error.status_code == 405 and why is None
        else Problem("not_found", why or unknown_route(path))
    )
    response = problem_response(path, problem)
    response.headers.update(error.headers or {})
    return response


class Middleware:
    """The checks, headers and accounting that apply to every request, known route or not."""

    def __init__(self, inner: Starlette, state: State) -> None:
        self._inner = inner
        self._state = state
        self._access = Access(state.settings, is_open, state.keys)

    def reject_early(self, scope: Scope) -> RejectedResponse | None:
        """Decide from the request head alone whether to reject a request; None: it is admitted.

        The connection calls this before it creates an ASGI task. Under a flood, a rejection then
        costs a fraction of the CPU time that it would take from running requests.
        """
        headers = {k: v for k, v in scope["headers"] if k in AUTH_AND_CORS_HEADERS}
        request_id = new_id("req_")
        scope["verbatim.id"] = request_id
        scope["verbatim.arrived"] = self._state.clock()
        scope["verbatim.tenant"] = ""
        shown = (b"x-request-id", request_id.encode())
        scope["verbatim.headers"] = [shown, *self._access.cors(headers)]
        problem, route = self._access.check(scope, headers), "other"
        if problem is None and scope["method"] == "POST" and scope["path"] in QUEUED_PATHS:
            route = scope["path"]
            problem = self._state.admission.rejection(scope["verbatim.tenant"])
        if problem is None:
            return None
        body = dumps(error_body(scope["path"], problem))
        answer = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        answer += scope["verbatim.headers"]
        answer += [(name.encode(), value.encode()) for name, value in problem.headers().items()]
        self._count(scope, route, problem.status)
        return problem.status, answer, body

    def count_malformed(self, status: int) -> str:
        """Count and log what the connection rejected itself: malformed HTTP, or too many pipelined
        requests (429). Returns its id."""
        self._state.admission.count_refused(status)
        scope: Scope = {"verbatim.id": new_id("req_"), "verbatim.tenant": "", "method": "-"}
        scope["verbatim.arrived"] = self._state.clock()
        self._count(scope, "broken", status)
        return str(scope["verbatim.id"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        rejected = self.reject_early(scope) if "verbatim.id" not in scope else None
        if rejected is not None:
            status, headers, body = rejected
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        scope["verbatim.send"] = send
        status = 0

        async def out(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], *scope["verbatim.headers"]]}
            await send(message)

        if scope["method"] == "OPTIONS" and any(
            k == b"access-control-request-method" for k, _ in scope["headers"]
        ):
            await Response(status_code=204)(scope, receive, out)
        else:
            with trace(scope, scope["verbatim.id"]):
                await self._inner(scope, receive, out)
        self._count(scope, getattr(scope.get("route"), "path", "other"), status)

    def _count(self, scope: Scope, route: str, status: int) -> None:
        """Count the response in the metrics and the access log (health checks only in the metrics).
        Neither holds prompt text or keys; the tenant is the name or a digest of its key."""
        self._state.metrics.answered(route, status, scope["verbatim.tenant"])
        if self._state.access is not None and route not in OPEN_ROUTES:
            line: JsonObject = {
                "id": scope["verbatim.id"],
                "method": scope["method"],
                "route": route,
            }
            seconds = round(self._state.clock() - scope["verbatim.arrived"], 4)
            line |= {"status": status, "seconds": seconds, "tenant": scope["verbatim.tenant"]}
            self._state.access.add({**line, **scope.get("verbatim.labels", {})})
