"""The exception tree. Each error carries what an HTTP response needs: a status, a code, and the
parameter at fault.

VerbatimError                 500  internal error
├── RequestError              400  this request cannot be served; `param` names the field
│   ├── ParameterError        400  a value breaks its rule, or two values contradict each other
│   │   └── UnknownParameterError  400  there is no such parameter (also a TypeError)
│   ├── ContextError          400  prompt plus max_tokens exceed the context
│   ├── CapacityError         400  the request cannot fit this engine's KV cache
│   └── UnsupportedError      400  a known field that this model, mode or build does not support
├── ModelError                500  a model file is broken, unknown or incomplete; `file` names it
├── OverloadedError           429  the queue is full, or other tenants' work leaves no time for
│                                  this request; retry after `retry_after` seconds
├── UnavailableError          503  the engine is draining or not ready
├── CancelledError            499  the client disconnected or the caller cancelled
└── BackendError              500  a backend is missing, or failed

`raise` is for user errors and gives the value, the rule and the remedy; `assert` is for our bugs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class VerbatimError(Exception):
    """Base of all errors that this package raises deliberately."""

    status: int = 500
    code: str = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestError(VerbatimError):
    """This request cannot be served; `param` names the field at fault."""

    status = 400
    code = "invalid_request"


class ParameterError(RequestError):
    """A parameter's value breaks its rule. `param` is always set."""

    code = "invalid_parameter"

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}", param=param)


class UnknownParameterError(ParameterError, TypeError):
    """An unknown parameter name; suggests the closest known one.

    >>> str(UnknownParameterError("temprature", ["top_p", "temperature"]))
    'temprature: no such parameter; did you mean temperature?'
    """

    def __init__(self, param: str, known: Iterable[str] = (), hint: str = "") -> None:
        near = difflib.get_close_matches(param, list(known), n=1)
        hint = hint or (f"did you mean {near[0]}?" if near else "")
        super().__init__(param, "no such parameter" + (f"; {hint}" if hint else ""))


class ContextError(RequestError):
    """Prompt plus max_tokens exceed the context."""

    code = "context_length_exceeded"


class CapacityError(RequestError):
    """The request cannot fit this engine's KV cache."""

    code = "cache_capacity_exceeded"


class UnsupportedError(RequestError):
    """A known field that is not supported here. Refused by name, never ignored."""

    code = "unsupported_parameter"

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}", param=param)


class ModelError(VerbatimError):
    """A model file is broken, unknown or incomplete; `file` names it."""

    code = "model_error"

    def __init__(self, message: str, *, file: str | None = None) -> None:
        super().__init__(f"{file}: {message}" if file else message)
        self.file = file


class OverloadedError(VerbatimError):
    """The queue is full, or other tenants' work leaves no time; retry after `retry_after` s."""

    status = 429
    code = "overloaded"

    def __init__(self, message: str, *, retry_after: float = 1.0, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after


class UnavailableError(VerbatimError):
    """The engine is draining or not ready; retry after `retry_after` seconds."""

    status = 503
    code = "unavailable"

    def __init__(self, message: str, *, retry_after: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class CancelledError(VerbatimError):
    """The client disconnected, or the caller cancelled."""

    status = 499
    code = "cancelled"


class BackendError(VerbatimError):
    """A backend is missing, or failed."""

    code = "backend_error"


OUT_OF_MEMORY = "out of GPU memory: "
# for a MemoryError, which has no text of its own
MAIN_MEMORY = (
    "out of memory: the model and its KV cache do not fit in the free memory, or in a limit on it "
    "(ulimit -v, a container's); try a smaller --kv-memory, --context or model"
)
# how the finish detail of a request starts whose logits or states are NaN or infinite
NOT_FINITE = "the model computed values that are not finite numbers"


class DeviceMemoryError(BackendError):
    """The device has too little memory left, for the KV cache or for a step. After a step the
    engine continues with smaller ones. Its message starts with OUT_OF_MEMORY."""
