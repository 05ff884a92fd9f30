"""Backends own weights, KV cache memory and kernels.

In: a loaded Model and an EngineConfig. Out: `open_backend` returns an opened backend. The packages
above use it only through `protocol.Backend`.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from verbatim.backend import gpu
from verbatim.base.errors import BackendError

if TYPE_CHECKING:
    from verbatim.backend.protocol import Backend
    from verbatim.base.config import EngineConfig
    from verbatim.model.loading.load import Model


def open_backend(model: Model, config: EngineConfig) -> Backend:
    """Open the backend that config.backend names.

    auto picks cuda if a GPU runs a test kernel and the model fits, else cpu if its kernels are
    built and support the model, else reference. info.note says why auto uses reference, or not the
    GPU of this machine."""
    name, notes = config.backend, []
    if name == "cuda":
        return _cuda(model, config)
    if name == "auto" and gpu.present():
        try:
            return _auto_cuda(model, config)
        except BackendError as error:
            notes.append(f"cuda is not used: {error}")
    model = unpacked(model)
    if name in ("auto", "cpu"):
        reason = _cpu_unsupported(model)
        if reason is None:
            cpu = import_module("verbatim.backend.cpu")
            opened: Backend = cpu.CpuBackend(model, config, note="; ".join(notes))
            return opened
        if name == "cpu" or config.activations != "auto":
            without = "" if config.activations == "auto" else ", and leave out activations"
            raise BackendError(
                f"the cpu backend cannot run this model: {reason}; "
                f"use the backend auto or reference{without}"
            )
        notes.append(f"the reference backend runs, which is slow; no cpu kernels: {reason}")
    from verbatim.backend.reference import ReferenceBackend

    return ReferenceBackend(model, config, note="; ".join(notes))


def may_use_gpu(config: EngineConfig) -> bool:
    """Whether open_backend opens or tries the cuda backend. Imports neither PyTorch nor Triton."""
    if config.backend != "auto":
        return config.backend == "cuda"
    return gpu.present() and gpu.missing() is None


def unpacked(model: Model) -> Model:
    """The model without the block types that only the cuda backend computes with."""
    from verbatim.formats.packed.packed_weight import without_checkpoint_blocks

    tensors = {name: without_checkpoint_blocks(t) for name, t in model.weights.items()}
    if all(tensor is model.weights[name] for name, tensor in tensors.items()):
        return model
    return replace(model, weights=replace(model.weights, tensors=tensors))


def _auto_cuda(model: Model, config: EngineConfig) -> Backend:
    """Open the cuda backend, or raise a BackendError with the reason why auto cannot use it."""
    if config.activations != "auto":
        raise BackendError(f"activations is {config.activations}, which only the cpu backend has")
    draft = None if model.draft is None else model.draft.spec
    if draft is not None and (draft.assistant is not None or draft.dflash is not None):
        raise BackendError(f"it does not run the head of {config.speculate!r}")
    reason = gpu.missing()
    if reason is not None:
        raise BackendError(reason)
    try:
        cuda = import_module("verbatim.backend.cuda")
    except Exception as error:  # a broken PyTorch or Triton raises any type of error
        raise BackendError(f"PyTorch or Triton cannot be imported: {error}") from None
    opened: Backend = cuda.open_checked(model, config)
    return opened


def _cuda(model: Model, config: EngineConfig) -> Backend:
    try:
        cuda = import_module("verbatim.backend.cuda")
    except ModuleNotFoundError as error:
        raise BackendError(
            f"the cuda backend needs PyTorch and Triton, and {error.name} is not installed; "
            + gpu.EXTRA
        ) from None
    except ImportError as error:  # a version that lacks a name
        raise BackendError(
            f"the installed PyTorch or Triton cannot be used ({error}); " + gpu.EXTRA
        ) from None
    opened: Backend = cuda.open_checked(model, config)
    return opened


def _cpu_unsupported(model: Model) -> str | None:
    """The reason why the native kernels cannot run this model; None if they can."""
    cpu = import_module("verbatim.backend.cpu")
    unsupported = getattr(cpu, "unsupported", None)
    if unsupported is None:
        return str(cpu.not_built())
    reason: str | None = unsupported(model)
    return reason
