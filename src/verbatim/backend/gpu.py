"""Detect an NVIDIA GPU, and PyTorch and Triton, without importing either package.

`backend=auto` runs this detection at every start, and importing PyTorch alone takes seconds.
`present` therefore only looks for the driver's device files; `missing` looks for the packages.
Whether a kernel runs on the GPU is checked in backend/cuda/runtime/device.py.
"""

from __future__ import annotations

import os
import runpy
from importlib.util import find_spec
from pathlib import Path

from verbatim.base.errors import BackendError

DEVICES = Path("/dev")
# the driver that Windows Subsystem for Linux mounts; there the GPU is the device file /dev/dxg
WSL_DRIVER = Path("/usr/lib/wsl/lib/libcuda.so.1")
PIP = "pip install '.[cuda]' in the checkout"
EXTRA = f"install the extra 'cuda': {PIP}"


class WrongResult(BackendError):
    """A kernel's result is wrong: the GPU, its driver or the compiler is broken."""


def present() -> bool:
    """Whether the NVIDIA driver shows a GPU to this process.

    CUDA_VISIBLE_DEVICES="" or -1 hides all GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.split(",")[0].strip() in ("", "-1"):
        return False
    if any(DEVICES.glob("nvidia[0-9]*")):
        return True
    return (DEVICES / "dxg").exists() and WSL_DRIVER.exists()


def missing() -> str | None:
    """The packages that the cuda backend lacks, with the remedy; None if it lacks none."""
    packages = (("PyTorch", "torch"), ("Triton", "triton"))
    absent = [name for name, module in packages if find_spec(module) is None]
    if absent:
        verb = "are" if len(absent) > 1 else "is"
        return f"{' and '.join(absent)} {verb} not installed; {EXTRA}"
    if cpu_only():
        return (
            "the installed PyTorch is a build without CUDA; install a CUDA build of PyTorch, then"
            f" the extra 'cuda': {PIP}"
        )
    return None


def cpu_only() -> bool:
    """Whether PyTorch is a build without CUDA, read from its version.py, a file of constants."""
    found = find_spec("torch")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        try:
            return runpy.run_path(str(Path(folder, "version.py"))).get("cuda", "") is None
        except Exception:  # an unknown layout: importing PyTorch decides
            return False
    return False


def hidden_or_absent() -> str:
    """The reason, as text, why present() is False."""
    if any(DEVICES.glob("nvidia[0-9]*")):
        return "CUDA_VISIBLE_DEVICES hides the NVIDIA GPUs of this machine"
    return "this machine has no NVIDIA GPU, or its driver is not installed"
