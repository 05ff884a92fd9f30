"""Compile the kernels of a model before its first request.

In: a CudaBackend with an allocated KV cache that no sequence uses yet. Triton compiles a kernel at
its first launch, for one second or more, and keeps it on disk; a kernel on disk is loaded in some
milliseconds. Without this a compile could interrupt a running crowd: a matmul has another tile for
other numbers of rows, and a kernel another variant where a number is 1 or a multiple of 16.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from verbatim.backend.cuda.backend import CudaBackend
from verbatim.backend.cuda.kernels import kernels
from verbatim.backend.cuda.kernels.few_rows import product as few_rows
from verbatim.backend.cuda.kernels.fp8 import scaled_product
from verbatim.backend.cuda.kernels.fp8.scaled_product import ScaledWeight
from verbatim.backend.cuda.kernels.matmul_tile import all_tiles
from verbatim.backend.cuda.kernels.quant import BlockWeight
from verbatim.backend.cuda.runtime.step_graph import GraphInputs
from verbatim.backend.cuda.runtime.step_graphs import MIN_GRAPH_SPANS
from verbatim.backend.cuda.runtime.step_inputs import OUTPUTS, PaddedInputs, StepShape, tile_lines
from verbatim.backend.gpu_weights import is_matrix, split_k
from verbatim.base.config import BLOCK_SIZE
from verbatim.base.params import SamplingParams
from verbatim.base.records import DrawSpec, SeqStep, StepPlan

if TYPE_CHECKING:
    from verbatim.backend.cuda.device_weights import Weight
    from verbatim.backend.protocol import Backend
    from verbatim.model.spec import ModelSpec

# rows and spans of steps whose attention is split over programs, and merged in one
STEPS = ((32, 2), (4096, 1))
# Sequences of the decode steps: the graph of one sequence and those of a crowd that grows, with
# every variant of the kernels (1, a multiple of 16, neither; more than 16 rows start early).
SEQUENCES = (1, 3, 16, 64)
# Tokens per sequence of the steps with prompts. The first step of a shape is not padded, so its
# kernels have other numbers of rows than those of a graph; the second captures the graph.
PROMPTS = ((10,), (10,), (100, 1, 1), (100, 1, 1))
# The common samplers. A request's other parameters compile their kernels when they first occur.
SAMPLERS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=0.8, top_p=0.95, top_k=20),
    SamplingParams(temperature=0.8, top_k=50),
    SamplingParams(temperature=0.8, min_p=0.05),
    SamplingParams(temperature=0.8, logprobs=5),
)


def compile_all(
    backend: Backend,
    params: Sequence[SamplingParams] = (),
    max_running: int = 256,
    step_tokens: int = 8192,
) -> None:
    """Launch what a crowd of requests launches. `params`: samplers beside the common ones, such as
    the model's defaults. DeviceMemoryError: the memory does not suffice for all of it."""
    assert isinstance(backend, CudaBackend), "the caller asks no other one"
    if backend.compile_chains():
        return
    try:  # what needs the most memory comes last
        for plan in decode_steps(backend, [*SAMPLERS, *params], max_running):
            backend.execute(plan)
        for lengths in PROMPTS:
            backend.execute(make_step(backend, lengths, SAMPLERS[0]))
        compile_kernels(backend, step_tokens)
    except torch.OutOfMemoryError:
        raise backend.out_of_memory() from None
    gc.freeze()  # the objects of Triton's compiler, as in CudaBackend.allocate


