"""Sample on the host the rows that the device does not sample.

In: rows of logits that were copied from the GPU. Out: one Drawn per row.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from verbatim.base.config import EngineConfig
from verbatim.base.records import Drawn
from verbatim.sampling.pipeline import Row, sample_rows


def host_sampler(config: EngineConfig) -> Any:
    """The native sampler if it is built, else sampling/pipeline.py."""
    try:
        from verbatim.backend.cpu.backend import native, physical_cores
        from verbatim.backend.cpu.sampler import NativeSampler
    except ImportError:
        return sample_rows
    threads = config.threads or physical_cores()
    source = HostLogits(native.RowSampler(os.environ.get("VERBATIM_ISA", ""), threads))
    sampler = NativeSampler(native, source)

    def draw(logits: np.ndarray, rows: Sequence[Row]) -> list[Drawn]:
        source.rows = np.ascontiguousarray(logits)
        return sampler.draw(rows)

    return draw


class HostLogits:
    """The part of the native engine's interface that NativeSampler uses, over logits copied from
    the GPU."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.rows = np.zeros((0, 0), np.float32)

    def logits(self) -> np.ndarray:
        return self.rows

    def sample(self, native_rows: list[Any]) -> Any:
        return self._sampler.draw(self.rows, native_rows)
