"""CudaBackend: StepPlan -> StepResult on a GPU, with PyTorch for memory and Triton for kernels.

Steps replay a CUDA graph: decode steps one per number of rows, steps with prompts one per shape to
which they are padded. Their integers go to the device in one copy. The device samples the rows
whose token it can prove (gpu_sampler.py). The host samples all others with the cpu backend's
sampler, so every parameter has the same meaning. `launcher` starts decode steps before the host has
read the tokens of the step before.
Without a GPU the backend opens only under TRITON_INTERPRET=1, Triton's interpreter, for tests.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable

import numpy as np
import torch
import triton

from verbatim.backend.cuda.cache_memory import CacheMemory
from verbatim.backend.cuda.device_weights import Weight, has_scaled, load_model, sizes
from verbatim.backend.cuda.kernels.lora import load_adapter
from verbatim.backend.cuda.ops import CudaOps, rope_tables
from verbatim.backend.cuda.runtime.device import device
from verbatim.backend.cuda.runtime.device_step import DeviceStep
from verbatim.backend.cuda.runtime.step_graphs import MAX_GRAPH_ROWS, StepGraphs
from verbatim.backend.cuda.sampler.row_draws import RowDraws
from verbatim.backend.cuda.step_launcher import CudaLauncher
from verbatim.backend.protocol import BackendInfo, DraftLayer, kv_numerics
from verbatim.backend.step_rows import HostRows, collect
from verbatim.base.config import BLOCK_SIZE, EngineConfig
from verbatim.base.errors import OUT_OF_MEMORY, DeviceMemoryError
from verbatim.base.records import StepPlan, StepResult
from verbatim.model.decoder import forward
from verbatim.model.loading.load import Model

NUMERICS_VERSION = "cuda-3"
SCALED_NUMERICS = "cuda-3-w8a8"  # with products of FP8 codes


class CudaBackend:
    """`weights`: tensors on the device in the layout of device_weights.load. bench/cuda.py passes
    random weights in shapes for which there is no file."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig | None = None,
        *,
        weights: dict[str, Weight] | None = None,
        open_layer: Callable[[Model, CudaBackend], DraftLayer] | None = None,
    ) -> None:
        config = config or EngineConfig(backend="cuda")
        self.spec, self.block_size, self.config = model.spec, BLOCK_SIZE, config
        self.device = device()
        if weights is None:
            memory = self.available_memory()
            weights = load_model(model, self.device, memory, config.activations)
        self.weights = weights
        # what a draft layer shares with its target, as the file has it
        self.shared = {name: model.weights.get(name) for name in ("embed", "head")}
        self.captured, self._open_layer = model.captured, open_layer
        self._adapters = tuple(load_adapter(a, model.spec, self.device) for a in model.adapters)
        self._angles = rope_tables(model.spec, model.spec.context, self.device)
        self._memory = CacheMemory(model.spec, config.kv_type, self.device)
        self._graphs = StepGraphs(model.spec, self.device)
        self._draws = RowDraws(model.spec.vocab, self.device, config)
        self.gpu_sampler = self._draws.gpu
        self._release_cached()  # what loading has freed is available to the KV cache

    @property
    def info(self) -> BackendInfo:
        read, experts = sizes(self.weights, tied=self.spec.tied)
        kv = self._memory.position_bytes()
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
            major, minor = torch.cuda.get_device_capability(self.device)
            arch = f"sm{major}{minor}"
        else:
            name, arch = "Triton's interpreter", "interpreted"
        version = SCALED_NUMERICS if has_scaled(self.weights) else NUMERICS_VERSION
        version = kv_numerics(version, self.config.kv_type)
        numerics = f"{version}, {arch}, triton {triton.__version__}, torch {torch.__version__}"
        return BackendInfo("cuda", name, 1, numerics, read, kv, expert_bytes=experts)

    def available_memory(self) -> int:
        if self.device.type != "cuda":
            return 1 << 30  # a fixed figure under Triton's interpreter
        return int(torch.cuda.mem_get_info(self.device)[0])

    def block_bytes(self) -> tuple[int, ...]:
        return self._memory.block_bytes()

    def allocate(self, blocks: tuple[int, ...]) -> None:
        self._memory.allocate(blocks)
        self._graphs.padding = blocks
        # Freeze the 190,000 objects of PyTorch and Triton: a full collection, during which no step
        # is launched, then takes less than a millisecond instead of 110
        gc.freeze()
        # frozen cycles stay alive at exit, and nanobind reports what they hold as leaked
        atexit.register(gc.unfreeze)

    def read_block(self, group: int, block: int) -> bytes:
        return self._memory.read_block(group, block)

    def write_block(self, group: int, block: int, data: bytes) -> None:
        self._memory.write_block(group, block, data)

    @property
    def padding_blocks(self) -> tuple[int, ...]:
        """Per cache group a block that no sequence owns."""
        return self._graphs.padding

    @property
    def has_adapters(self) -> bool:
        return bool(self._adapters)

    def compile_chains(self) -> bool:
        """Of a draft layer: launch what the drafts of one sequence and of some launch, in a block
        without an owner. False: this is none."""
        return False

    # ---- execute a step

    def draft_layer(self, model: Model) -> DraftLayer | None:
        if model.spec.assistant is not None or model.spec.dflash is not None:
            return None
        return None if self._open_layer is None else self._open_layer(model, self)

    @property
    def launcher(self) -> CudaLauncher | None:
        diffusion = self.spec.diffusion
        if diffusion is not None and not diffusion.causal:
            return None  # no step has a row per sequence
        skipped = self.spec.hidden if self.captured else 0
        return CudaLauncher(
            self._forward, self.gpu_sampler, MAX_GRAPH_ROWS, self.out_of_memory, skipped
        )

    def execute(self, plan: StepPlan) -> StepResult:
        try:
            return self._execute(plan)
        except torch.OutOfMemoryError:
            raise self.out_of_memory() from None

    def _execute(self, plan: StepPlan) -> StepResult:
        for copy in plan.copies:
            self._memory.copy(*copy)
        if not plan.rows:
            none = np.zeros((0, self.spec.vocab), np.float32)
            return collect(plan, np.zeros((0, self.spec.hidden), np.float32), HostRows(none))
        hidden, logits = self._forward(plan)
        if not any(s.targets for s in plan.sequences):
            return self._draws.of_plan(plan, logits, hidden, self.spec.hidden)
        if not any(s.hidden for s in plan.sequences):
            hidden = hidden[:0]
        hidden = hidden[:, : self.spec.hidden]
        return collect(plan, hidden.cpu().numpy(), self._draws.host_rows(logits.cpu().numpy()))

    def _forward(
        self, plan: StepPlan, tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._graphs.forward(self.compute, plan, tokens)

    def compute(self, step: DeviceStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Final states, with those of the captured layers beside them, and logits."""
        ops = self.ops(step)
        hidden, logits = forward(self.spec, ops, capture=ops.capture if self.captured else None)
        return torch.cat([hidden, *ops.states], 1) if ops.states else hidden, logits

    def ops(self, step: DeviceStep, captured: tuple[int, ...] | None = None) -> CudaOps:
        captured = self.captured if captured is None else captured
        caches = self._memory.caches
        return CudaOps(
            self.spec, self.weights, caches, self._angles, step, self._adapters, captured=captured
        )

    # ---- memory

    def out_of_memory(self) -> DeviceMemoryError:
        """The error of a step that ran out of memory, after releasing what is not needed."""
        self._graphs.drop()
        self._draws.drop()
        self._release_cached()
        free = self.available_memory() / 1e9
        return DeviceMemoryError(
            f"{OUT_OF_MEMORY}a step did not fit ({free:.1f} GB are free now); lower kv_memory, "
            "step_tokens or max_running, or end other programs on this GPU"
        )

    def _release_cached(self) -> None:
        """Return the memory that PyTorch holds and no tensor uses."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        # a launched step may still run: PyTorch does not reuse its memory before it ends
        gc.unfreeze()
        self._graphs.close()
        self._memory.caches = self._adapters = ()
        self.weights.clear()
        self._angles.clear()
        self._draws.close()
        # a closed engine leaves its memory to the next one, which measures what is free
        self._release_cached()
