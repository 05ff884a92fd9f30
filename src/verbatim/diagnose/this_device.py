"""The limits of this machine for `plan --device this`: a GPU if the cuda backend can use one, else
the CPU.

The CPU's limits are those that `verbatim bench` saved. They are measured by the same probe where it
saved none, or where a run was faster than they allow. A GPU's limits are measured each time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from verbatim.backend import gpu
from verbatim.diagnose.devices import Device, device_of
from verbatim.observe.roofline import load_limits, refresh_limits


def this_device(cache: Path, note: Callable[[str], None] = lambda text: None) -> Device:
    if gpu.present():
        reason = gpu.missing()
        if reason is None:
            found: Device = gpu_device()
            return found
        note(f"note: this machine has a GPU, but {reason}; the plan is for the CPU")
    limits = load_limits(cache)
    if limits is None or limits.beaten:
        limits = refresh_limits(cache, _threads(), note)
    return device_of(limits, _memory())


def gpu_device() -> Device:
    """The first GPU, measured by the cuda backend (the only package that imports PyTorch)."""
    limits = import_module("verbatim.backend.cuda.runtime.gpu_limits").measure_gpu()
    return Device(
        limits.name, limits.read_bytes, limits.ops, limits.memory, kind="measured", cuda=True
    )


def _threads() -> int:
    try:
        cores: int = import_module("verbatim.backend.cpu.backend").physical_cores()
    except ImportError:  # the native module is not built
        return os.cpu_count() or 1
    return cores


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        return None
