"""Open the cuda backend, or say why it cannot be opened: no GPU, or too little memory."""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from verbatim.backend.cuda.backend import CudaBackend
from verbatim.backend.cuda.layer_backend import CudaDraftLayer
from verbatim.backend.cuda.runtime.device import device, kernel_ran
from verbatim.backend.gpu_weights import weight_bytes
from verbatim.base.config import EngineConfig
from verbatim.base.errors import BackendError
from verbatim.model.loading.load import Model

# bytes needed beside the weights: attention's buffer is 256 MiB; CUDA graphs, a small KV cache
RESERVED_BYTES = 512 << 20


def open_checked(model: Model, config: EngineConfig) -> CudaBackend:
    """Open a model on a GPU that runs a test kernel and has memory for the weights.

    Otherwise raise a BackendError with the reason; no GPU memory stays allocated."""
    kernel_ran()
    target, needed = device(), weight_bytes(model.weights) + RESERVED_BYTES
    # adapters are float32
    parts = [part for adapter in model.adapters for part in adapter.parts.values()]
    needed += 4 * sum(int(np.prod(t.shape)) for part in parts for t in (part.a, part.b))
    free = int(torch.cuda.mem_get_info(target)[0]) if target.type == "cuda" else needed
    if needed <= free:
        with contextlib.suppress(torch.OutOfMemoryError):
            return CudaBackend(model, config, open_layer=CudaDraftLayer)
        torch.cuda.empty_cache()
        raise BackendError(
            f"the model did not fit into the {free / 1e9:.1f} GB of GPU memory that were free when "
            "loading began; end other programs on this GPU, or choose a smaller model"
        )
    raise BackendError(
        f"the model needs {needed / 1e9:.1f} GB of GPU memory and {free / 1e9:.1f} GB are free; "
        "end other programs on this GPU, or choose a smaller model or the backend cpu"
    )
