"""KV cache memory of the attention layers on the device, in each of its element types.

In: a ModelSpec, a kv_type and a number of blocks. Out: tensors whose second index is the block:
keys and values [layers, blocks, KV heads, positions, head size], and for q8 their scales without
the last axis. KvLayer is one layer of them, as the kernels read and write it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from verbatim.model.spec import ModelSpec

DTYPES = {"f16": torch.float16, "q8": torch.int8, "fp8": torch.uint8}


class KvLayer(NamedTuple):
    keys: torch.Tensor  # [blocks, KV heads, positions of a block, head size]
    values: torch.Tensor
    key_scales: torch.Tensor | None = None  # q8: float32 [blocks, KV heads, positions of a block]
    value_scales: torch.Tensor | None = None

    @property
    def kind(self) -> str:
        """The constant KV of the kernels (jit_kv.py)."""
        kv_type = next(name for name, dtype in DTYPES.items() if dtype == self.keys.dtype)
        return "fp8_bits" if kv_type == "fp8" and not has_e4m3(self.keys.device) else kv_type


@functools.cache
def has_e4m3(device: torch.device) -> bool:
    """Whether the GPU converts e4m3 itself: Ada, Hopper and later."""
    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device) >= (8, 9))


def layer_bytes(spec: ModelSpec, kv_type: str, positions: int) -> int:
    """Bytes of the keys and values of one layer."""
    scales = 4 * 2 * spec.kv_heads if kv_type == "q8" else 0
    return positions * (spec.kv_values * int(DTYPES[kv_type].itemsize) + scales)


def empty_kv(
    spec: ModelSpec, kv_type: str, layers: int, blocks: int, size: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Zeros: keys and values, and for q8 the scales of both."""
    shape = (layers, blocks, spec.kv_heads, size)
    dtype = DTYPES[kv_type]
    found = [torch.zeros((*shape, spec.head_dim), dtype=dtype, device=device) for _ in range(2)]
    if kv_type == "q8":
        found += [torch.zeros(shape, dtype=torch.float32, device=device) for _ in range(2)]
    return tuple(found)