def compile_kernels(backend: CudaBackend, step_tokens: int = 8192) -> None:
    """Launch every tile of the matmuls, and steps of padding rows."""
    launched = set()
    activation = backend.spec.activation if backend.spec.gated else None
    for weight in matrices(backend.weights, tied=backend.spec.tied):
        n, k = weight.shape
        splits, _ = split_k(n, k)
        fused = activation is not None and kernels.can_fuse(weight, activation)
        # one compiled kernel serves all such weights
        variant = (weight.dtype, splits, fused, n % 16 == 0, k % 16 == 0)
        if variant in launched:
            continue
        launched.add(variant)
        for tile in all_tiles(splits, kernels.has_tma(weight)):
            x = torch.zeros((tile.rows, k), dtype=weight.dtype, device=weight.device)
            kernels.matmul(x, weight, tile=tile)
            if activation is not None and fused:
                kernels.gated_matmul(x, weight, activation, weight.dtype, tile)
    compile_scaled(backend)
    for rows, spans in (*STEPS, *expert_steps(backend.spec, step_tokens)):
        rows = max(32, min(rows, step_tokens))
        shape = StepShape(rows, OUTPUTS[0], max(4, rows // 32), spans)
        inputs = PaddedInputs(shape, backend.padding_blocks, backend.spec, backend.device)
        inputs.fill(None, {})
        backend.compute(inputs.step)
    for rows in few_rows.WIDTHS if few_rows.available() else ():
        compile_few_rows(backend, rows)
    if backend.device.type == "cuda":
        torch.cuda.synchronize()


def compile_few_rows(backend: CudaBackend, rows: int) -> None:
    """Launch a decode step of padding rows. The products of few rows have a kernel per shape."""
    spec, device = backend.spec, backend.device
    lines = tile_lines(spec, 1, device)
    inputs = GraphInputs(rows, MIN_GRAPH_SPANS, backend.padding_blocks, lines, device, spec)
    inputs.fill(())
    backend.compute(inputs.step)


def matrices(weights: Mapping[str, Weight], *, tied: bool) -> list[torch.Tensor]:
    """The weights [n, k] that one matmul reads, in half precision."""
    plain = {
        name: weight.plain if isinstance(weight, BlockWeight) else weight
        for name, weight in weights.items()
        if is_matrix(name.split("+")[0]) and (name != "embed" or tied)
    }
    return [w for w in plain.values() if isinstance(w, torch.Tensor) and w.ndim == 2]


def compile_scaled(backend: CudaBackend) -> None:
    """Launch every tile of the products of FP8 codes."""
    spec, launched = backend.spec, set()
    for weight in backend.weights.values():
        if not isinstance(weight, ScaledWeight):
            continue
        n, k = weight.shape
        fused = spec.gated and scaled_product.can_fuse(weight, spec.activation)
        for gate in ("none", spec.activation) if fused else ("none",):
            for tile in scaled_product.all_tiles(n, split_k(n, k)[0], gate != "none"):
                if (variant := (gate, split_k(n, k)[0], tile)) not in launched:
                    launched.add(variant)
                    x = torch.zeros((tile.rows, k), dtype=weight.dtype, device=backend.device)
                    scaled_product.product(x, weight, gate=gate, tile=tile)


def expert_steps(spec: ModelSpec, step_tokens: int) -> Iterator[tuple[int, int]]:
    """Rows and spans of a step for each height of expert tiles that steps can have."""
    for count in {layer.experts for layer in spec.layers} - {0}:
        for height in kernels.EXPERT_TILES:
            rows = -(-height * count // spec.experts_used)
            if rows <= step_tokens:
                yield rows, 1


def decode_steps(
    backend: CudaBackend, params: Sequence[SamplingParams], max_running: int
) -> Iterator[StepPlan]:
    """Steps of sequences of one token."""
    for count in SEQUENCES:
        count = min(count, max_running, *backend.padding_blocks)
        for adapter in (-1, 0) if backend.has_adapters else (-1,):
            for one in params:
                yield make_step(backend, (1,) * count, one, adapter)


def make_step(
    backend: CudaBackend, lengths: Sequence[int], params: SamplingParams, adapter: int = -1
) -> StepPlan:
    """A step of new sequences, in the first blocks of the KV cache: no sequence uses them, so their
    contents mean nothing. Sequences without a block are left out. Negative ids are those of no
    sequence of the engine."""
    spec = DrawSpec(params, 0, 1, (0,) if params.needs_history else ())
    groups, free = len(backend.padding_blocks), min(backend.padding_blocks)
    steps: list[SeqStep] = []
    start = 0
    for length in lengths:
        length = min(length, backend.spec.context, (free - start) * BLOCK_SIZE)
        if length > 0:
            end = start + -(-length // BLOCK_SIZE)
            table, start = tuple(range(start, end)), end
            step = SeqStep(-1 - len(steps), (0,) * length, 0, (table,) * groups, 1, spec)
            steps.append(step._replace(adapter=adapter))
    return StepPlan(0, tuple(steps))
