"""The cuda backend: PyTorch for memory, Triton for kernels.

Imported only if there is a GPU or the configuration names this backend: the import takes seconds.
"""

from __future__ import annotations

from verbatim.backend.cuda.backend import NUMERICS_VERSION, CudaBackend
from verbatim.backend.cuda.opening import open_checked
from verbatim.backend.cuda.runtime.device import kernel_ran

__all__ = ["NUMERICS_VERSION", "CudaBackend", "kernel_ran", "open_checked"]
