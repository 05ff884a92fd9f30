"""The CPU backend: C++ kernels with the same bits on every instruction set.

If the kernels are not built, `CpuBackend` and `unsupported` do not exist; open_backend then opens
the reference backend and reports it in info.note.
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("verbatim.backend.cpu._native") is not None:
    from verbatim.backend.cpu.backend import NUMERICS_VERSION, CpuBackend, unsupported

    __all__ = ["NUMERICS_VERSION", "CpuBackend", "unsupported"]


def not_built(otherwise: str = "the native module is missing") -> str:
    """Why there are no native kernels, and the remedy. `otherwise`: unless the build noted why."""
    from importlib import import_module

    try:
        reason = str(import_module("verbatim.backend.cpu._build").REASON)
    except ImportError:  # the sources, without an installation
        reason = ""
    return f"not built: {reason or otherwise}; install a C++ compiler and install verbatim again"
