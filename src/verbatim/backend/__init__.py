"""Backends: weights, cache memory and kernels. `open_backend` picks one; nobody above asks which it was."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from verbatim.base.errors import BackendError, ParameterError, UnsupportedError

if TYPE_CHECKING:
    from verbatim.backend.protocol import Backend
    from verbatim.base.config import EngineConfig
    from verbatim.model.load import Model

BACKENDS = ("auto", "cpu", "reference")


def open_backend(model: Model, config: EngineConfig) -> Backend:
    """The backend that config.backend names. auto: cpu where its kernels are built and know the model, else reference."""
    name, note = config.backend, ""
    if name == "cuda":
        raise UnsupportedError("backend", "cuda is not part of this release; leave it out, or ask for cpu or reference")
    if name not in BACKENDS:
        raise ParameterError("backend", f"{name!r} is not one of {', '.join(BACKENDS)}")
    if name in ("auto", "cpu"):
        reason = _cpu_refuses(model)
        if reason is None:
            opened: Backend = import_module("verbatim.backend.cpu").CpuBackend(model, config)
            return opened
        if name == "cpu":
            raise BackendError(f"the cpu backend cannot run this model: {reason}; ask for the backend auto or reference")
        note = f"no cpu kernels: {reason}"
    from verbatim.backend.reference import ReferenceBackend

    return ReferenceBackend(model, config, note=note)


def _cpu_refuses(model: Model) -> str | None:
    """Why the native kernels cannot run this model, or None where they can."""
    unsupported = getattr(import_module("verbatim.backend.cpu"), "unsupported", None)
    if unsupported is None:
        return "its native module is not built"
    reason: str | None = unsupported(model)
    return reason
