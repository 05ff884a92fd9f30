"""The errors, one tree. Each carries what an HTTP answer needs: a status, a code, and the parameter at fault.

VerbatimError                500  something of ours went wrong
├── RequestError             400  this request cannot be served as asked; `param` says which field
│   ├── ParameterError       400  a value is outside its rule, or two values contradict each other
│   │   └── UnknownParameterError  400  there is no such parameter (a TypeError too, as Python calls it)
│   ├── ContextError         400  the prompt (plus what was asked for) does not fit the context
│   ├── CapacityError        400  the request could never fit the cache of this engine
│   └── UnsupportedError     400  a known field that this model, mode or build does not offer
├── ModelError               500  a model file is broken, unknown or incomplete; `file` says which
├── OverloadedError          429  the queue is full, or others leave no time for this; try again after `retry_after` seconds
├── UnavailableError         503  the engine is draining or not ready
├── CancelledError           499  the client or the caller went away
└── BackendError             500  a backend is missing, or failed

`raise` is for other people's mistakes, and says the value, the rule and the remedy; `assert` is for ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class VerbatimError(Exception):
    """Base of everything this package raises on purpose."""

    status: int = 500
    code: str = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestError(VerbatimError):
    status = 400
    code = "invalid_request"


class ParameterError(RequestError):
    """A parameter's value breaks its rule. `param` is always set."""

    code = "invalid_parameter"

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}", param=param)


class UnknownParameterError(ParameterError, TypeError):
    """A name that is not a parameter; says which one it may have been meant to be.

    >>> str(UnknownParameterError("temprature", ["top_p", "temperature"]))
    'temprature: no such parameter; did you mean temperature?'
    """

    def __init__(self, param: str, known: Iterable[str] = ()) -> None:
        near = difflib.get_close_matches(param, list(known), n=1)
        super().__init__(
            param, "no such parameter" + (f"; did you mean {near[0]}?" if near else "")
        )


class ContextError(RequestError):
    code = "context_length_exceeded"


class CapacityError(RequestError):
    code = "cache_capacity_exceeded"


class UnsupportedError(RequestError):
    """A field we know and do not offer here. Never ignored: refused by name."""

    code = "unsupported_parameter"

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}", param=param)


class ModelError(VerbatimError):
    code = "model_error"

    def __init__(self, message: str, *, file: str | None = None) -> None:
        super().__init__(f"{file}: {message}" if file else message)
        self.file = file


class OverloadedError(VerbatimError):
    status = 429
    code = "overloaded"

    def __init__(self, message: str, *, retry_after: float = 1.0, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after


class UnavailableError(VerbatimError):
    status = 503
    code = "unavailable"

    def __init__(self, message: str, *, retry_after: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class CancelledError(VerbatimError):
    status = 499
    code = "cancelled"


class BackendError(VerbatimError):
    code = "backend_error"
