"""Sample and score on the host the rows that the device does not sample.

In: rows of logits that were copied from the GPU. Out: LogitRows over them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from verbatim.backend.step_rows import HostRows, LogitRows
from verbatim.base.config import EngineConfig


def host_sampler(config: EngineConfig) -> Callable[[np.ndarray], LogitRows]:
    """Wraps logits in host memory: in the native sampler if it is built, else in NumPy code."""
    try:
        from verbatim.backend.cpu.backend import native, physical_cores
        from verbatim.backend.cpu.sampler import NativeSampler
    except ImportError:
        return HostRows
    threads = config.threads or physical_cores()
    source = HostLogits(native.RowSampler(os.environ.get("VERBATIM_ISA", ""), threads))
    sampler = NativeSampler(native, source)

    def wrap(logits: np.ndarray) -> LogitRows:
        source.rows = np.ascontiguousarray(logits)
        return sampler

    return wrap


class HostLogits:
    """The part of the native engine's interface that NativeSampler uses, over logits copied from
    the GPU."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.rows = np.zeros((0, 0), np.float32)

    def logits(self) -> np.ndarray:
        return self.rows

    def sample(self, native_rows: list[object], first: int = 0) -> object:
        return self._sampler.draw(self.rows[first : first + len(native_rows)], native_rows)
