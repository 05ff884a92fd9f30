"""What a client is told when something is wrong: OpenAI's error shape, from a closed list of codes.

In: an exception. Out: a Problem, which becomes an HTTP answer, an `error` event inside a stream, or Anthropic's and Ollama's spelling.
A client's mistake is never a 5xx (OpenAI's client retries those), and a fault of ours never carries a path, an address or a traceback.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from verbatim.base.errors import OverloadedError, RequestError, UnavailableError, VerbatimError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    499: "cancelled_error",
    500: "server_error",
    503: "unavailable_error",
}

# Every code that can leave this server, with its status and what it means; docs/serving.md prints the table.
CODES = {
    "invalid_request": (400, "the request cannot be served as asked"),
    "invalid_json": (400, "the body is not JSON, or holds NaN, infinity or half a character"),
    "json_too_deep": (400, "the body is nested too deeply"),
    "json_too_large": (400, "the body holds too many values"),
    "invalid_parameter": (400, "a field's value breaks its rule; `param` names it"),
    "unknown_parameter": (400, "no such field in this protocol; `param` names it"),
    "unsupported_parameter": (400, "a known field that is not offered; `param` names it"),
    "missing_parameter": (400, "a required field is absent; `param` names it"),
    "context_length_exceeded": (400, "prompt and answer do not fit the context"),
    "cache_capacity_exceeded": (400, "the request could never fit the cache"),
    "invalid_api_key": (401, "no key, or a wrong one"),
    "host_not_allowed": (403, "the Host header names neither loopback nor an allowed host"),
    "model_not_found": (404, "no such model name on this server"),
    "not_found": (404, "no such route, or no such stored object"),
    "method_not_allowed": (405, "the route exists, not with this method"),
    "timeout": (408, "the request took longer than its limit"),
    "body_too_large": (413, "the body is larger than the limit"),
    "unsupported_media_type": (415, "the body is not application/json"),
    "overloaded": (429, "the queue is full; Retry-After says when to come back"),
    "key_overloaded": (429, "this key has too many requests open"),
    "cancelled": (499, "the client went away"),
    "slow_reader": (499, "the stream was not read fast enough and its buffer is full"),
    "internal_error": (500, "a fault of ours; the log has the request id"),
    "engine_died": (503, "the engine ended while this request ran; it is being restarted"),
    "unavailable": (503, "starting, restarting or draining; Retry-After says when to come back"),
}


@dataclass(eq=False)
class Problem(Exception):
    """An answer that is an error. Raised by the HTTP side; made from the exceptions of the rooms below by `problem_of`."""

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

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        if self.retry_after is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after)))}


def problem_of(error: BaseException) -> Problem:
    """Our own errors keep their words; anything else becomes a sentence that tells nothing of the inside."""
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
