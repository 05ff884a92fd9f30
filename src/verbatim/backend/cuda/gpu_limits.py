"""Limits of the GPU for `verbatim plan --device this`: read bandwidth, half-precision peak, memory.

In: nothing. Out: GpuLimits. The best of several passes counts, because interruptions are no limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from verbatim.backend.cuda.device import device

BUFFER = 1 << 30  # bytes; far above every L2 cache, so that a pass reads memory
SIDE = 8192  # rows and columns of the matrices whose product measures the peak
REPEATS = 10


@dataclass(frozen=True, slots=True)
class GpuLimits:
    name: str
    read_bytes: float  # per second
    ops: float  # multiplications and additions per second
    memory: int  # bytes


def measure_gpu() -> GpuLimits:
    target = device()
    buffer = torch.ones(BUFFER // 4, dtype=torch.float32, device=target)
    matrix = torch.ones((SIDE, SIDE), dtype=torch.bfloat16, device=target)
    read = BUFFER / _best(lambda: buffer.sum())
    ops = 2 * SIDE**3 / _best(lambda: matrix @ matrix)
    properties = torch.cuda.get_device_properties(target)
    return GpuLimits(properties.name, read, ops, int(properties.total_memory))


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of REPEATS passes, after one to warm up."""
    work()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times)
