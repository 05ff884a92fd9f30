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
import contextlib
import gc
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
import triton

from verbatim.backend.cuda.device_weights import Weight, load
from verbatim.backend.cuda.kernels import kernels, quant, recurrent
from verbatim.backend.cuda.kernels.kv_cache import empty_kv, layer_bytes
from verbatim.backend.cuda.kernels.lora import load_adapter
from verbatim.backend.cuda.ops import CudaOps, rope_tables
from verbatim.backend.cuda.runtime.device import device, kernel_ran
from verbatim.backend.cuda.runtime.device_step import DeviceStep
from verbatim.backend.cuda.runtime.step_graph import GraphInputs, StepGraph
from verbatim.backend.cuda.runtime.step_inputs import (
    MAX_OUTPUTS,
    PaddedInputs,
    StepShape,
    cut_tiles,
    padded_shape,
    tile_lines,
    to_device,
)
from verbatim.backend.cuda.sampler.gpu_sampler import GpuSampler
from verbatim.backend.cuda.sampler.host_sampler import host_sampler
from verbatim.backend.cuda.sampler.token_counts import TokenCounts
from verbatim.backend.cuda.step_launcher import CudaLauncher
from verbatim.backend.gpu_layout import block_mode, is_matrix, weight_bytes
from verbatim.backend.protocol import BackendInfo, kv_numerics
from verbatim.backend.step_rows import Batch, HostRows, collect, make_batch, only_draws, split_draws
from verbatim.base.config import BLOCK_SIZE, EngineConfig
from verbatim.base.errors import OUT_OF_MEMORY, BackendError, DeviceMemoryError
from verbatim.base.records import CacheGroup, Drawn, SeqStep, StepPlan, StepResult
from verbatim.model.decoder import forward
from verbatim.model.layout import is_expert, is_read_by_row
from verbatim.model.loading.load import Model
from verbatim.sampling.pipeline import Row, rows_of

NUMERICS_VERSION = "cuda-2"
HOST_ROWS = 512  # rows of logits that the host's buffer holds: 0.3 GB for 152,000 ids
COPY_ROWS = 64  # rows of logits per copy to the host; sampling overlaps the following copies
# bytes needed beside the weights: attention's buffer is 256 MiB; CUDA graphs, a small KV cache
RESERVED_BYTES = 512 << 20
MAX_GRAPH_ROWS = MAX_OUTPUTS  # rows of a decode step that replays a CUDA graph
# Graphs of steps with prompts, least recently used first. Each has its own integers, with a block
# table per query tile: up to 35 MB for 8,192 rows and 131,072 positions.
MAX_PADDED_GRAPHS = 64
MIN_GRAPH_SPANS = 4  # attention spans of a graph; fewer would only add graphs


