"""Compile the kernels of a model before its first request.

In: a CudaBackend with an allocated KV cache. Triton compiles a kernel at its first launch, for one
second or more, and keeps it on disk. A matmul has another tile for other numbers of rows, so
without this a compile could interrupt a running crowd at any prompt length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from verbatim.backend.cuda import kernels
from verbatim.backend.cuda.matmul_tile import all_tiles
from verbatim.backend.cuda.step_inputs import OUTPUTS, PaddedInputs, StepShape
from verbatim.backend.gpu_layout import split_k

if TYPE_CHECKING:
    from verbatim.backend.cuda.backend import CudaBackend

# rows and spans of steps whose attention is split over programs, and merged in one
STEPS = ((32, 2), (4096, 1))


def compile_kernels(backend: CudaBackend) -> None:
    """Launch every tile of the matmuls, and steps of padding rows."""
    launched = set()
    activation = backend.spec.activation if backend.spec.gated else None
    for weight in backend.matrices():
        n, k = weight.shape
        splits, _ = split_k(n, k)
        if (weight.dtype, splits) in launched:  # one compiled kernel serves all such weights
            continue
        launched.add((weight.dtype, splits))
        for tile in all_tiles(splits, kernels.has_tma(weight)):
            x = torch.zeros((tile.rows, k), dtype=weight.dtype, device=weight.device)
            kernels.matmul(x, weight, tile=tile)
            if activation is not None and kernels.can_fuse(weight, activation):
                kernels.gated_matmul(x, weight, activation, weight.dtype, tile)
    for rows, spans in STEPS:
        shape = StepShape(rows, OUTPUTS[0], max(4, rows // 32), spans)
        inputs = PaddedInputs(shape, backend.padding_blocks, backend.spec, backend.device)
        inputs.fill(None, {})
        backend.compute(inputs.step)
    if backend.device.type == "cuda":
        torch.cuda.synchronize()
