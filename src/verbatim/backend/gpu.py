"""Is an NVIDIA GPU here, and are PyTorch and Triton installed for it? Answered without importing either.

`backend=auto` asks this at every start, and PyTorch alone takes seconds to import. So the first question
is a look at the driver's device files, and a machine without a GPU never gets to the second one. Whether a
kernel runs on the GPU is a third question: backend/cuda/check.py runs one.
"""

from __future__ import annotations

import os
import runpy
from importlib.util import find_spec
from pathlib import Path

from verbatim.base.errors import BackendError

DEVICES = Path("/dev")
WSL_DRIVER = Path("/usr/lib/wsl/lib/libcuda.so.1")
EXTRA = "install verbatim-engine[cuda]"


class WrongResult(BackendError):
    """A kernel ran on the GPU and its result is wrong: the GPU, its driver or the compiler is broken."""


def present() -> bool:
    """The NVIDIA driver shows a GPU to this process. CUDA_VISIBLE_DEVICES="" or -1 hides all of them."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None and shown.split(",")[0].strip() in ("", "-1"):
        return False
    if any(DEVICES.glob("nvidia[0-9]*")):
        return True
    return (DEVICES / "dxg").exists() and WSL_DRIVER.exists()  # Windows Subsystem for Linux


def missing() -> str | None:
    """What the cuda backend lacks in this Python installation, with the remedy; None: nothing."""
    packages = (("PyTorch", "torch"), ("Triton", "triton"))
    absent = [name for name, module in packages if find_spec(module) is None]
    if absent:
        verb = "are" if len(absent) > 1 else "is"
        return f"{' and '.join(absent)} {verb} not installed; {EXTRA}"
    if cpu_only():
        return (
            f"the installed PyTorch is a build without CUDA; {EXTRA} with a CUDA build of PyTorch"
        )
    return None


def cpu_only() -> bool:
    """PyTorch's own version file says that it was built without CUDA. It is a file of constants."""
    found = find_spec("torch")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        try:
            return runpy.run_path(str(Path(folder, "version.py"))).get("cuda", "") is None
        except Exception:  # another layout: importing PyTorch will tell
            return False
    return False


def hidden_or_absent() -> str:
    """Why present() is False, in words."""
    if any(DEVICES.glob("nvidia[0-9]*")):
        return "CUDA_VISIBLE_DEVICES hides the NVIDIA GPUs of this machine"
    return "this machine has no NVIDIA GPU, or its driver is not installed"
