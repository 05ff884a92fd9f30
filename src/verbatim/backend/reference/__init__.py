"""The reference backend: plain, slow NumPy. It is the specification: the kernels of the other
backends are tested against it."""

from __future__ import annotations

from verbatim.backend.reference.backend import NUMERICS_VERSION, ReferenceBackend
from verbatim.backend.reference.canary import CacheFault

__all__ = ["NUMERICS_VERSION", "CacheFault", "ReferenceBackend"]