class CudaBackend:
    """`weights`: tensors on the device in the layout of device_weights.load. bench/cuda.py passes
    random weights in shapes for which there is no file."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig | None = None,
        *,
        weights: dict[str, Weight] | None = None,
    ) -> None:
        config = config or EngineConfig(backend="cuda")
        self.spec, self.block_size, self.config = model.spec, BLOCK_SIZE, config
        self.device = device()
        if weights is None:
            blocks = block_mode(model.weights, self.available_memory())
            weights = load(model.weights, model.spec, self.device, blocks)
        self._weights = weights
        self._adapters = tuple(load_adapter(a, model.spec, self.device) for a in model.adapters)
        self._angles = rope_tables(model.spec, model.spec.context, self.device)
        self._caches: tuple[tuple[torch.Tensor, ...], ...] = ()
        # per cache group an extra block that no sequence owns: the padding rows of a graph use it
        self.padding_blocks: tuple[int, ...] = ()
        self._graphs: dict[tuple[int, int], StepGraph[GraphInputs]] = {}
        self._padded_graphs: dict[StepShape, StepGraph[PaddedInputs]] = {}
        self._seen_shapes: set[StepShape] = set()
        self._host_rows = host_sampler(config)
        self._host_logits: torch.Tensor | None = None  # pinned [rows, vocab]
        self.gpu_sampler = GpuSampler(model.spec.vocab, self.device)
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        # the integers of recurrent layers are not among the inputs of a graph
        self._use_graphs = self.device.type == "cuda" and not model.spec.recurrent
        self._can_overlap = not model.spec.recurrent
        self._release_cached()  # what loading has freed is available to the KV cache

    @property
    def info(self) -> BackendInfo:
        read = sum(
            w.nbytes
            for name, w in self._weights.items()
            if not is_read_by_row(name, tied=self.spec.tied)
        )
        kv = sum(
            len(g.layers) * layer_bytes(self.spec, g.layers[0], self.config.kv_type, 1)
            for g in self.spec.groups
            if g.kind == "attention"
        )
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
            major, minor = torch.cuda.get_device_capability(self.device)
            arch = f"sm{major}{minor}"
        else:
            name, arch = "Triton's interpreter", "interpreted"
        version = kv_numerics(NUMERICS_VERSION, self.config.kv_type)
        numerics = f"{version}, {arch}, triton {triton.__version__}, torch {torch.__version__}"
        experts = sum(w.nbytes for key, w in self._weights.items() if is_expert(key))
        return BackendInfo("cuda", name, 1, numerics, read, kv, expert_bytes=experts)

    def available_memory(self) -> int:
        if self.device.type != "cuda":
            return 1 << 30  # a fixed figure under Triton's interpreter
        return int(torch.cuda.mem_get_info(self.device)[0])

    def block_bytes(self) -> tuple[int, ...]:
        return tuple(len(g.layers) * self._layer_bytes(g) for g in self.spec.groups)

    def _layer_bytes(self, group: CacheGroup) -> int:
        """Bytes of one layer in a block of the group."""
        if group.kind == "attention":
            return layer_bytes(self.spec, group.layers[0], self.config.kv_type, self.block_size)
        return 4 * recurrent.block_floats(self.spec, group, self.block_size)

    def allocate(self, blocks: tuple[int, ...]) -> None:
        assert not self._caches, "allocate is called once"
        self.padding_blocks = blocks
        try:
            self._caches = tuple(
                self._group_cache(group, n + 1)
                for group, n in zip(self.spec.groups, blocks, strict=True)
            )
        except torch.OutOfMemoryError:
            sizes = zip(blocks, self.block_bytes(), strict=True)
            needed = sum(count * size for count, size in sizes) / 1e9
            raise DeviceMemoryError(
                f"{OUT_OF_MEMORY}the KV cache of {needed:.1f} GB does not fit; lower kv_memory or "
                "context"
            ) from None
        # Freeze the 190,000 objects of PyTorch and Triton: a full collection, during which no step
        # is launched, then takes less than a millisecond instead of 110
        gc.freeze()
        # frozen cycles stay alive at exit, and nanobind reports what they hold as leaked
        atexit.register(gc.unfreeze)

    def _group_cache(self, group: CacheGroup, blocks: int) -> tuple[torch.Tensor, ...]:
        if group.kind == "attention":
            kv_type, size = self.config.kv_type, self.block_size
            return empty_kv(self.spec, group, kv_type, blocks, size, self.device)
        return recurrent.empty_caches(self.spec, group, blocks, self.block_size, self.device)

    def read_block(self, group: int, block: int) -> bytes:
        parts = [cache[:, block] for cache in self._caches[group]]
        return b"".join(part.contiguous().cpu().numpy().tobytes() for part in parts)

    def write_block(self, group: int, block: int, data: bytes) -> None:
        if len(data) != self.block_bytes()[group]:
            raise ValueError(f"{len(data)} bytes are not a block of group {group}")
        start = 0
        for cache in self._caches[group]:
            part = cache[:, block]
            count = part.numel()
            stored = torch.frombuffer(bytearray(data), dtype=part.dtype, count=count, offset=start)
            cache[:, block] = stored.view(part.shape).to(self.device)
            start += count * part.element_size()

    def matrices(self) -> list[torch.Tensor]:
        """The weights [n, k] that one matmul reads, in half precision."""
        plain = {
            name: weight.plain if isinstance(weight, quant.BlockWeight) else weight
            for name, weight in self._weights.items()
            if is_matrix(name.split("+")[0]) and (name != "embed" or self.spec.tied)
        }
        return [w for w in plain.values() if w is not None and w.ndim == 2]

    @property
    def has_adapters(self) -> bool:
        return bool(self._adapters)

    # ---- execute a step

    draft_backend = None

    @property
    def launcher(self) -> CudaLauncher | None:
        if not self._can_overlap:
            return None
        return CudaLauncher(self._forward, self.gpu_sampler, MAX_GRAPH_ROWS, self.out_of_memory)

    def execute(self, plan: StepPlan) -> StepResult:
        try:
            return self._execute(plan)
        except torch.OutOfMemoryError:
            raise self.out_of_memory() from None

    def _execute(self, plan: StepPlan) -> StepResult:
        for group, source, target in plan.copies:
            for cache in self._caches[group]:
                cache[:, target] = cache[:, source]
        if not plan.rows:
            none = np.zeros((0, self.spec.vocab), np.float32)
            return collect(plan, np.zeros((0, self.spec.hidden), np.float32), HostRows(none))
        hidden, logits = self._forward(plan)
        if only_draws(plan):
            rows = [row for s in plan.sequences for row in rows_of(s)]
            seq_ids = [s.seq_id for s in plan.sequences for _ in range(s.draws)]
            return split_draws(plan, self._draw(logits, rows, seq_ids))
        if not any(s.hidden for s in plan.sequences):
            hidden = hidden[:0]
        return collect(plan, hidden.cpu().numpy(), self._host_rows(logits.cpu().numpy()))

    def _forward(
        self, plan: StepPlan, tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Final states [outputs, H] and logits [logits, V] of the rows that need them.

        `tokens` [rows] replaces the plan's tokens, if only the device has them."""
        rows = plan.rows
        all_logits = all(len(s.targets) + s.draws >= len(s.tokens) for s in plan.sequences)
        adapted = any(s.adapter >= 0 for s in plan.sequences)
        if self._use_graphs and all_logits and rows <= MAX_GRAPH_ROWS and not adapted:
            return self._replay(plan.sequences, rows, tokens)
        batch = make_batch(plan, len(self._caches))
        if self._use_graphs and tokens is None and only_draws(plan) and not adapted:
            replayed = self._replay_padded(batch)
            if replayed is not None:
                return replayed
        step = to_device(batch, self.spec, self.device)
        if tokens is not None:
            step.tokens.copy_(tokens)
        return self.compute(step)

    def compute(self, step: DeviceStep) -> tuple[torch.Tensor, torch.Tensor]:
        ops = CudaOps(self.spec, self._weights, self._caches, self._angles, step, self._adapters)
        hidden, logits = forward(self.spec, ops)
        return hidden, logits

    # ---- sampling

    def _draw(
        self, logits: torch.Tensor, rows: Sequence[Row], seq_ids: Sequence[int]
    ) -> list[Drawn]:
        """Sample on the device. Copy the logits of undecided rows only; the host samples those."""
        drawn = self.gpu_sampler(logits, rows, seq_ids)
        left = [i for i, one in enumerate(drawn) if one is None]
        if left:
            if len(left) < len(rows):
                logits = logits[torch.tensor(left, device=self.device)]
            on_host = self._draw_on_host(logits, [rows[i] for i in left])
            for i, one in zip(left, on_host, strict=True):
                drawn[i] = one
        return [one for one in drawn if one is not None]

    def _draw_on_host(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[Drawn]:
        if len(rows) > HOST_ROWS:
            head = self._draw_on_host(logits[:HOST_ROWS], rows[:HOST_ROWS])
            return head + self._draw_on_host(logits[HOST_ROWS:], rows[HOST_ROWS:])
        if self._host_logits is None or len(self._host_logits) < len(rows):
            capacity = 1 << max(0, len(rows) - 1).bit_length()
            self._host_logits = torch.empty(
                (capacity, self.spec.vocab),
                dtype=torch.float32,
                pin_memory=self.device.type == "cuda",
            )
        on_host, arrived = self._host_logits[: len(rows)], []
        # queue all copies first: the first rows are sampled while the next ones are copied
        chunks = [slice(start, start + COPY_ROWS) for start in range(0, len(rows), COPY_ROWS)]
        for chunk in chunks:
            on_host[chunk].copy_(logits[chunk], non_blocking=True)
            arrived.append(self._record_event())
        drawn: list[Drawn] = []
        for chunk, event in zip(chunks, arrived, strict=True):
            if event is not None:
                event.synchronize()
            drawn += self._host_rows(on_host[chunk].numpy()).draw(rows[chunk])
        return drawn

    def _record_event(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    # ---- CUDA graphs

    def _replay(
        self, sequences: Sequence[SeqStep], rows: int, tokens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A step in which every row needs logits. One CUDA graph is captured per number of rows
        and spans, both rounded up."""
        size = graph_rows(rows)
        spans = 1 << (kernels.span_count(max([s.end for s in sequences])) - 1).bit_length()
        spans = max(MIN_GRAPH_SPANS, spans)
        graph = self._graphs.get((size, spans))
        if graph is None:
            lines = tile_lines(self.spec, 1, self.device)
            inputs = GraphInputs(
                size, spans, self.padding_blocks, lines, self.device, self._logits[:size]
            )
            inputs.fill(())
            graph = self._graphs[size, spans] = StepGraph(inputs, self.compute, self.pool)
        graph.inputs.fill(sequences, tokens)
        hidden, logits = graph.replay()
        return hidden[:rows], logits[:rows]

    def _replay_padded(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A step with prompts, padded to the shape of a CUDA graph. A shape is captured when it
        comes up for the second time; None: launch each kernel instead."""
        cuts = cut_tiles(batch, self.spec, self.device)
        shape = padded_shape(batch, cuts, self.spec)
        if shape is None:
            return None
        graph = self._padded_graphs.pop(shape, None)  # put back as the most recently used
        if graph is None:
            if shape not in self._seen_shapes:
                self._seen_shapes.add(shape)
                return None
            logits = self._logits[: shape.outputs]
            inputs = PaddedInputs(shape, self.padding_blocks, self.spec, self.device, logits)
            inputs.fill(None, {})
            graph = StepGraph(inputs, self.compute, self.pool)
            if len(self._padded_graphs) >= MAX_PADDED_GRAPHS:
                self._padded_graphs.pop(next(iter(self._padded_graphs)))
        self._padded_graphs[shape] = graph
        graph.inputs.fill(batch, cuts)
        hidden, logits = graph.replay()
        return hidden[: len(batch.outputs)], logits[: len(batch.outputs)]

    @cached_property
    def _logits(self) -> torch.Tensor:
        """The logits of every graph: only one runs at a time."""
        return torch.empty((MAX_OUTPUTS, self.spec.vocab), dtype=torch.float32, device=self.device)

    # ---- memory

    def out_of_memory(self) -> DeviceMemoryError:
        """The error of a step that ran out of memory, after releasing what is not needed."""
        self._drop_graphs()
        self._release_cached()
        free = self.available_memory() / 1e9
        return DeviceMemoryError(
            f"{OUT_OF_MEMORY}a step did not fit ({free:.1f} GB are free now); lower kv_memory, "
            "step_tokens or max_running, or end other programs on this GPU"
        )

    def _drop_graphs(self) -> None:
        self._graphs.clear()
        self._padded_graphs.clear()
        self._seen_shapes.clear()
        self._host_logits = None

    def _release_cached(self) -> None:
        """Return the memory that PyTorch holds and no tensor uses."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        # a launched step may still run: PyTorch does not reuse its memory before it ends
        gc.unfreeze()
        self._drop_graphs()
        self.__dict__.pop("_logits", None)
        self._caches = self._adapters = ()
        self._weights.clear()
        self._angles.clear()
        self.gpu_sampler.counts = TokenCounts(self.spec.vocab, self.device)
        # a closed engine leaves its memory to the next one, which measures what is free
        self._release_cached()


def graph_rows(rows: int) -> int:
    """Rows of the graph for a decode step: a power of two, or a multiple of 64, which is how many
    the smallest tile of a large matmul has."""
    return 1 << (rows - 1).bit_length() if rows <= 64 else -(-rows // 64) * 64


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
            return CudaBackend(model, config)
        torch.cuda.empty_cache()
        raise BackendError(
            f"the model did not fit into the {free / 1e9:.1f} GB of GPU memory that were free when "
            "loading began; end other programs on this GPU, or choose a smaller model"
        )
    raise BackendError(
        f"the model needs {needed / 1e9:.1f} GB of GPU memory and {free / 1e9:.1f} GB are free; "
        "end other programs on this GPU, or choose a smaller model or the backend cpu"
    )
