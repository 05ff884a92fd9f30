"""The CPU backend: C++ kernels with the same bits on every instruction set.

If the kernels are not built, `CpuBackend` and `unsupported` do not exist; open_backend then opens
the reference backend and reports it in info.detail.
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("verbatim.backend.cpu._native") is not None:
    from verbatim.backend.cpu.backend import NUMERICS_VERSION, CpuBackend, unsupported

    __all__ = ["NUMERICS_VERSION", "CpuBackend", "unsupported"]
