"""KV cache memory of the attention layers on the device, in each of its element types.

In: a ModelSpec, a cache group, a kv_type and a number of blocks. Out: tensors whose second index is
the block: keys and values [layers, blocks, KV heads, positions, head size], and for q8 their scales
without the last axis. KvLayer is one layer of them, as the kernels read and write it. f16 is
float16 whatever the type of the weights is; 8-bit codes become float16 when they are read.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from verbatim.base.records import CacheGroup
from verbatim.model.spec import ModelSpec

DTYPES = {"f16": torch.float16, "q8": torch.int8, "fp8": torch.uint8}
TYPES = {dtype: kv_type for kv_type, dtype in DTYPES.items()}


class KvLayer(NamedTuple):
    keys: torch.Tensor  # [blocks, KV heads, positions of a block, head size]
    values: torch.Tensor
    key_scales: torch.Tensor | None = None  # q8: float32 [blocks, KV heads, positions of a block]
    value_scales: torch.Tensor | None = None

    @property
    def kind(self) -> str:
        """The constant KV of the kernels (jit_kv.py)."""
        kv_type = TYPES[self.keys.dtype]
        return "fp8_bits" if kv_type == "fp8" and not has_e4m3(self.keys.device) else kv_type

    def scales(self, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales of keys and values; `unused` for types that have none."""
        if self.key_scales is None or self.value_scales is None:
            return unused, unused
        return self.key_scales, self.value_scales

    def one_block(self) -> KvLayer:
        """Memory of one block, to write what no kernel reads."""
        return KvLayer(*(torch.empty_like(part[:1]) for part in self if part is not None))


@functools.cache
def has_e4m3(device: torch.device) -> bool:
    """Whether the GPU converts e4m3 itself: Ada, Hopper and later."""
    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device) >= (8, 9))


def layer_bytes(spec: ModelSpec, layer: int, kv_type: str, positions: int) -> int:
    """Bytes of the keys and values of one layer."""
    heads, dim = spec.kv_shape(layer)
    scale = 4 if kv_type == "q8" else 0
    return positions * 2 * heads * (dim * int(DTYPES[kv_type].itemsize) + scale)


def empty_kv(
    spec: ModelSpec, group: CacheGroup, kv_type: str, blocks: int, size: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Zeros: keys and values, and for q8 the scales of both."""
    heads, dim = spec.kv_shape(group.layers[0])
    shape, dtype = (len(group.layers), blocks, heads, size), DTYPES[kv_type]
    found = [torch.zeros((*shape, dim), dtype=dtype, device=device) for _ in range(2)]
    if kv_type == "q8":
        found += [torch.zeros(shape, dtype=torch.float32, device=device) for _ in range(2)]
    return tuple(found)
