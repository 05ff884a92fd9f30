"""The ASGI application: the route table, and the middleware in front of it (request id, Host check,
API key, CORS, error responses, access log).

An ASGI scope comes in; a response in the format of the route's protocol goes out. Every response
has an x-request-id. No response contains a traceback, a file path or an address.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from verbatim import __version__
from verbatim.base.json_io import dumps
from verbatim.server.api.anthropic import anthropic
from verbatim.server.api.common import info, stored
from verbatim.server.api.common.docs_page import POLICY, page
from verbatim.server.api.common.openapi import document
from verbatim.server.api.common.request_context import (
    ClientDisconnected,
    EventStream,
    Handler,
    Json,
    RequestContext,
    new_id,
    to_problem,
)
from verbatim.server.api.common.to_params import count_seeds
from verbatim.server.api.common.validate import check_query
from verbatim.server.api.lens import lens_api
from verbatim.server.api.llamacpp import llama_cpp
from verbatim.server.api.ollama import ollama, ollama_models
from verbatim.server.api.openai import embed_rerank, responses, score_tokenize
from verbatim.server.api.openai.chat_completions import chat
from verbatim.server.api.openai.completions import completions
from verbatim.server.problem import Problem
from verbatim.server.server_state import State
from verbatim.server.traces import trace

log = logging.getLogger("verbatim.server")
OPEN_ROUTES = ("/health", "/health/live", "/health/ready")
AUTH_AND_CORS_HEADERS = (
    b"authorization",
    b"x-api-key",
    b"origin",
    b"access-control-request-headers",
)
HEADER_NAMES = re.compile(rb"[A-Za-z0-9_-]+( *, *[A-Za-z0-9_-]+)*").fullmatch
RejectedResponse = tuple[int, list[tuple[bytes, bytes]], bytes]  # status, headers, body


async def _openapi(call: RequestContext) -> Response:
    return Json(await asyncio.to_thread(document, tuple(route_list()), call.state.names()))


async def _docs(call: RequestContext) -> Response:
    made = await asyncio.to_thread(page, tuple(route_list()), call.state.names(), __version__)
    return Response(made, media_type="text/html", headers={"content-security-policy": POLICY})


# path -> method -> (handler, counts against max_queue)
ROUTES: dict[str, dict[str, tuple[Handler, bool]]] = {
    "/v1/completions": {"POST": (completions, True)},
    "/v1/chat/completions": {"POST": (chat, True), "GET": (stored.list_chats, False)},
    "/v1/chat/completions/{id}": {
        "GET": (stored.get_chat, False),
        "POST": (stored.update_chat, False),
        "DELETE": (stored.delete_chat, False),
    },
    "/v1/chat/completions/{id}/messages": {"GET": (stored.chat_messages, False)},
    "/v1/responses": {"POST": (responses.create, True)},
    "/v1/responses/input_tokens": {"POST": (responses.count, True)},
    "/v1/responses/{id}": {
        "GET": (stored.get_response, False),
        "DELETE": (stored.delete_response, False),
    },
    "/v1/responses/{id}/input_items": {"GET": (stored.input_items, False)},
    "/v1/models": {"GET": (info.models, False)},
    "/v1/models/{id:path}": {"GET": (info.model, False)},
    "/v1/embeddings": {"POST": (embed_rerank.embeddings, True)},
    "/v1/rerank": {"POST": (embed_rerank.rerank, True)},
    "/rerank": {"POST": (embed_rerank.rerank, True)},
    "/v1/score": {"POST": (score_tokenize.score, True)},
    "/tokenize": {"POST": (score_tokenize.tokenize, True)},
    "/detokenize": {"POST": (score_tokenize.detokenize, True)},
    "/tokenizer_info": {"GET": (info.tokenizer, False)},
    "/completion": {"POST": (llama_cpp.completion, True)},
    "/embedding": {"POST": (embed_rerank.llama_embedding, True)},
    "/apply-template": {"POST": (llama_cpp.apply_template, True)},
    "/props": {"GET": (llama_cpp.props, False)},
    "/v1/messages": {"POST": (anthropic.create, True)},
    "/v1/messages/count_tokens": {"POST": (anthropic.count, True)},
    "/api/chat": {"POST": (ollama.chat, True)},
    "/api/generate": {"POST": (ollama.generate, True)},
    "/api/embed": {"POST": (ollama_models.embeddings_of_list, True)},
    "/api/embeddings": {"POST": (ollama_models.embedding_of_prompt, True)},
    "/api/show": {"POST": (ollama_models.show, False)},
    "/api/pull": {"POST": (ollama_models.pull, False)},
    "/api/tags": {"GET": (ollama_models.tags, False)},
    "/api/ps": {"GET": (ollama_models.ps, False)},
    "/api/version": {"GET": (ollama_models.version, False)},
    "/health": {"GET": (info.health, False)},
    "/health/live": {"GET": (info.live, False)},
    "/health/ready": {"GET": (info.health, False)},
    "/metrics": {"GET": (info.metrics, False)},
    "/openapi.json": {"GET": (_openapi, False)},
    "/docs": {"GET": (_docs, False)},
    "/lens/api/info": {"GET": (lens_api.info, True)},
    "/lens/api/vocab": {"GET": (lens_api.vocab, True)},
    "/lens/api/engine": {"GET": (lens_api.engine, True)},
    "/lens/api/step": {"POST": (lens_api.step, True)},
    "/lens/api/replay": {"POST": (lens_api.replay, True)},
    "/": {"GET": (lens_api.page, False)},
    "/lens/{id:path}": {"GET": (lens_api.page, False)},
}
QUEUED_ROUTES = {
    path for path, methods in ROUTES.items() if any(is_queued for _, is_queued in methods.values())
}


def make_app(state: State) -> Middleware:
    if state.settings.test_engine:
        count_seeds()
    routes = [
        Route(path, _endpoint(state, path, methods), methods=list(methods))
        for path, methods in ROUTES.items()
    ]  # fmt: skip
    inner = Starlette(routes=routes, exception_handlers={HTTPException: _http_exception})
    inner.router.redirect_slashes = False
    return Middleware(inner, state)


def _endpoint(
    state: State, path: str, methods: dict[str, tuple[Handler, bool]]
) -> Callable[[Request], Awaitable[Response]]:
    async def run(request: Request) -> Response:
        call = RequestContext(request, state, path)
        handler, is_queued = methods["GET" if request.method == "HEAD" else request.method]
        response: Response | None = None
        try:
            call.is_queued = is_queued
            if request.method != "POST":  # a POST is admitted when its body has arrived
                call.admit()
            call.query = check_query(
                "GET" if request.method == "HEAD" else request.method,
                path,
                request.query_params.multi_items(),
            )
            if is_queued and request.method != "POST":
                await call.choose_model(None)  # a POST names its model in the body
            response = await handler(call)
        except (ClientDisconnected, ClientDisconnect):
            response = Response(status_code=499)
        except Exception as error:
            response = problem_response(path, to_problem(error, call.id))
        finally:
            # A stream closes its call itself, after its last byte.
            if not isinstance(response, EventStream):
                call.close()
        return response

    return run


def problem_body(path: str, problem: Problem) -> dict[str, Any]:
    """The error body in the format of the route's protocol (Anthropic, Ollama or OpenAI)."""
    if path.startswith("/v1/messages"):
        return anthropic.error_body(problem)
    return {"error": problem.message} if path.startswith("/api/") else problem.body()


