"""Access control from the head of a request: Host check, API key, CORS.

In: an ASGI scope. Out: the tenant of the request's API key, or a Problem (401, 403); the CORS
headers of the response. Runs before the body is read.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable

from starlette.types import Scope

from verbatim.server.http.api_keys import ApiKeys
from verbatim.server.problem import Problem
from verbatim.server.settings import Settings

OPEN_ROUTES = ("/health", "/health/live", "/health/ready")
_REQUESTED = b"access-control-request-headers"
AUTH_AND_CORS_HEADERS = (b"authorization", b"x-api-key", b"origin", _REQUESTED)
HEADER_NAMES = re.compile(rb"[A-Za-z0-9_-]+( *, *[A-Za-z0-9_-]+)*").fullmatch
Headers = dict[bytes, bytes]


class Access:
    def __init__(
        self, settings: Settings, is_open: Callable[[str], bool], keys: ApiKeys | None = None
    ) -> None:
        """`is_open`: whether a path needs no key, besides the health routes."""
        self._origins = settings.cors_origins
        self._is_open = is_open
        self._keys = ApiKeys(settings.keys) if keys is None else keys
        self._hosts = {"localhost", *map(str.lower, (settings.host, *settings.allowed_hosts))}

    def check(self, scope: Scope, headers: Headers) -> Problem | None:
        """The rejection; None: the request may pass, and scope["verbatim.tenant"] is its tenant."""
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1:  # a proxy may have checked the other one
            return Problem("invalid_request", "there are several Host headers; send one", "host")
        if not hosts and scope["http_version"] == "1.1":  # RFC 9112, 3.2
            return Problem("invalid_request", "an HTTP/1.1 request needs a Host header", "host")
        if target := scope.get("verbatim.target_host"):
            hosts.append(target)
        # A load balancer's health probe of HTTP/1.0 has no Host. Every browser sends one, so this
        # exception opens no DNS rebinding; and the health routes reveal no secret.
        if not (all(map(self._host_allowed, hosts)) if hosts else scope["path"] in OPEN_ROUTES):
            why = (
                "the Host header, or the host of an absolute request target, names neither this "
                "machine nor an allowed host (--allow-host)"
            )
            return Problem("host_not_allowed", why, "host")
        if not self._needs_key(scope):
            return None
        tenant = self._tenant(headers)
        if tenant is None:
            why = "this server needs a key: Authorization: Bearer KEY, or x-api-key: KEY"
            return Problem("invalid_api_key", why, "authorization")
        scope["verbatim.tenant"] = tenant
        return None

    def _needs_key(self, scope: Scope) -> bool:
        path, preflight = scope["path"], scope["method"] == "OPTIONS" and self._origins
        return bool(self._keys) and not (path in OPEN_ROUTES or self._is_open(path) or preflight)

    def _tenant(self, headers: Headers) -> str | None:
        """The tenant of the request's API key."""
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        candidate = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        return self._keys.tenant_of(candidate)

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

    def cors(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        origins, origin = self._origins, headers.get(b"origin")
        if origin is None or not {"*", origin.decode("latin-1")} & set(origins):
            return []
        # Echo the requested names: clients add many of their own, such as x-stainless-lang.
        requested = headers.get(_REQUESTED, b"")
        default = b"authorization, content-type, x-api-key, anthropic-version"
        allowed = requested if HEADER_NAMES(requested) else default
        return [
            (b"access-control-allow-origin", b"*" if "*" in origins else origin),
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-allow-headers", allowed),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
            (b"vary", b"origin"),
        ]
