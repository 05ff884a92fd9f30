"""Select the GPU of the cuda backend, and run a test kernel on it.

Out: the device, or its description, or a BackendError with the reason and the remedy. Used by the
backend, by `backend=auto`, by `doctor` and by `make test-gpu`.
"""

from __future__ import annotations

import os
from functools import cache

import numpy as np
import torch

from verbatim.backend import gpu
from verbatim.backend.cuda.kernels import kernels
from verbatim.base.errors import BackendError

TEST_ROWS = (1, 257)  # the smallest and the largest tile of the matmul


def device() -> torch.device:
    """The GPU; for tests the CPU, if Triton interprets its kernels (TRITON_INTERPRET=1)."""
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
    """Why PyTorch cannot use the GPU that is present. Usually its driver is too old."""
    reason = gpu.missing()
    if reason is not None:
        return reason
    try:
        torch.cuda.init()
    except Exception as error:
        return f"PyTorch cannot use the GPU: {first_line(error)}"
    return "PyTorch cannot use the GPU and gives no reason"


@cache
def kernel_ran() -> str:
    """Multiply small integers with the matmul kernel, in its smallest and its largest tile.

    All products and sums are small integers, so the result must be exact. A kernel that cannot be
    compiled or launched on this GPU fails here, before any weight is loaded. Returns a description
    of the GPU."""
    target = device()
    try:
        for rows in TEST_ROWS:
            random = np.random.default_rng(rows)
            x, weight = random.integers(-4, 5, (rows, 256)), random.integers(-4, 5, (128, 256))
            given = [torch.from_numpy(a.astype(np.float16)).to(target) for a in (x, weight)]
            result = kernels.reduce_splits(kernels.matmul(*given)).cpu().numpy()
            if not np.array_equal(result, (x @ weight.T).astype(np.float32)):
                raise gpu.WrongResult("a test kernel ran on the GPU and its result is wrong")
        return describe(target)
    except BackendError:
        raise
    except torch.OutOfMemoryError:
        raise BackendError("the GPU has no free memory; stop other processes that use it") from None
    except (
        Exception
    ) as error:  # PyTorch, Triton, the C compiler and the driver raise different types
        raise BackendError(f"a test kernel did not run on the GPU: {first_line(error)}") from None


def describe(target: torch.device) -> str:
    if target.type != "cuda":
        return "Triton's interpreter"
    major, minor = torch.cuda.get_device_capability(target)
    free, total = torch.cuda.mem_get_info(target)
    name = torch.cuda.get_device_name(target)
    return f"{name} (sm{major}{minor}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free)"


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to the device without waiting for it. From memory that is not pinned, the
    driver may wait for all launched kernels first.

    PyTorch does not reuse the pinned memory before the copy is done."""
    given = torch.from_numpy(array)
    if device.type != "cuda":
        return given
    pinned = torch.empty(given.shape, dtype=given.dtype, pin_memory=True)
    pinned.numpy()[...] = array
    return pinned.to(device, non_blocking=True)
