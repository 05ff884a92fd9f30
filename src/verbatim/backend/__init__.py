"""Backends: weights, cache memory and kernels. `open_backend` picks one; nobody above asks which it was."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from verbatim.base.errors import BackendError, ParameterError

if TYPE_CHECKING:
    from verbatim.backend.protocol import Backend
    from verbatim.base.config import EngineConfig
    from verbatim.model.load import Model

BACKENDS = ("auto", "cpu", "cuda", "reference")


def open_backend(model: Model, config: EngineConfig) -> Backend:
    """The backend that config.backend names. auto: cpu where its kernels are built and know the model, else reference; cuda is
    for those who ask for it."""
    name, note = config.backend, ""
    if name not in BACKENDS:
        raise ParameterError("backend", f"{name!r} is not one of {', '.join(BACKENDS)}")
    if name == "cuda":
        return _cuda(model, config)
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


def _cuda(model: Model, config: EngineConfig) -> Backend:
    try:
        opened: Backend = import_module("verbatim.backend.cuda").CudaBackend(model, config)
    except ModuleNotFoundError as error:
        raise BackendError(
            f"the cuda backend needs PyTorch and Triton, and {error.name} is not installed; install verbatim-engine[cuda]"
        ) from None
    return opened


def _cpu_refuses(model: Model) -> str | None:
    """Why the native kernels cannot run this model, or None where they can."""
    unsupported = getattr(import_module("verbatim.backend.cpu"), "unsupported", None)
    if unsupported is None:
        return "its native module is not built"
    reason: str | None = unsupported(model)
    return reason
