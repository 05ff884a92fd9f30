"""Limits of the GPU for `verbatim plan --device this`: read bandwidth, half-precision peak, memory.

In: nothing. Out: GpuLimits. The best of several passes counts: other work can only slow a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from verbatim.backend.cuda.runtime.device import device

BUFFER = 4 << 30  # bytes; on an H200 1 GiB reads at 93 % of the rate of 4 GiB
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
    size = min(BUFFER, int(torch.cuda.mem_get_info(target)[0]) // 4)
    buffer = torch.ones(size // 4, dtype=torch.float32, device=target)
    # Random values: a product of constants draws less power and runs faster than any model.
    matrix = torch.randn((SIDE, SIDE), dtype=torch.bfloat16, device=target)
    read = size / _best(lambda: buffer.sum())
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
    return float(min(times))
