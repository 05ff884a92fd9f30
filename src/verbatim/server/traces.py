"""OpenTelemetry tracing: one server span per request, if the opentelemetry package is installed.

Spans are recorded only if a tracer provider is configured (by `opentelemetry-instrument` or code).
A span holds the route, the request id and the client's trace context, never prompt text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from starlette.types import Scope

try:
    from opentelemetry import propagate
    from opentelemetry import trace as otel

    _tracer: Any = otel.get_tracer("verbatim.server")
except ImportError:
    _tracer = None


@contextlib.contextmanager
def trace(scope: Scope, request_id: str) -> Iterator[None]:
    if _tracer is None:
        yield
        return
    given = [pair for pair in scope["headers"] if pair[0] in (b"traceparent", b"tracestate")]
    carrier = {k.decode("latin-1"): v.decode("latin-1") for k, v in given}
    parent = propagate.extract(carrier) if carrier else None
    attributes = {"http.request.method": scope["method"], "verbatim.request_id": request_id}
    with _tracer.start_as_current_span(
        scope["method"], context=parent, kind=otel.SpanKind.SERVER, attributes=attributes
    ) as span:
        yield
        route = getattr(scope.get("route"), "path", None)
        if route is not None and span.is_recording():
            span.update_name(f"{scope['method']} {route}")
            span.set_attribute("http.route", route)
