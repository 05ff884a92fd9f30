"""Launch a Triton kernel with little work on the host.

In: a kernel, its grid, its arguments and its compile-time constants. A kernel called the usual way,
`kernel[grid](...)`, binds and classifies every argument in Python: 50 to 60 µs for a kernel of this
backend. Here the compiled variant is found by a key of the same facts (a tensor's type and whether
its address is a multiple of 16, whether an integer is 1 or a multiple of 16) and launched directly.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_compiled: dict[tuple[Any, ...], Any] = {}


@functools.cache
def has_dependent_launch() -> bool:
    """Whether a kernel can start before the one before it has ended: Hopper and newer GPUs."""
    return not INTERPRETED and torch.cuda.get_device_capability()[0] >= 9


@functools.cache
def unpacks_in_order() -> bool:
    """Whether a matmul that unpacks its weights adds like one with float16 weights: on Hopper. In
    the instructions of older GPUs Triton permutes inputs that it converts from 4 or 8 bits (kWidth
    4 or 8 in tests/backend/test_cuda_compiles.py); newer ones were not compared."""
    return INTERPRETED or torch.cuda.get_device_capability()[0] == 9


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    constants: tuple[object, ...],
    *,
    warps: int = 4,
    stages: int = 3,
    fuse: bool = False,
    dependent: int | None = None,
) -> None:
    """`fuse`: whether the compiler may fuse a multiplication and an addition. `dependent`: whether
    the kernel starts early (jit_matmul.wait_for_inputs); None: it has no constant DEPENDENT."""
    early = bool(dependent) and has_dependent_launch()
    if dependent is not None:
        constants = (*constants, int(dependent) if early else 0)
    if INTERPRETED:
        kernel[grid](*args, *constants)
        return
    # what Triton specialises a kernel on
    key = (
        kernel,
        constants,
        warps,
        stages,
        fuse,
        *[
            (arg.dtype, arg.data_ptr() % 16 == 0)
            if isinstance(arg, torch.Tensor)
            else (arg == 1, arg % 16 == 0, arg < 1 << 31)
            if isinstance(arg, int)
            else None
            if isinstance(arg, float)
            else (arg.base.dtype, *arg.block_shape)  # a tensor descriptor
            for arg in args
        ],
    )
    compiled = _compiled.get(key)
    if compiled is None:  # compile and launch the usual way
        _compiled[key] = kernel[grid](
            *args, *constants, num_warps=warps, num_stages=stages, enable_fp_fusion=fuse,
            **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    else:
        compiled[grid](*args, *constants)
