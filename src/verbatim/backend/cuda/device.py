"""The GPU that the cuda backend runs on, and a test kernel that shows that it does.

Out: a device, or its description, or a BackendError whose text is the reason, with the remedy. Asked by the
backend itself, `backend=auto`, `doctor` and `make test-gpu`.
"""

from __future__ import annotations

import os
from functools import cache

import numpy as np
import torch

from verbatim.backend import gpu
from verbatim.backend.cuda import kernels
from verbatim.base.errors import BackendError

ROWS = (1, kernels.MANY + 1)  # one row, and the fewest that use the product's largest tile


def device() -> torch.device:
    """The GPU; the CPU where Triton interprets its kernels (TRITON_INTERPRET=1), which is for tests."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    if not gpu.present():
        raise BackendError(
            "the cuda backend finds no NVIDIA GPU that PyTorch can use; use the backend cpu"
        )
    raise BackendError(why_unavailable())


def why_unavailable() -> str:
    """There is a GPU and PyTorch does not see it. Most often the driver is too old for this PyTorch."""
    reason = gpu.missing()
    if reason is not None:
        return reason
    try:
        torch.cuda.init()
    except Exception as error:
        return f"PyTorch cannot use the GPU: {first_line(error)}"
    return "PyTorch cannot use the GPU, and does not say why"


@cache
def kernel_ran() -> str:
    """Multiply small integers with the backend's own kernel, in its smallest and its largest tile.

    Every product and sum is a small integer, so the only right result is the exact one. A kernel that cannot
    be compiled or launched on this GPU fails here, before any weight is loaded. Returns the GPU in words."""
    on = device()
    try:
        for rows in ROWS:
            random = np.random.default_rng(rows)
            x, weight = random.integers(-4, 5, (rows, 256)), random.integers(-4, 5, (128, 256))
            given = [torch.from_numpy(a.astype(np.float16)).to(on) for a in (x, weight)]
            found = kernels.whole(kernels.product(*given)).cpu().numpy()
            if not np.array_equal(found, (x @ weight.T).astype(np.float32)):
                raise gpu.WrongResult("a test kernel ran on the GPU and its result is wrong")
        return described(on)
    except BackendError:
        raise
    except torch.OutOfMemoryError:
        raise BackendError("the GPU has no free memory; end what else uses it") from None
    except Exception as error:  # of PyTorch, Triton, a C compiler or the driver: each has its own
        raise BackendError(f"a test kernel did not run on the GPU: {first_line(error)}") from None


def described(on: torch.device) -> str:
    if on.type != "cuda":
        return "Triton's interpreter"
    major, minor = torch.cuda.get_device_capability(on)
    free, total = torch.cuda.mem_get_info(on)
    name = torch.cuda.get_device_name(on)
    return f"{name} (sm{major}{minor}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free)"


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