def problem_response(path: str, problem: Problem) -> Response:
    return Json(problem_body(path, problem), problem.status, headers=problem.headers())


def _nearest_route(path: str) -> str:
    """A suggestion for an unknown path: the same one under /v1, else a similar one."""
    from difflib import get_close_matches

    known = [route for route in ROUTES if "{" not in route and route != "/"]
    under_v1 = f"/v1{path.rstrip('/')}"
    near = [under_v1] if under_v1 in known else get_close_matches(path[:64], known, 1, cutoff=0.8)
    return f"; did you mean {near[0]}?" if near else ""


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    message = (
        "no such method on this route"
        if error.status_code == 405
        else ollama_models.fixed_models(request.url.path)
        or f"no such route{_nearest_route(request.url.path)}; /openapi.json lists them"
    )
    response = problem_response(request.url.path, Problem(code, message))
    response.headers.update(error.headers or {})
    return response


class Middleware:
    """The checks, headers and accounting that apply to every request, known route or not."""

    def __init__(self, inner: Starlette, state: State) -> None:
        self._inner = inner
        self._state = state
        settings = state.settings
        self._keys = [
            (hashlib.sha256(k.encode()).digest(), hashlib.sha256(k.encode()).hexdigest()[:16])
            for k in settings.keys
        ]
        self._hosts = {
            "localhost",
            settings.host.lower(),
            *(h.lower() for h in settings.allowed_hosts),
        }

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
        scope["verbatim.headers"] = [(b"x-request-id", request_id.encode()), *self._cors(headers)]
        problem, route = self._check_access(scope, headers), "other"
        if problem is None and scope["method"] == "POST" and scope["path"] in QUEUED_ROUTES:
            route = scope["path"]
            problem = self._state.admission.rejection(scope["verbatim.tenant"])
        if problem is None:
            return None
        body = dumps(problem_body(scope["path"], problem))
        answer = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *scope["verbatim.headers"],
        ]
        answer += [(name.encode(), value.encode()) for name, value in problem.headers().items()]
        self._count(scope, route, problem.status)
        return problem.status, answer, body

    def count_malformed(self, status: int) -> str:
        """Count and log input that the connection rejected as malformed HTTP. Returns its id."""
        scope = {
            "verbatim.id": new_id("req_"),
            "verbatim.arrived": self._state.clock(),
            "verbatim.tenant": "",
            "method": "-",
        }
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
        Neither holds prompt text or keys; the tenant is a digest of its key."""
        self._state.metrics.answered(route, status)
        if self._state.access is not None and route not in OPEN_ROUTES:
            line = {
                "id": scope["verbatim.id"],
                "method": scope["method"],
                "route": route,
                "status": status,
            }
            seconds = round(self._state.clock() - scope["verbatim.arrived"], 4)
            labels = scope.get("verbatim.labels", {})
            self._state.access.add(
                {**line, "seconds": seconds, "tenant": scope["verbatim.tenant"], **labels}
            )

    # ---------------------------------------------------------------------------- access control

    def _check_access(self, scope: Scope, headers: dict[bytes, bytes]) -> Problem | None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1:  # a proxy may have checked the other one
            return Problem("invalid_request", "there are several Host headers; send one", "host")
        if target := scope.get("verbatim.target_host"):
            hosts.append(target)
        # A load balancer's health probe may send no Host. Every browser sends one, so this
        # exception opens no DNS rebinding; and the health routes reveal no secret.
        if not (all(map(self._host_allowed, hosts)) if hosts else scope["path"] in OPEN_ROUTES):
            return Problem(
                "host_not_allowed",
                "the Host header, or the host of an absolute request target, names neither this "
                "machine nor an allowed host (--allow-host)",
                "host",
            )
        if (
            not self._keys
            or scope["path"] in OPEN_ROUTES
            or lens_api.is_page(scope["path"])
            or (scope["method"] == "OPTIONS" and self._state.settings.cors_origins)
        ):
            return None
        tenant = self._tenant(headers)
        if tenant is None:
            return Problem(
                "invalid_api_key",
                "this server needs a key: Authorization: Bearer KEY, or x-api-key: KEY",
                "authorization",
            )
        scope["verbatim.tenant"] = tenant
        return None

    def _tenant(self, headers: dict[bytes, bytes]) -> str | None:
        """The tenant of the request's API key. Compares with every key in constant time."""
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        candidate = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        digest = hashlib.sha256(candidate).digest()
        found: str | None = None
        for known, name in self._keys:
            if hmac.compare_digest(digest, known):
                found = name
        return found

    def _host_allowed(self, host: bytes) -> bool:
        """Protection against DNS rebinding: a browser sends the host name of the attacking page.
        IP addresses are allowed, because they cannot be rebound."""
        name = host.decode("latin-1").lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        elif name.count(":") == 1:
            name = name.partition(":")[0]
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _cors(self, headers: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        origins, origin = self._state.settings.cors_origins, headers.get(b"origin")
        if (
            not origins
            or origin is None
            or (origin.decode("latin-1") not in origins and "*" not in origins)
        ):
            return []
        # Echo the requested names: clients add many of their own, such as x-stainless-lang.
        requested = headers.get(b"access-control-request-headers", b"")
        default = b"authorization, content-type, x-api-key, anthropic-version"
        allowed = requested if HEADER_NAMES(requested) else default
        return [
            (b"access-control-allow-origin", b"*" if "*" in origins else origin),
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-allow-headers", allowed),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
            (b"vary", b"origin"),
        ]


def route_list() -> Sequence[tuple[str, str]]:
    return [(path, method) for path, methods in ROUTES.items() for method in methods]
