"""The cuda backend: PyTorch for memory, Triton for kernels. Imported only when it is asked for."""

from __future__ import annotations

from verbatim.backend.cuda.backend import NUMERICS_VERSION, CudaBackend

__all__ = ["NUMERICS_VERSION", "CudaBackend"]
