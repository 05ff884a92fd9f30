"""Backends: weights, cache memory and kernels. `open_backend` picks one; the packages above use it through the protocol."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from verbatim.backend import gpu
from verbatim.base.errors import BackendError, ParameterError

if TYPE_CHECKING:
    from verbatim.backend.protocol import Backend
    from verbatim.base.config import EngineConfig
    from verbatim.model.load import Model

BACKENDS = ("auto", "cpu", "cuda", "reference")


def open_backend(model: Model, config: EngineConfig) -> Backend:
    """The backend that config.backend names. auto: cuda where a GPU runs a test kernel and holds the
    model, else cpu where its kernels are built and know the model, else reference. Where there is a GPU and
    auto does not use it, info.note says why."""
    name, note, gpu_note = config.backend, "", ""
    if name not in BACKENDS:
        raise ParameterError("backend", f"{name!r} is not one of {', '.join(BACKENDS)}")
    if name == "cuda":
        return _cuda(model, config)
    if name == "auto" and gpu.present():
        try:
            return _auto_cuda(model, config)
        except BackendError as error:
            gpu_note = f"cuda is not used: {error}"
    if name in ("auto", "cpu"):
        reason = _cpu_refuses(model)
        if reason is None:
            opened: Backend = import_module("verbatim.backend.cpu").CpuBackend(
                model, config, note=gpu_note
            )
            return opened
        if name == "cpu":
            raise BackendError(
                f"the cpu backend cannot run this model: {reason}; ask for the backend auto or reference"
            )
        note = f"no cpu kernels: {reason}"
    from verbatim.backend.reference import ReferenceBackend

    return ReferenceBackend(model, config, note=note, gpu_note=gpu_note)


def _auto_cuda(model: Model, config: EngineConfig) -> Backend:
    """The cuda backend, or a BackendError that says why auto takes another one."""
    if config.kv_type != "f16":
        raise BackendError(f"it offers no kv_type {config.kv_type!r}")
    if config.speculate.partition(":")[0] == "head":
        raise BackendError(f"it runs no draft heads, and speculate is {config.speculate!r}")
    reason = gpu.missing()
    if reason is not None:
        raise BackendError(reason)
    try:
        cuda = import_module("verbatim.backend.cuda")
    except Exception as error:  # a broken installation of PyTorch or Triton raises what it likes
        raise BackendError(f"PyTorch or Triton cannot be imported: {error}") from None
    opened: Backend = cuda.open_checked(model, config)
    return opened


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
