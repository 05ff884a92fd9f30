"""The CPU backend: C++ kernels with the same bits on every instruction set.

`CpuBackend` and `unsupported` are missing where the kernels were not built; open_backend then takes the reference backend and says so.
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("verbatim.backend.cpu._native") is not None:
    from verbatim.backend.cpu.backend import NUMERICS_VERSION, CpuBackend, unsupported

    __all__ = ["NUMERICS_VERSION", "CpuBackend", "unsupported"]
