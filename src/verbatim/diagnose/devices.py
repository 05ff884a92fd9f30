"""Devices that `verbatim plan` knows: memory bandwidth, peak of the matrix units, memory size.

In: a name, `this`, or "GB/s,TFLOPS[,GB]". Out: a Device. The numbers of the table are those of the
vendors' data sheets: dense half precision with float32 accumulation, without sparsity.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from verbatim.base.errors import ParameterError
from verbatim.observe.roofline import MachineLimits


@dataclass(frozen=True, slots=True)
class Device:
    """Limits of one device, or of `count` equal ones that share every matrix (tensor
    parallelism)."""

    name: str
    read_bytes: float  # bytes per second
    ops: float | None  # multiplications and additions per second; None: unknown
    memory: float | None  # bytes; None: unknown
    count: int = 1
    kind: str = "data sheet"  # where the numbers come from
    unit: str = "FLOPS"  # unit of the peak: FLOPS (half precision) or int8 OPS
    cuda: bool = False  # a GPU of the cuda backend, which keeps weights in its own layout

    @property
    def hopper(self) -> bool:
        """A GPU that multiplies FP8 checkpoints as codes (ADR 36)."""
        return self.cuda and re.search(r"\bG?H\d{2,3}\b", self.name) is not None

    @property
    def ridge(self) -> float | None:
        """Operations per byte at which memory and matrix units take the same time."""
        return None if self.ops is None else self.ops / self.read_bytes

    @property
    def estimated(self) -> bool:
        """Whether the limits are those of a probe, which a busy machine lowers."""
        return self.kind.startswith("measured")

    def times(self, count: int) -> Device:
        """`count` devices as one: the sum of their limits, without any cost of communication."""
        return replace(
            self,
            read_bytes=self.read_bytes * count,
            ops=None if self.ops is None else self.ops * count,
            memory=None if self.memory is None else self.memory * count,
            count=count,
        )


# name -> GB/s, TFLOPS, GB
DEVICES = {
    "h200": Device("H200 SXM", 4800e9, 989e12, 141e9, cuda=True),
    "h100": Device("H100 SXM", 3350e9, 989e12, 80e9, cuda=True),
    "a100": Device("A100 SXM 80 GB", 2039e9, 312e12, 80e9, cuda=True),
    "a10": Device("A10", 600e9, 125e12, 24e9, cuda=True),
    "l4": Device("L4", 300e9, 121e12, 24e9, cuda=True),
    "4090": Device("RTX 4090", 1008e9, 165e12, 24e9, cuda=True),
}
THIS = "this"


def parse_device(text: str) -> Device:
    """A device of the table, or one from numbers: "3350,989" or "3350,989,80"."""
    if text.lower() in DEVICES:
        return DEVICES[text.lower()]
    known = f"one of {', '.join(DEVICES)}, {THIS}, or GB/s,TFLOPS[,GB] such as 2039,312,80"
    parts = text.split(",")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        raise ParameterError("device", f"{text!r:.60} is not {known}") from None
    if len(numbers) not in (2, 3) or not all(0 < n < math.inf for n in numbers):
        raise ParameterError("device", f"{text!r:.60} is not {known}")
    memory = numbers[2] * 1e9 if len(numbers) == 3 else None
    return Device(f"{text} device", numbers[0] * 1e9, numbers[1] * 1e12, memory, kind="given")


def _day(when: float) -> str:
    """' 2026-11-16', in UTC; empty if the time is not known."""
    return f" {datetime.fromtimestamp(when, UTC):%Y-%m-%d}" if when else ""


def device_of(limits: MachineLimits, memory: int | None) -> Device:
    """This machine's CPU. Its peak is that of int8 products, which the cpu kernels use."""
    return Device(
        f"this machine, {limits.threads} thread{'s' if limits.threads > 1 else ''}",
        limits.read_bytes,
        limits.int8_ops,
        memory,
        kind=f"measured{_day(limits.when)}, {limits.method}",
        unit="int8 OPS",
    )
