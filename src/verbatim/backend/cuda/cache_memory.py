"""CacheMemory: the KV cache and the recurrent states on the device, in blocks.

In: how many blocks each cache group gets. Out: one tuple of tensors per group, whose second
dimension are the blocks; one more than the scheduler knows, for padding rows.
"""

from __future__ import annotations

import torch

from verbatim.backend.cuda.kernels import recurrent
from verbatim.backend.cuda.kernels.kv_cache import empty_kv, layer_bytes
from verbatim.base.config import BLOCK_SIZE
from verbatim.base.errors import OUT_OF_MEMORY, DeviceMemoryError
from verbatim.base.records import CacheGroup
from verbatim.model.spec import ModelSpec


class CacheMemory:
    def __init__(self, spec: ModelSpec, kv_type: str, device: torch.device) -> None:
        self._spec, self._kv_type, self._device = spec, kv_type, device
        self.caches: tuple[tuple[torch.Tensor, ...], ...] = ()

    def position_bytes(self) -> int:
        """Bytes of the keys and values of one position."""
        return sum(
            len(g.layers) * layer_bytes(self._spec, g.layers[0], self._kv_type, 1)
            for g in self._spec.groups
            if g.kind == "attention"
        )

    def block_bytes(self) -> tuple[int, ...]:
        return tuple(len(g.layers) * self._layer_bytes(g) for g in self._spec.groups)

    def _layer_bytes(self, group: CacheGroup) -> int:
        """Bytes of one layer in a block of the group."""
        if group.kind == "attention":
            return layer_bytes(self._spec, group.layers[0], self._kv_type, BLOCK_SIZE)
        return 4 * self._spec.block_values(group, BLOCK_SIZE)

    def allocate(self, blocks: tuple[int, ...]) -> None:
        assert not self.caches, "allocate is called once"
        try:
            self.caches = tuple(
                self._group_cache(group, n + 1)
                for group, n in zip(self._spec.groups, blocks, strict=True)
            )
        except torch.OutOfMemoryError:
            sizes = zip(blocks, self.block_bytes(), strict=True)
            needed = sum(count * size for count, size in sizes) / 1e9
            raise DeviceMemoryError(
                f"{OUT_OF_MEMORY}the KV cache of {needed:.1f} GB does not fit; lower kv_memory or "
                "context"
            ) from None

    def _group_cache(self, group: CacheGroup, blocks: int) -> tuple[torch.Tensor, ...]:
        if group.kind == "attention":
            kv_type, size = self._kv_type, BLOCK_SIZE
            return empty_kv(self._spec, group, kv_type, blocks, size, self._device)
        return recurrent.empty_caches(self._spec, group, blocks, BLOCK_SIZE, self._device)

    def read_block(self, group: int, block: int) -> bytes:
        parts = [cache[:, block] for cache in self.caches[group]]
        return b"".join(part.contiguous().cpu().numpy().tobytes() for part in parts)

    def write_block(self, group: int, block: int, data: bytes) -> None:
        if len(data) != self.block_bytes()[group]:
            raise ValueError(f"{len(data)} bytes are not a block of group {group}")
        start = 0
        for cache in self.caches[group]:
            part = cache[:, block]
            count = part.numel()
            stored = torch.frombuffer(bytearray(data), dtype=part.dtype, count=count, offset=start)
            cache[:, block] = stored.view(part.shape).to(self._device)
            start += count * part.element_size()

    def copy(self, group: int, source: int, target: int) -> None:
        for cache in self.caches[group]:
            cache[:, target] = cache[:, source]
