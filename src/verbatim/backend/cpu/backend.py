"""CpuBackend: StepPlan -> StepResult on the native kernels, with one native call per step.

The model's forward pass is recorded once, when the backend is opened (ops.py). A step passes the
plan's sequences to C++, which checks every index, runs the recorded operations in its thread pool
without the GIL, and keeps logits and final states in buffers that Python reads without a copy.
"""

from __future__ import annotations

import mmap
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from verbatim.backend.cpu.ops import record
from verbatim.backend.cpu.repack import memory_bytes
from verbatim.backend.cpu.sampler import NativeSampler
from verbatim.backend.protocol import BackendInfo, activation_type, kv_numerics
from verbatim.backend.ranks import Ranks
from verbatim.backend.step_rows import collect, draft_states, only_draws, split_draws
from verbatim.base.config import BLOCK_SIZE, EngineConfig
from verbatim.base.errors import BackendError
from verbatim.base.records import StepPlan, StepResult
from verbatim.model.layout import is_expert, parameters
from verbatim.model.loading.load import Model
from verbatim.sampling.pipeline import rows_of

native: Any = import_module("verbatim.backend.cpu._native")

NUMERICS_VERSION = "cpu-2"


def unsupported(model: Model) -> str | None:
    """The reason why the native kernels cannot run this model; None if they can."""
    spec = model.spec
    for kv_heads, head_dim in {spec.kv_shape(i) for i in range(len(spec.layers))}:
        if spec.heads % kv_heads or spec.heads // kv_heads > 64:
            return f"{spec.heads} query heads over {kv_heads} key heads"
        if head_dim > 1024 or head_dim % 2:
            return f"heads of {head_dim}"
    return None


class CpuBackend:
    block_size = BLOCK_SIZE
    launcher = chains = None

    def __init__(
        self,
        model: Model,
        config: EngineConfig | None = None,
        *,
        note: str = "",
        target: CpuBackend | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`target`: the backend of the model that a draft layer drafts for. They share threads,
        embedding and head. `ranks`: this is one rank of a group, and `model` its part."""
        config = config or EngineConfig()
        self._note = note
        if reason := unsupported(model):
            raise BackendError(
                f"the cpu backend cannot run this model: {reason}; use backend='reference'"
            )
        self.spec = spec = model.spec
        self.config = config
        self._model, self._ranks = model, ranks
        whole = spec if ranks is None else ranks.split.spec
        self._fine = activation_type(config.activations, parameters(whole)) == "int12"
        try:
            self._engine: Any = native.Engine(
                isa=os.environ.get("VERBATIM_ISA", ""),
                threads=config.threads or physical_cores(),
                vocab=spec.vocab,
                hidden=spec.hidden,
                heads=spec.heads,
                kv_heads=spec.kv_heads,
                head_dim=spec.head_dim,
                activation=spec.activation,
                layer_norm=spec.norm == "layer",
                eps=spec.norm_eps,
                kv_type=config.kv_type,
                fine=self._fine,
                target=None if target is None else target._engine,
                mesh=None if ranks is None else ranks.mesh,
            )
            shared = {} if target is None else self._share(model, target)
            self._matrices = record(model, self._engine, shared, ranks)
        except ValueError as error:
            raise BackendError(str(error)) from None
        _drop_file_pages(model)
        self._sampler = NativeSampler(native, self._engine)
        self._weight_bytes = int(self._engine.weight_bytes) - _unread_bytes(model)
        self._expert_bytes = sum(memory_bytes(w) for n, w in model.weights.items() if is_expert(n))

    @property
    def info(self) -> BackendInfo:
        sizes = zip(self.spec.groups, self._engine.block_bytes(), strict=True)
        kv = sum(size for group, size in sizes if group.kind == "attention") // BLOCK_SIZE
        version = f"{NUMERICS_VERSION}-int12" if self._fine else NUMERICS_VERSION
        numerics = kv_numerics(version, self.config.kv_type)
        engine = self._engine
        return BackendInfo(
            "cpu",
            engine.isa,
            engine.threads,
            numerics,
            self._weight_bytes,
            kv,
            self._note,
            self._expert_bytes,
        )

    def draft_layer(self, model: Model) -> CpuBackend:
        return CpuBackend(model, self.config, target=self)

    def _share(self, model: Model, target: CpuBackend) -> dict[str, int]:
        """Numbers of the matrices that a draft layer has in common with its target. An assistant
        reads the target's KV cache, too."""
        if self.spec.assistant is not None:
            self._engine.read_cache_of(target._engine)
        return {
            name: self._engine.share(target._engine, number)
            for name, number in target._matrices.items()
            if name in ("embed", "head") and model.weights.get(name) is target._model.weights[name]
        }

    def available_memory(self) -> None:
        return None  # the KV cache is in main memory

    def block_bytes(self) -> tuple[int, ...]:
        return tuple(self._engine.block_bytes())

    def allocate(self, blocks: tuple[int, ...]) -> None:
        self._engine.allocate(list(blocks))

    def read_block(self, group: int, block: int) -> bytes:
        data: bytes = self._engine.read_block(group, block)
        return data

    def write_block(self, group: int, block: int, data: bytes) -> None:
        self._engine.write_block(group, block, data)

    def execute(self, plan: StepPlan) -> StepResult:
        for group, source, target in plan.copies:
            self._engine.copy(group, source, target)
        if (states := draft_states(plan)) is not None or self.spec.dflash is not None:
            self._engine.states(np.ravel(np.zeros(0, np.float32) if states is None else states))
        frame = b"" if self._ranks is None else self._ranks.step_frame(plan)
        self._engine.step(plan.sequences, frame)
        if self._ranks is not None and self._ranks.rank:
            return StepResult(plan.step, ())  # rank 0 has the logits
        if not only_draws(plan):
            captured = self._engine.captured() if self._model.captured else None
            return collect(plan, self._engine.hidden(), self._sampler, captured)
        # sample all sequences in one native call
        rows = [row for s in plan.sequences for row in rows_of(s)]
        return split_draws(plan, self._sampler.draw(rows))

    def close(self) -> None:
        self._engine = None
        self._sampler = None  # type: ignore[assignment]


def _unread_bytes(model: Model) -> int:
    """Adapters, and without a tied head the embedding, of which a token reads one row only."""
    embed = None if model.spec.tied else model.weights.get("embed")
    adapters = sum(adapter.nbytes for adapter in model.adapters)
    return adapters + (0 if embed is None else int(embed.data.nbytes))


def physical_cores() -> int:
    """Cores that this process may use; hyper-threads of one core count once."""
    allowed = (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )
    cores = set()
    for cpu in allowed:
        try:
            topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
            cores.add((topology / "thread_siblings_list").read_text())
        except OSError:
            return max(1, len(allowed))
    return max(1, len(cores))


def _drop_file_pages(model: Model) -> None:
    """Release the mapped model file's resident pages: packing has copied them. The mapping stays
    valid."""
    seen: set[int] = set()
    for tensor in model.weights.values():
        base: object = tensor.data
        while isinstance(base, np.ndarray) and base.base is not None:
            base = base.base
        if isinstance(base, memoryview):
            base = base.obj
        if isinstance(base, mmap.mmap) and id(base) not in seen and hasattr(mmap, "MADV_DONTNEED"):
            seen.add(id(base))
            base.madvise(mmap.MADV_DONTNEED)
