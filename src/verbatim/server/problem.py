"""API errors: OpenAI's error object, with codes from a closed list.

In: an exception. Out: a Problem, which becomes an HTTP response, an `error` event inside a stream,
or the error shape of Anthropic or Ollama. A client error is never a 5xx, because OpenAI's client
retries those. A server error never contains a path, an address or a traceback.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from verbatim.base.errors import OverloadedError, RequestError, UnavailableError, VerbatimError
from verbatim.base.json_io import JsonObject

TYPES = {
    **dict.fromkeys((400, 405, 413, 415), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    499: "cancelled_error",
    **dict.fromkeys((500, 507), "server_error"),
    503: "unavailable_error",
}

# Every error code of the server: HTTP status and meaning. docs/serving.md prints this table.
CODES = {
    "invalid_request": (400, "the request is not valid"),
    "invalid_json": (
        400,
        "the body is not JSON, or contains NaN, infinity or an unpaired surrogate",
    ),
    "json_too_deep": (400, "the body is nested too deeply"),
    "json_too_large": (400, "the body contains too many values"),
    "invalid_parameter": (400, "the value of a field is not allowed; `param` names the field"),
    "unknown_parameter": (400, "the protocol has no such field; `param` names it"),
    "unsupported_parameter": (
        400,
        "a field of the protocol that this server does not support; `param` names it",
    ),
    "missing_parameter": (400, "a required field is missing; `param` names it"),
    "context_length_exceeded": (400, "prompt and output do not fit into the context"),
    "cache_capacity_exceeded": (400, "the request needs more KV cache than the server has"),
    "invalid_api_key": (401, "the API key is missing or wrong"),
    "host_not_allowed": (403, "the Host header names neither loopback nor an allowed host"),
    "model_not_found": (404, "the server has no model of this name"),
    "not_found": (404, "the route or the stored object does not exist"),
    "method_not_allowed": (405, "the route does not support this method"),
    "timeout": (408, "the request exceeded its time limit"),
    "body_too_large": (413, "the body is larger than the limit"),
    "unsupported_media_type": (415, "the body is not application/json, or a form for a file"),
    "overloaded": (429, "the queue is full; retry after Retry-After seconds"),
    "key_overloaded": (429, "this API key has reached one of its limits, which the message names"),
    "cancelled": (499, "the client disconnected"),
    "slow_reader": (499, "the client read the stream too slowly and its buffer is full"),
    "internal_error": (500, "a server error; the log has the request id"),
    "not_finite": (
        500,
        "the model computed NaN or infinity for this request; its file or adapter is broken",
    ),
    "engine_died": (503, "the engine died during this request; it is being restarted"),
    "unavailable": (
        503,
        "the server starts, restarts, drains or lacks memory; retry after Retry-After seconds",
    ),
    "state_full": (507, "the disk of --state-dir is full; nothing was stored"),
}


@dataclass(eq=False)
class Problem(Exception):
    """An error response. The server raises it; `problem_of` converts exceptions of the lower
    packages."""

    code: str
    message: str
    param: str | None = None
    retry_after: float | None = None

    @property
    def status(self) -> int:
        return CODES[self.code][0]

    @property
    def type(self) -> str:
        return TYPES[self.status]

    def body(self) -> JsonObject:
        who = {"param": self.param, "code": self.code}
        return {"error": {"message": self.message, "type": self.type, **who}}

    def headers(self) -> dict[str, str]:
        if self.status == 401:  # RFC 9110 requires it
            return {"www-authenticate": 'Bearer realm="verbatim"'}
        if self.retry_after is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after)))}


def shutting_down() -> Problem:
    return Problem("unavailable", "the server is shutting down", retry_after=30)


def invalid(field: str, why: str) -> Problem:
    """A 400 for a value that the field does not take."""
    return Problem("invalid_parameter", f"{field}: {why}", field)


def check_limit(field: str, count: int, limit: int, counted: str = "is") -> None:
    """`counted`: what the number counts, with its verb, if the number is not the value itself."""
    if count > limit:
        raise invalid(field, f"{count} {counted} above this server's limit of {limit}")


def unsupported(field: str, why: str) -> Problem:
    """A 400 for a field, or a value of it, that this server does not support."""
    return Problem("unsupported_parameter", f"{field}: {why}", field)


def problem_of(error: BaseException) -> Problem:
    """Convert an exception. Verbatim's errors keep their message; others become a generic 500."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, (OverloadedError, UnavailableError)):
        return Problem(error.code, error.message, error.param, error.retry_after)
    if isinstance(error, RequestError):
        return Problem(
            error.code if error.code in CODES else "invalid_request", error.message, error.param
        )
    if isinstance(error, VerbatimError) and error.code == "cancelled":
        return Problem("cancelled", error.message)
    return Problem(
        "internal_error",
        "the server failed on this request; its log has the details under the request id",
    )
