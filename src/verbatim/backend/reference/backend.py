"""ReferenceBackend: StepPlan -> StepResult in NumPy, in float32, with a real paged KV cache.

Invariant: a row's bits do not depend on the batch. A matmul with a weight is one matrix-vector
product per row, so its shape never depends on the batch; attention gathers exactly the positions
that the row attends to. Nothing is tiled over rows.

Memory: every weight that was used stays in float32 (4 bytes per parameter: 0.54 GB for the default
model). The KV cache is float32, too: with kv_type q8 or fp8 it holds the rounded values of that
type (kv_types.py), with f16 it does not round, and info.detail says so.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbatim.backend.protocol import BackendInfo, kv_numerics
from verbatim.backend.reference.blas import one_thread
from verbatim.backend.reference.cache import GroupCache, empty_cache
from verbatim.backend.reference.canary import Canary
from verbatim.backend.reference.ops import FloatWeights, ReferenceOps, float_adapter
from verbatim.backend.step_rows import HostRows, collect, draft_states, make_batch
from verbatim.base.config import BLOCK_SIZE, EngineConfig
from verbatim.base.records import SeqResult, StepPlan, StepResult
from verbatim.model.decoder import forward, store_context
from verbatim.model.layout import is_expert, is_read_by_row
from verbatim.model.loading.load import Model

NUMERICS_VERSION = "reference-1"


class ReferenceBackend:
    """With config.check, a canary verifies every read of the KV cache (canary.py). `note` is
    info.note: why no faster backend is used."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig | None = None,
        *,
        block_size: int = BLOCK_SIZE,
        note: str = "",
        target: ReferenceBackend | None = None,
    ) -> None:
        """`target`: the backend whose KV cache an assistant reads."""
        self.spec = model.spec
        self._target = target
        self.launcher = self.chains = None
        self.block_size = block_size
        self.config = config or EngineConfig()
        self._note = note
        kv = "float32" if self.config.kv_type == "f16" else f"{self.config.kv_type} in float32"
        self._detail = f"numpy {np.__version__}, float32, KV cache {kv}"
        self._weights = FloatWeights(model.weights)
        self._adapters = tuple(float_adapter(adapter) for adapter in model.adapters)
        self._captured = model.captured
        self._caches: tuple[GroupCache, ...] | None = None
        self._canary: Canary | None = None

    @property
    def info(self) -> BackendInfo:
        kv = self.spec.kv_token_values * 4
        weights, tied = self._weights.source, self.spec.tied
        sizes = {name: int(np.prod(t.shape)) for name, t in weights.items()}
        read = sum(n for name, n in sizes.items() if not is_read_by_row(name, tied=tied))
        experts = sum(size for name, size in sizes.items() if is_expert(name))
        numerics = kv_numerics(NUMERICS_VERSION, self.config.kv_type)
        return BackendInfo(
            "reference", self._detail, 1, numerics, read * 4, kv, self._note, experts * 4
        )

    def draft_layer(self, model: Model) -> ReferenceBackend:
        target = None if model.spec.assistant is None else self
        return ReferenceBackend(model, self.config, block_size=self.block_size, target=target)

    def available_memory(self) -> None:
        return None  # the KV cache is in main memory

    def block_bytes(self) -> tuple[int, ...]:
        if self._target is not None:
            return ()
        return tuple(
            4 * len(group.layers) * self.spec.block_values(group, self.block_size)
            for group in self.spec.groups
        )

    def allocate(self, blocks: tuple[int, ...]) -> None:
        assert self._caches is None, "allocate is called once"
        if self._target is not None:
            self._caches = self._target._caches
            return
        groups = self.spec.groups
        assert len(blocks) == len(groups), "one count for each cache group"
        self._caches = tuple(
            empty_cache(self.spec, g, n, self.block_size)
            for g, n in zip(groups, blocks, strict=True)
        )
        if self.config.check:
            self._canary = Canary(groups, blocks, self.block_size)

    def read_block(self, group: int, block: int) -> bytes:
        return b"".join(part.tobytes() for part in self._block_parts(group, block))

    def write_block(self, group: int, block: int, data: bytes) -> None:
        parts = self._block_parts(group, block)
        if len(data) != sum(part.nbytes for part in parts):
            raise ValueError(f"{len(data)} bytes are not a block of group {group}")
        start = 0
        for part in parts:
            stored = np.frombuffer(data, part.dtype, part.size, start)
            part[...] = stored.reshape(part.shape)
            start += part.nbytes

    def _block_parts(self, group: int, block: int) -> list[NDArray[Any]]:
        """Views of everything that is kept per block: keys and values, or recurrent states, and the
        canary's stamps."""
        assert self._caches is not None, "allocate is called before the first block is read"
        cache = self._caches[group]
        parts: list[NDArray[Any]] = [
            getattr(cache, field.name)[:, block] for field in fields(cache)
        ]
        if self._canary is not None:
            parts += [self._canary.stamps[group][block], self._canary.tokens[group][block]]
        return parts

    def execute(self, plan: StepPlan) -> StepResult:
        assert self._caches is not None, "allocate is called before the first step"
        if self._canary is not None:
            self._canary.step(plan)
        for group, source, target in plan.copies:
            self._caches[group].copy(source, target)
        batch = replace(make_batch(plan, len(self._caches)), states=draft_states(plan))
        assert not batch.rows or 0 <= batch.tokens.min() <= batch.tokens.max() < self.spec.vocab, (
            "the engine checks token ids"
        )
        if not batch.rows:
            none = np.zeros((0, self.spec.vocab), np.float32)
            return collect(plan, np.zeros((0, self.spec.hidden), np.float32), HostRows(none))
        # exp(-x) may overflow to inf, and 1 / inf is the right 0. NaN is reported by the sampler.
        with one_thread(), np.errstate(over="ignore", under="ignore", invalid="ignore"):
            captured = self._captured if any(s.hidden for s in plan.sequences) else ()
            kv_type = self.config.kv_type
            ops = ReferenceOps(
                self.spec, self._weights, self._caches, batch, self._adapters, kv_type, captured
            )
            x = h = None
            if self.spec.draft_layer or self.spec.assistant is not None:
                x = ops.draft_input()
            elif self.spec.eagle is not None:
                x, h = ops.eagle_input(self.spec.eagle)
            elif self.spec.dflash is not None and batch.states is not None:
                store_context(self.spec, ops, ops.context_input())
                return StepResult(plan.step, tuple(SeqResult(s.seq_id) for s in plan.sequences))
            hidden, logits = forward(self.spec, ops, x, h, ops.capture)
        states = np.concatenate(ops.states, axis=1) if captured else None
        return collect(plan, hidden, HostRows(logits), states)

    def close(self) -> None:
        self._caches = None
        self._weights.clear()
