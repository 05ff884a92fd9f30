"""Tests of the cuda backend's kernels, on a GPU or under Triton's interpreter.

test_cuda.py runs this file with the interpreter, in its own process, because Triton decides at
import time whether it interprets. `make test-gpu` runs it on the GPU. Every tensor that a kernel
gets is on the fixture `device`. Models are small, because the interpreter is slow. On a GPU the
other tests of this folder run too. CUDA graphs are tested only there: the interpreter has none.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import fast_interpreter
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from cpu_blocks import random_blocks
from plans import BLOCKS, MARKS, Blocks, ScoredSeq, run, run_alone, run_prompts, same_bits

from filter_values import WEAK
from overlap_crowd import count_rows, generate_all
from parity_types import INTERPRETED, interpreted_type
from verbatim.backend import gpu, gpu_weights, open_backend
from verbatim.backend.cuda import backend as cuda_backend
from verbatim.backend.cuda import cache_memory, device_weights, kernel_compile, opening
from verbatim.backend.cuda.device_weights import _half as half_weight
from verbatim.backend.cuda.device_weights import load
from verbatim.backend.cuda.kernels import experts, kernels, matmul_tile, quant
from verbatim.backend.cuda.kernels.block_readers import HALVES, READERS
from verbatim.backend.cuda.kernels.few_rows import product as few_rows
from verbatim.backend.cuda.kernels.kv_cache import KvLayer
from verbatim.backend.cuda.kernels.lora import LowRankPart, add_low_rank
from verbatim.backend.cuda.runtime import step_graphs, step_inputs
from verbatim.backend.cuda.runtime.device import kernel_ran
from verbatim.backend.cuda.runtime.step_graph import GraphInputs
from verbatim.backend.cuda.sampler import (
    device_filters,
    gpu_sampler,
    jit_numerics,
    jit_sampling,
    sampling_plan,
)
from verbatim.backend.cuda.sampler.gpu_sampler import GpuSampler
from verbatim.backend.cuda.sampler.host_sampler import host_sampler
from verbatim.backend.cuda.sampler.token_counts import TokenCounts
from verbatim.backend.protocol import Backend
from verbatim.backend.step_rows import make_batch
from verbatim.base.config import EngineConfig
from verbatim.base.errors import BackendError, DeviceMemoryError
from verbatim.base.params import DIFFUSION, FIELDS, SamplingParams
from verbatim.base.records import BROKEN, Drawn, DrawSpec, SeqStep, StepPlan, StepResult
from verbatim.formats.checkpoint_blocks import CHECKPOINT_TYPES, CheckpointType, to_type
from verbatim.formats.packed.packed_weight import without_checkpoint_blocks
from verbatim.formats.registry import SIZES as BLOCK_SIZES
from verbatim.formats.requantise import requantise
from verbatim.formats.tensor import Tensor
from verbatim.model.loading.load import Model
from verbatim.sampling.draw import gumbel
from verbatim.sampling.logprobs import score_targets
from verbatim.sampling.numerics import log
from verbatim.sampling.pipeline import Row, sample_rows
from verbatim.testing.fakes import FakeBackend, fake_spec
from verbatim.testing.tiny_models import TINY_CONFIGS, tiny_adapter, tiny_model

# the interpreter warns about arithmetic with infinities, which the kernels mask
pytestmark = pytest.mark.filterwarnings("ignore")


@triton.jit
def sum_to(limit, out):
    total = 0
    for i in range(tl.load(limit)):
        total += i
    tl.store(out, total)


def interpreter_fault() -> str:
    """The reason why Triton's interpreter cannot run the kernels with this NumPy, or "" if it can.

    Triton 3.6 calls int() on a one-element array for a loop bound, which NumPy 2.4 rejects. Later
    releases of Triton do not."""
    limit, out = torch.tensor([4], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    try:
        sum_to[(1,)](limit, out)
    except Exception as error:
        if "only 0-dimensional arrays can be converted" not in str(error):
            raise
        return (
            f"the interpreter of Triton {triton.__version__} cannot loop up to a loaded number "
            f"with NumPy {np.__version__}; the same tests run compiled on a GPU, "
            "or with a newer Triton"
        )
    assert out.tolist() == [6]
    return ""


if os.environ.get("TRITON_INTERPRET") == "1":
    fast_interpreter.speed_up()
    # The interpreter needs about 3 ms for a program, with one head or with all heads of a row.
    kernels.heads_per_program = lambda block: 16
    if fault := interpreter_fault():
        pytest.skip(fault, allow_module_level=True)

_DELTA = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
SMALL: dict[str, dict[str, object]] = {
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "qwen3next": _DELTA,
    "qwen35": _DELTA,
    "gemma4": {"sliding_window": 5},
    "gemma4moe": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
    },
    "gpt2": {"n_layer": 1},
    "gemma3": {"num_hidden_layers": 2, "sliding_window": 5, "sliding_window_pattern": 2},
    "glm4_moe": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "ernie4_5_moe": {"num_hidden_layers": 1, "moe_layer_start_index": 0},
    "ministral3": {
        "num_hidden_layers": 1,
        "rope_parameters": {
            **TINY_CONFIGS["ministral3"]["rope_parameters"],
            "original_max_position_embeddings": 4,
        },
    },
}
WINDOWS = {"num_hidden_layers": 2, "sliding_window": 5}
# Fewer programs for the interpreter.
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
TOKENS = np.random.default_rng(1).integers(0, 260, 9).tolist()


def small(family: str, **changes: object) -> Model:
    plain = WINDOWS if family in ("mistral", "gemma2") else {"num_hidden_layers": 1}
    return tiny_model(family, **{**SMALL.get(family, plain), **changes})  # type: ignore[arg-type]


def opened(model: Model, kind: str = "cuda") -> Backend:
    backend = open_backend(model, EngineConfig(backend=kind))
    backend.allocate((BLOCKS,) * len(backend.spec.groups))
    return backend


def run_checked(model: Model, tokens: list[int]) -> tuple[Backend, ScoredSeq]:
    """The cuda backend and its results for the tokens, which agree with the reference."""
    backend, exact = opened(model), run_alone(opened(model, "reference"), tokens, seed=3)
    found = run_alone(backend, tokens, seed=3)
    assert np.abs(np.array(found.logprobs) - np.array(exact.logprobs)).mean() < 0.02
    return backend, found


def difference(model: Model, tokens: list[int]) -> float:
    """Mean difference of log-probabilities between the cuda and the reference backend."""
    ours, theirs = (
        np.array(run_alone(opened(model, kind), tokens, seed=3).logprobs)
        for kind in ("cuda", "reference")
    )
    return float(np.abs(ours - theirs).mean())


# qwen3next and qwen35 launch the same kernels: one of them is enough for the interpreter
SAME_KERNELS = pytest.param("qwen3next", marks=MARKS["cuda"])


# test_backend_agrees.py runs all families on a GPU
@pytest.mark.parametrize("family", [*INTERPRETED, SAME_KERNELS])
def test_every_family_agrees_with_the_reference(family: str) -> None:
    run_checked(small(family, type=interpreted_type(family)), TOKENS)


def split_small_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some matmuls of small models get two splits, which run in parallel for few rows and in one
    program for many."""
    monkeypatch.setattr(kernels, "BK", 16)
    monkeypatch.setattr(gpu_weights, "BK", 16)
    choose_tile = matmul_tile.choose_tile

    def choose(m: int, n: int, k: int, splits: int, tma: bool) -> matmul_tile.MatmulTile:
        tile = choose_tile(16, n, k, splits, False)._replace(inputs=16)
        return tile if m <= 4 else tile._replace(rows=32, parallel=1, tma=tma)

    def choose_float32(m: int, splits: int) -> matmul_tile.MatmulTile:
        return matmul_tile.float32_tile(m, splits)._replace(inputs=16)

    monkeypatch.setattr(kernels, "choose_tile", choose)
    monkeypatch.setattr(kernels, "float32_tile", choose_float32)


@pytest.mark.parametrize("family", ["gemma2", "qwen3moe"])
def test_a_sequence_has_the_same_bits_in_chunks_and_in_a_batch(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares a prefill in one step with chunks beside another sequence."""
    split_small_sums(monkeypatch)
    model = small(family, hidden_size=64)
    assert gpu_weights.split_k(64, 64)[0] == 2
    backend, expected = run_checked(model, TOKENS)
    blocks = Blocks(backend.spec, backend.block_size, 5)
    seq, other = blocks.allocate(0, TOKENS), blocks.allocate(1, TOKENS[::-1])
    run(backend, [other, seq], [8, 1])
    run(backend, [seq], [3])
    while not seq.finished:
        run(backend, [seq], [20])
    assert same_bits(expected, seq)


# the adapter's kernels are the same in both
@pytest.mark.parametrize("family", ["qwen2", pytest.param("gpt2", marks=MARKS["cuda"])])
def test_adapters_agree_with_the_reference_and_keep_their_bits_in_a_batch(family: str) -> None:
    """Two adapters and the base model in one batch, in chunks: each has the bits of its own run."""
    tokens = TOKENS[:5]
    model = small(family, **(FEW_HEADS if family == "qwen2" else {}))
    found = tuple(tiny_adapter(model.spec, str(n), seed=n, rank=3 + 2 * n) for n in range(2))
    model = replace(model, adapters=found)
    backend, reference = opened(model), opened(model, "reference")
    alone = [run_alone(backend, tokens, adapter=n, number=n + 1) for n in (-1, 0, 1)]
    for n, seq in zip((-1, 0, 1), alone, strict=True):
        theirs = run_alone(reference, tokens, adapter=n)
        assert np.abs(np.array(seq.logprobs) - np.array(theirs.logprobs)).mean() < 0.02
    assert not same_bits(alone[0], alone[1])
    assert not same_bits(alone[1], alone[2])
    blocks = Blocks(backend.spec, backend.block_size, 5)
    together = [blocks.allocate(n + 1, tokens) for n in (-1, 0, 1)]
    for n, seq in zip((-1, 0, 1), together, strict=True):
        seq.adapter = n
    run(backend, together, [3, 1, 4])
    while left := [seq for seq in together if not seq.finished]:
        run(backend, left, [5] * len(left))
    for one, other in zip(alone, together, strict=True):
        assert same_bits(one, other)
    assert run_prompts(backend, tokens, (-1, 0, 1), 0) == [seq.drawn for seq in alone]


@pytest.mark.parametrize("blocks", [6, 2, 1])
def test_attention_inside_blocks_is_right_and_keeps_its_bits(
    blocks: int, device: torch.device
) -> None:
    """Rows of a diffusion model see their own block: final states against the reference, and the
    bits in chunks of whole blocks and in a batch. One block is full attention."""
    count = 48 if device.type == "cuda" else 24  # both cross a block of the cache
    block, model = count // blocks, tiny_model("sdar", num_hidden_layers=2, **FEW_HEADS)
    tokens = np.random.default_rng(4).integers(0, 259, count).tolist()

    def states(backend: Backend, cuts: list[int], *, other: bool = False) -> np.ndarray:
        found = []
        for first, end in pairwise(cuts):
            mine = SeqStep(0, tuple(tokens[first:end]), first, ((0, 1, 2),), block=block)
            steps = (mine._replace(hidden=True),)
            if other:
                steps = (SeqStep(1, (5, 6, 7), 0, ((4,),)), *steps)
            found.append(backend.execute(StepPlan(1, steps)).sequences[-1].hidden)
        return np.concatenate([part for part in found if part is not None])

    opened = {}
    for kind in ("reference", "cuda"):
        opened[kind] = open_backend(model, EngineConfig(backend=kind))
        opened[kind].allocate((8,))
    whole = states(opened["cuda"], [0, count])
    expected = states(opened["reference"], [0, count])
    assert np.abs(whole - expected).mean() < 0.01 * np.abs(expected).mean()
    causal = opened["cuda"].execute(
        StepPlan(1, (SeqStep(0, tuple(tokens), 0, ((0, 1, 2),), hidden=True),))
    )
    assert np.abs(np.asarray(causal.sequences[0].hidden) - expected).mean() > 0.1
    for cuts in ([0, count], [*range(0, count, block), count]):
        assert states(opened["cuda"], cuts, other=True).tobytes() == whole.tobytes()


def test_low_rank_sums_are_added_behind_the_splits_of_any_tile(device: torch.device) -> None:
    """The number of splits in parallel depends on the number of rows."""
    torch.manual_seed(2)
    x, weight = torch.randn(8, 512, device=device), torch.randn(48, 512, device=device)
    bias = torch.randn(48, device=device)
    low = LowRankPart(0, torch.randn(4, 512, device=device), torch.randn(48, 4, device=device), 0.1)
    splits, _ = gpu_weights.split_k(48, 512)
    assert splits > 1
    found = []
    for count, parallel in ((8, 1), (3, splits)):
        tile = matmul_tile.choose_tile(16, 48, 512, splits, False)._replace(parallel=parallel)
        sums = kernels.matmul(x[:count], weight.half(), bias, tile)
        assert len(sums.splits) == parallel
        rows = torch.tensor([0, 2], device=device)
        found.append(kernels.reduce_splits(add_low_rank(sums, x[:count], rows, [low]))[:3])
    assert torch.equal(*found)


@pytest.mark.parametrize("family", ["lfm2", "qwen35", SAME_KERNELS])
def test_recurrent_layers_keep_their_bits_over_the_borders_of_blocks(
    family: str, device: torch.device
) -> None:
    """One step of 37 tokens, against steps that start and end inside blocks and at their borders,
    beside another sequence, after a draft that was rejected. Under the interpreter 21 tokens, which
    cross one border instead of two."""
    steps = (11, 1, 15, 1, 4) if device.type == "cuda" else (11, 1, 4)
    tokens = np.random.default_rng(3).integers(0, 260, 5 + sum(steps)).tolist()
    backend = opened(small(family, **FEW_HEADS))
    expected = run_alone(backend, tokens)
    blocks = Blocks(backend.spec, backend.block_size, 5)
    seq, other = blocks.allocate(0, tokens), blocks.allocate(1, tokens[::-1])
    run(backend, [other, seq], [8, 5])
    tables = tuple(tuple(table) for table in seq.tables)
    backend.execute(StepPlan(0, (SeqStep(seq.id, (1, 2, 3, 4), 5, tables),)))
    for count in steps:
        run(backend, [seq], [count])
    assert same_bits(expected, seq)


def test_attention_over_several_spans_is_right_and_keeps_its_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With spans of 16 positions, 36 tokens have three spans. They agree with the reference, and
    chunks of rows have the same bits, merged in one program or by a second kernel."""
    monkeypatch.setattr(kernels, "SPAN", 16)
    tokens, model = (
        np.random.default_rng(2).integers(0, 260, 36).tolist(),
        small("llama", **FEW_HEADS),
    )
    backend, expected = run_checked(model, tokens)
    seq = Blocks(backend.spec, backend.block_size, 7).allocate(0, tokens)
    run(backend, [seq], [33])
    monkeypatch.setattr(kernels, "ATTENTION_BUFFER", 1)  # one program merges the spans
    run(backend, [seq], [2])
    assert same_bits(expected, seq)


def test_wide_heads_have_shorter_spans_and_keep_their_bits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4: heads of 256 and 512 on a GPU; under the interpreter of 8 and 16, of which the
    larger count as wide. One prompt, against chunks whose spans several programs reduce."""
    sizes = {"head_dim": 256, "global_head_dim": 512}
    count = 300
    if device.type == "cpu":
        sizes, count = {}, 20
        monkeypatch.setattr(kernels, "SPAN", 32)
        monkeypatch.setattr(kernels, "WIDE_HEAD", 8)
        monkeypatch.setattr(kernels, "WIDE_SPAN", 16)
    tokens = np.random.default_rng(4).integers(0, 260, count).tolist()
    backend, expected = run_checked(small("gemma4moe", **sizes), tokens)
    seq = Blocks(backend.spec, backend.block_size, 7).allocate(0, tokens)
    run(backend, [seq], [count - 4])
    monkeypatch.setattr(kernels, "ATTENTION_BUFFER", 1)  # one program merges the spans
    run(backend, [seq], [2])
    run(backend, [seq], [1])
    assert same_bits(expected, seq)


LARGE_HEADS = {
    "llama": {"head_dim": 192},
    "gemma2": {"head_dim": 256, "query_pre_attn_scalar": 256},
}


@pytest.mark.parametrize("family", LARGE_HEADS)
def test_large_heads_have_smaller_tiles_and_keep_their_bits(
    family: str, device: torch.device
) -> None:
    """One prompt, against decode steps. The tiles of other heads would not fit into an SM."""
    if device.type == "cpu":
        pytest.skip("needs an NVIDIA GPU: `make test-gpu`")
    tokens = np.random.default_rng(4).integers(0, 260, 300).tolist()
    backend, expected = run_checked(small(family, **LARGE_HEADS[family]), tokens)
    seq = Blocks(backend.spec, backend.block_size, 7).allocate(0, tokens)
    run(backend, [seq], [297])
    run(backend, [seq], [1])
    run(backend, [seq], [1])
    assert same_bits(expected, seq)


def test_attention_does_not_read_a_block_that_left_the_window() -> None:
    """The block is released, and its next owner may have written NaN. The other positions have
    random keys and values: the interpreter would take seconds to compute 20 of them."""
    backend: Any = opened(small("gemma2"))
    groups = backend.spec.groups
    torch.manual_seed(1)
    for cache in (cache for caches in backend._memory.caches for cache in caches):
        cache.normal_()
    tables = tuple((-1, 4) if group.window else (3, 4) for group in groups)
    step = SeqStep(1, (9,), 20, tables, 1, DrawSpec(SamplingParams(logprobs=3), 5, 1))
    clean = backend.execute(StepPlan(1, (step,)))
    for group, caches in zip(groups, backend._memory.caches, strict=True):
        for cache in caches if group.window else ():
            cache[:, 0] = cache[:, 3] = torch.nan
    assert backend.execute(StepPlan(1, (step,))) == clean


def test_tokens_sampled_on_the_device_equal_those_of_the_host_sampler() -> None:
    """One step with rows that the device samples, and the same rows with log-probabilities, which
    the host samples."""
    backend = opened(small("llama"))
    kinds: list[dict[str, float]] = [{"temperature": 0.0}, {"temperature": 0.7}]
    params = [SamplingParams(**kind, **more) for kind in kinds for more in ({}, {"logprobs": 2})]  # type: ignore[arg-type]
    steps = [
        SeqStep(i, (9,), 0, ((i,),), draws=1, draw=DrawSpec(p, 5, 1)) for i, p in enumerate(params)
    ]
    drawn = [one.drawn[0] for one in backend.execute(StepPlan(0, tuple(steps))).sequences]
    for plain, scored in (drawn[:2], drawn[2:]):
        assert plain == Drawn(scored.token, 0.0)
        assert scored.logprob < 0.0
        assert len(scored.top) == 2
    assert drawn[1].top[0][0] == drawn[1].token


def test_mxfp4_becomes_bfloat16_without_loss(device: torch.device) -> None:
    """float16 lacks the range of its powers of two."""
    blocks = random_blocks("mxfp4", np.random.default_rng(0), 4, 64)
    blocks[::17] = np.arange(60, 68)  # 2 ** -67 and the following: zero in float16
    tensor = Tensor("w", "mxfp4", (4, 64), blocks)
    made = half_weight(tensor, device)
    assert made.dtype == torch.bfloat16
    np.testing.assert_array_equal(made.float().cpu().numpy(), tensor.to_f32())


def test_the_inputs_of_a_graph_are_those_of_the_plan(device: torch.device) -> None:
    """Sequences arrive, grow, change rows and finish, with drafts. The inputs give each row's
    token, slot and blocks, whatever the previous step left there."""
    random = np.random.default_rng(6)
    inputs = GraphInputs(16, 8, (77, 88), 16, device, fake_spec())
    tables = {
        i: tuple(tuple(random.integers(0, 60, 64).tolist()) for _ in range(2)) for i in range(12)
    }
    for step in range(40):
        sequences = []
        for i in random.permutation(12)[: random.integers(0, 9)].tolist():
            if random.random() < 0.3:
                tables[i] = tuple(
                    tuple(random.integers(0, 60, random.integers(40, 70)).tolist())
                    for _ in range(2)
                )
            count, start = int(random.integers(1, 3)), int(random.integers(0, 638))
            sequences.append(
                SeqStep(
                    i, tuple(random.integers(0, 260, count).tolist()), start, tables[i], draws=count
                )
            )
        inputs.fill(sequences)
        batch = make_batch(StepPlan(step, tuple(sequences)), 2)
        n, sent = batch.rows, inputs.step
        assert sent.tokens.tolist() == batch.tokens.tolist() + [0] * (16 - n)
        assert sent.positions.tolist() == batch.positions.tolist() + [0] * (16 - n)
        owners = [s for s in sequences for _ in s.tokens]
        for group, padding in enumerate((77, 88)):
            slots, tiles = sent.slots[group].tolist(), sent.tiles[group][0]
            rows = tiles.first_row.tolist()
            assert sorted(rows) == list(range(16))
            positions = tiles.first_position.tolist()
            assert positions == sorted(sent.positions.tolist()), "the longest tile starts first"
            assert positions == sent.positions[tiles.first_row].tolist()
            table = tiles.table[np.argsort(rows)]
            assert slots[n:] == [padding * 16] * (16 - n)
            assert table[n:, 0].tolist() == [padding] * (16 - n)
            for row, (owner, position) in enumerate(
                zip(owners, batch.positions.tolist(), strict=True)
            ):
                assert (
                    tuple(table[row].tolist())[: position // 16 + 1]
                    == owner.blocks[group][: position // 16 + 1]
                )
                assert slots[row] == owner.blocks[group][position // 16] * 16 + position % 16


# the graph's integers are the same in both
@pytest.mark.parametrize("family", [pytest.param("lfm2", marks=MARKS["cuda"]), "qwen35"])
def test_a_decode_step_of_a_graph_has_the_same_bits_in_recurrent_layers(
    family: str, device: torch.device
) -> None:
    """Three sequences inside a block, at its border and with a draft over it, computed as they are
    and with padding rows, after another step in the same inputs."""
    backend: Any = opened(small(family, **FEW_HEADS))
    spec, groups = backend.spec, len(backend.spec.groups)

    def step(seq_id: int, tokens: tuple[int, ...], start: int) -> SeqStep:
        return SeqStep(seq_id, tokens, start, ((5 * seq_id, 5 * seq_id + 1),) * groups, len(tokens))

    prompts = (step(0, tuple(TOKENS), 0), step(1, tuple(range(16)), 0), step(2, (7,) * 15, 0))
    for _ in range(2):  # the first step leaves its integers and its updates behind
        backend.compute(
            step_inputs.to_device(make_batch(StepPlan(0, prompts), groups), spec, device)
        )
    lines = step_inputs.tile_lines(spec, 1, device)
    inputs = GraphInputs(8, 4, backend.padding_blocks, lines, device, spec)
    inputs.fill([step(1, (3,), 16), step(0, (4, 5), 9)])
    backend.compute(inputs.step)
    steps = (step(0, (1,), 9), step(1, (2,), 16), step(2, (3, 4), 15))
    plan = make_batch(StepPlan(0, steps), groups)
    expected = backend.compute(step_inputs.to_device(plan, spec, device))[1]
    inputs.fill(steps)
    assert torch.equal(backend.compute(inputs.step)[1][:4], expected)


@pytest.mark.parametrize("family", ["llama", "qwen35", pytest.param("lfm2", marks=MARKS["cuda"])])
def test_a_step_padded_to_a_fixed_shape_has_the_same_bits(
    family: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts, one of them continued, and a decoding sequence, computed as they are and in the
    shape of a CUDA graph, after another step in the same inputs. Of llama a draft layer reads the
    final states of one sequence."""
    monkeypatch.setattr(step_inputs, "MORE_TILES", 2)  # fewer programs for the interpreter
    monkeypatch.setattr(step_inputs, "OUTPUTS", (4,))
    backend: Any = opened(small(family, **FEW_HEADS))
    spec, groups = backend.spec, len(backend.spec.groups)
    random = np.random.default_rng(8)

    def steps(lengths: list[int]) -> Any:
        sequences = [
            SeqStep(
                i,
                tuple(random.integers(0, 260, count).tolist()),
                start,
                ((7 * i, 7 * i + 3),) * groups,
                draws=1,
                hidden=family == "llama" and i == 1,
            )
            for i, (start, count) in enumerate(zip((3, 0, 9), lengths, strict=True))
        ]
        batch = make_batch(StepPlan(0, tuple(sequences)), groups)
        return batch, step_inputs.cut_tiles(batch, spec, device)

    batch, cuts = steps([12, 9, 1])
    shape = step_inputs.padded_shape(batch, cuts, spec)
    assert shape is not None
    assert shape.rows == step_inputs.MIN_ROWS > batch.rows
    given = torch.full((shape.outputs, spec.vocab), torch.nan, device=device)
    inputs = step_inputs.PaddedInputs(shape, backend.padding_blocks, spec, device, given)
    inputs.fill(batch, cuts)
    batch, cuts = steps([9, 12, 4])
    assert step_inputs.padded_shape(batch, cuts, spec) == shape
    states, expected = backend.compute(step_inputs.to_device(batch, spec, device))
    inputs.fill(batch, cuts)
    hidden, padded = backend.compute(inputs.step)
    assert torch.equal(padded[:3], expected)
    assert padded.data_ptr() == given.data_ptr()
    assert shape.all_rows == (family == "llama")
    if shape.all_rows:
        assert torch.equal(hidden[torch.from_numpy(batch.outputs).to(device)], states)


@pytest.mark.parametrize(("block", "many"), [(4, 0), (16, 1)])
def test_blocks_padded_to_the_shape_of_a_graph_keep_their_bits(
    block: int, many: int, device: torch.device
) -> None:
    """Two canvases, of which one has its final pass in this step, in the inputs of another step."""
    backend: Any = opened(tiny_model("sdar", num_hidden_layers=1, **FEW_HEADS))
    spec, random = backend.spec, np.random.default_rng(8)

    def steps(starts: tuple[int, int]) -> Any:
        sequences = [
            SeqStep(
                i, tuple(random.integers(0, 260, (2 - i) * block).tolist()), start * block,
                ((5 * i, 5 * i + 1, 5 * i + 2, 5 * i + 3),), draws=2, block=block,
                picks=((1 - i) * block, (2 - i) * block - 1),
            )
            for i, start in enumerate(starts)
        ]  # fmt: skip
        batch = make_batch(StepPlan(0, tuple(sequences)), 1)
        return batch, step_inputs.cut_tiles(batch, spec, device)

    batch, cuts = steps((2, 1))
    shape = step_inputs.padded_shape(batch, cuts, spec)
    assert shape is not None
    assert (shape.rows, shape.outputs, shape.ends) == (16 if block == 4 else 64, 16, True)
    assert (shape.decode, shape.tiles > 0) == (not many, bool(many))
    inputs = step_inputs.PaddedInputs(shape, backend.padding_blocks, spec, device)
    inputs.fill(batch, cuts)
    backend.compute(inputs.step)
    batch, cuts = steps((0, 2))
    assert step_inputs.padded_shape(batch, cuts, spec) == shape
    expected = backend.compute(step_inputs.to_device(batch, spec, device))[1]
    inputs.fill(batch, cuts)
    assert torch.equal(backend.compute(inputs.step)[1][:4], expected)


def test_a_product_of_few_rows_has_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer of a prefill chunk that draws nothing has none, and no memory to read."""
    monkeypatch.setattr(few_rows, "available", lambda: True)
    weight = torch.zeros((64, 1024), dtype=torch.float16)
    taken = [rows for rows in range(40) if few_rows.takes(weight, rows)]
    assert taken == list(range(1, few_rows.FEW_ROWS + 1))


@pytest.mark.parametrize(("rows", "start"), [(1, 60), (1, 128), (1, 130), (3, 127), (16, 120)])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {"head_dim": 64}),  # norms of heads
        ("llama", {"head_dim": 128}),
        # delta nets, an output gate, one key head
        ("qwen35", {"head_dim": 256, "linear_key_head_dim": 64, "linear_value_head_dim": 64}),
    ],
)
def test_a_step_of_few_rows_has_the_bits_of_the_kernels_for_many(
    family: str, changes: dict[str, object], rows: int, start: int, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A token in the first or second span, and drafts; the MLP has four splits."""
    if not few_rows.available():
        pytest.skip("needs a Hopper GPU and a Triton with Gluon")
    sizes = {"hidden_size": 256, "intermediate_size": 1024, **FEW_HEADS, **changes}
    backend: Any = opened(tiny_model(family, **sizes))  # type: ignore[arg-type]
    spec, groups = backend.spec, len(backend.spec.groups)
    random = torch.Generator(device=device).manual_seed(1)
    for cache in (part for group in backend._memory.caches for part in group):
        cache.copy_(torch.randn(cache.shape, generator=random, device=device) / 4)
    caches = [part.clone() for group in backend._memory.caches for part in group]
    lines = step_inputs.tile_lines(spec, 1, device)
    inputs = GraphInputs(rows, 4, backend.padding_blocks, lines, device, spec)
    table = tuple(range(9))
    inputs.fill([SeqStep(0, tuple(range(3, 3 + rows)), start, (table,) * groups, rows)])
    found = []
    for available in (True, False):
        monkeypatch.setattr(few_rows, "available", lambda available=available: available)
        given = [part for group in backend._memory.caches for part in group]
        for part, before in zip(given, caches, strict=True):
            part.copy_(before)
        hidden, logits = backend.compute(inputs.step)
        found.append(torch.cat([part.flatten().float() for part in (hidden, logits, *given)]))
    assert torch.isfinite(found[0]).all()
    assert torch.equal(found[0], found[1])


def test_every_tile_of_a_matmul_has_the_same_sums(device: torch.device) -> None:
    """Exact sums: the interpreter adds in any order. The last row tile is not full; in a tile of
    two parts the first or the second part is not full. The interpreter runs these tiles alone."""
    random, others = np.random.default_rng(5), device.type == "cuda"
    for n, k in ((40, gpu_weights.BK // 2), (16, 4 * gpu_weights.BK)):  # one split, two
        weight, *inputs = (
            torch.from_numpy(random.integers(-2, 3, shape).astype(np.float16)).to(device)
            for shape in ((n, k), (150, k), (230, k))
        )
        splits = gpu_weights.split_k(n, k)[0]
        for x in inputs:
            expected = (x.float() @ weight.float().T).cpu()
            for tile in matmul_tile.all_tiles(splits, True):
                if tile.rows == 192 or (others and len(x) < 192):
                    sums = kernels.reduce_splits(kernels.matmul(x, weight, tile=tile))
                    assert torch.equal(sums.cpu(), expected), tile


@pytest.mark.parametrize(("rows", "tma"), [(3, False), (70, True), (150, True)])
def test_a_fused_activation_has_the_bits_of_its_own_kernel(
    rows: int, tma: bool, device: torch.device
) -> None:
    """Exact sums: the interpreter adds in any order."""
    random = np.random.default_rng(4)
    x, w = (
        torch.from_numpy(random.integers(-2, 3, shape).astype(np.float16) / 8).to(device)
        for shape in ((rows, 40), (2 * 24, 40))
    )
    assert kernels.can_fuse(w, "silu")
    assert not kernels.can_fuse(w, "gelu")
    assert not kernels.can_fuse(w.new_zeros(100, 512), "silu"), "its splits are not added up"
    expected = kernels.mlp_activation(kernels.matmul(x, w), "silu", True, torch.float16)
    tiles = [matmul_tile.choose_tile(rows, 48, 40, 1, tma)]
    assert tiles[0].tma == tma
    if rows > 128:
        tiles += [tile for tile in matmul_tile.tma_tiles(1) if tile.rows == 192]
    for tile in tiles:
        assert torch.equal(kernels.gated_matmul(x, w, "silu", torch.float16, tile), expected)


def test_out_of_memory_in_a_step_or_in_the_cache_is_an_error_that_says_what_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend: Any = opened(small("llama"))
    plan = StepPlan(
        0,
        (
            SeqStep(
                0, (9,), 0, ((0,),), draws=1, draw=DrawSpec(SamplingParams(temperature=0.0), 5, 1)
            ),
        ),
    )
    wanted = backend.execute(plan)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(backend, "_forward", full)
        with pytest.raises(DeviceMemoryError, match=r"a step did not fit .*lower kv_memory"):
            backend.execute(plan)
        with pytest.raises(DeviceMemoryError, match=r"a step did not fit .*lower kv_memory"):
            backend.launcher.launch(plan.sequences)
    assert backend.execute(plan) == wanted
    other: Any = open_backend(small("llama"), EngineConfig(backend="cuda"))
    monkeypatch.setattr(cache_memory, "empty_kv", full)
    with pytest.raises(DeviceMemoryError, match=r"the KV cache of 0\.0 GB does not fit; lower"):
        other.allocate((BLOCKS,))
    backend.close()
    backend.close()  # twice is once


def test_graphs_of_steps_with_prompts_are_dropped_least_recently_used_first(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = opened(small("llama", **FEW_HEADS))
    captured: list[Any] = []
    now: list[Any] = []

    class FakeGraph:
        def __init__(self, inputs: Any, *_: object) -> None:
            self.inputs = inputs
            captured.append(now[0])

        def replay(self) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.zeros(1, 1), torch.zeros(1, 1)

    monkeypatch.setattr(step_graphs, "StepGraph", FakeGraph)
    monkeypatch.setattr(step_graphs, "MAX_PADDED_GRAPHS", 2)
    monkeypatch.setattr(step_graphs, "cut_tiles", lambda *_: {})
    monkeypatch.setattr(
        step_graphs, "PaddedInputs", lambda *_: SimpleNamespace(fill=lambda *_: None)
    )
    shapes = [step_inputs.StepShape(64 * (i + 1), 4, 4, 1) for i in range(3)]
    monkeypatch.setattr(step_graphs, "padded_shape", lambda *_: now[0])
    batch = SimpleNamespace(outputs=[0])
    for i in (0, 0, 1, 1, 0, 2, 2, 0, 1):  # the second time captures; 2 replaces 1
        now[:] = [shapes[i]]
        backend._graphs._replay_padded(backend.compute, batch)
    assert captured == [shapes[i] for i in (0, 1, 2, 1)]
    assert list(backend._graphs._of_shapes) == [shapes[0], shapes[1]]


def test_a_value_beyond_float16_does_not_change_the_rows_before_it(device: torch.device) -> None:
    """Two rows of one tile: the first does not see the second, whose value overflows."""
    kv = KvLayer(*(torch.zeros((1, 1, 16, 16), dtype=torch.float16, device=device) for _ in "kv"))
    qkv = torch.ones((2, 48), device=device)
    qkv[1, 32:] = 1e6
    rows = torch.arange(2, dtype=torch.int32, device=device)
    given = kernels.Heads(None, 0.0, 0.0, None, rows)
    kernels.qkv_rope_cache(kernels.SplitSums(qkv[None]), given, kv, rows)
    assert kv.values[0, 0, :2, 0].tolist() == [1.0, 65504.0]
    one, two, zero = (torch.tensor([n], dtype=torch.int32, device=device) for n in (1, 2, 0))
    table, q = torch.zeros((1, 1), dtype=torch.int32, device=device), torch.ones_like(qkv[:, :16])
    found = [
        kernels.attend(
            q[: int(count)], kv, [kernels.QueryTiles(table, zero, count, zero, 16, 2)], 1, 1.0, 0.0,
            None, torch.float32,
        )[0]
        for count in (one, two)
    ]  # fmt: skip
    assert torch.equal(*found)
    assert torch.isfinite(found[0]).all()


@pytest.mark.parametrize("norm_last", [False, True])
def test_the_heads_per_program_of_norm_and_rope_keep_the_bits(
    norm_last: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows of 6 query and 2 KV heads of 48 values, of which RoPE rotates 32."""
    generator = torch.Generator().manual_seed(5)
    qkv, weights, cos, sin = (
        torch.randn(shape, generator=generator).to(device)
        for shape in ((3, 2, 480), (2, 48), (9, 16), (9, 16))
    )
    positions, slots = (
        torch.tensor(n, dtype=torch.int32, device=device) for n in ([3, 8], [20, 1])
    )
    found = []
    for heads in (1, 4, 16):
        monkeypatch.setattr(kernels, "heads_per_program", lambda block, heads=heads: heads)
        half = torch.float16
        kv = KvLayer(*(torch.zeros((2, 2, 16, 48), dtype=half, device=device) for _ in "kv"))
        norms = (weights[0], weights[1])
        sums = kernels.SplitSums(qkv)
        given = kernels.Heads(norms, 1e-6, 0.0, (cos, sin), positions, norm_last)
        q = kernels.qkv_rope_cache(sums, given, kv, slots)
        found.append(torch.cat([q.flatten(), kv.keys.flatten(), kv.values.flatten()]))
    assert torch.count_nonzero(found[0]) == 2 * 480
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("family", ["llama", "qwen35"])
def test_a_draft_that_is_not_finite_does_not_change_the_draw_before_it(family: str) -> None:
    """The draft shares a step with a prompt, so no graph with a tile per row holds it."""
    backend: Any = opened(small(family, **FEW_HEADS))
    backend.weights["embed"][7] = torch.nan
    spec = DrawSpec(SamplingParams(temperature=0, logprobs=2), 5, 1)
    groups = len(backend.spec.groups)
    prompt = SeqStep(0, tuple(TOKENS), 0, ((1,),) * groups, 1, spec)

    def draws(draft: int) -> tuple[Drawn, ...]:
        drafted = SeqStep(1, (9, draft), 0, ((2,),) * groups, 2, spec)
        result: StepResult = backend.execute(StepPlan(0, (prompt, drafted)))
        return result.sequences[1].drawn

    found = draws(7)
    assert found[0] == draws(8)[0]
    assert found[1].token == BROKEN


@pytest.mark.parametrize("blocks", [False, True])
def test_compiling_ahead_launches_every_tile(blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the first matrix is a head of an odd number of ids, which has no gate and up, and if
    the weights stay in their blocks."""
    changes: dict[str, object] = {"vocab_size": 261, "tie_word_embeddings": True}
    if blocks:
        monkeypatch.setattr(cuda_backend.CudaBackend, "available_memory", lambda _: 0)
        changes = {**FEW_HEADS, "type": "q8_0", "head_dim": 64, "hidden_size": 64}
        changes["intermediate_size"] = 64
    backend = opened(small("llama", **changes))
    launched, fused = set(), set()

    def matmul(x: Any, weight: Any, bias: Any = None, tile: Any = None, **_: Any) -> Any:
        launched.add(tile)
        return kernels.SplitSums(torch.zeros((1, len(x), len(weight)), device=x.device), bias)

    def gated_matmul(x: Any, weight: Any, kind: str, dtype: Any, tile: Any = None, **_: Any) -> Any:
        fused.add(tile)
        assert len(weight) % 2 == 0
        return torch.zeros((len(x), len(weight) // 2), device=x.device, dtype=dtype)

    monkeypatch.setattr(kernels, "matmul", matmul)
    monkeypatch.setattr(kernels, "gated_matmul", gated_matmul)
    monkeypatch.setattr(kernel_compile, "STEPS", ())
    kernel_compile.compile_kernels(backend, 4096)  # type: ignore[arg-type]
    chosen = set()
    for n, k in ((64, 1024), (576, 64)):
        splits = gpu_weights.split_k(n, k)[0]
        chosen |= {matmul_tile.choose_tile(m, n, k, splits, True) for m in range(1, 4200, 37)}
    assert len(chosen) > 5
    assert {tile._replace(parallel=1) for tile in chosen} <= {
        tile._replace(parallel=1) for tile in launched if tile is not None
    }
    assert set(matmul_tile.all_tiles(1, True)) <= fused


def test_compiling_ahead_runs_the_steps_of_mixtures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every height of expert tiles that a step can have."""
    backend: Any = opened(small("mixtral"))
    rows: list[int] = []
    monkeypatch.setattr(kernel_compile, "matrices", lambda *_, **__: [])
    monkeypatch.setattr(backend, "compute", lambda step: rows.append(len(step.tokens)))
    for step_tokens, heights in ((8192, {16, 64, 128}), (200, {16, 64})):
        rows.clear()
        kernel_compile.compile_kernels(backend, step_tokens)
        assert {experts.tile_height(2 * count, 4) for count in rows} == heights
        assert max(rows) == min(step_tokens, 4096)


def test_warming_up_executes_the_steps_of_a_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("llama")
    backend: Any = opened(replace(model, adapters=(tiny_adapter(model.spec),)))
    executed: list[StepPlan] = []
    monkeypatch.setattr(kernel_compile, "compile_kernels", lambda backend, step_tokens: None)
    monkeypatch.setattr(backend, "execute", executed.append)
    penalty = SamplingParams(repetition_penalty=1.1)
    kernel_compile.compile_all(backend, [penalty], max_running=4)
    prompts = [plan for plan in executed if plan.rows > len(plan.sequences)]
    assert [plan.rows for plan in prompts] == [10, 10, 102, 102]
    assert {len(plan.sequences) for plan in executed} == {1, 3, 4}
    for plan in executed:  # every sequence has its own blocks
        blocks = [block for step in plan.sequences for block in step.blocks[0]]
        assert len(set(blocks)) == len(blocks)
        assert max(blocks) < backend.padding_blocks[0]
    steps = [plan.sequences[0] for plan in executed]
    assert {step.adapter for step in steps} == {-1, 0}
    drawn = [step.draw.params for step in steps if step.draw is not None]
    assert set(drawn) == {*kernel_compile.SAMPLERS, penalty}
    # the device samples all of them, so their kernels are compiled
    assert all(backend.gpu_sampler.supports(step.draw) for step in steps)
    monkeypatch.undo()
    for plan in (prompts[0], next(plan for plan in executed if len(plan.sequences) == 3)):
        assert all(one.drawn[0].token >= 0 for one in backend.execute(plan).sequences)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    # the large steps do not fit: the kernels of the other steps are compiled nevertheless
    monkeypatch.setattr(kernel_compile, "compile_kernels", full)
    again: list[StepPlan] = []
    monkeypatch.setattr(backend, "execute", again.append)
    with pytest.raises(DeviceMemoryError):
        kernel_compile.compile_all(backend, [penalty], max_running=4)
    assert again == executed
    monkeypatch.setattr(backend, "execute", full)
    with pytest.raises(DeviceMemoryError):
        kernel_compile.compile_all(backend)


def test_a_step_that_no_graph_holds_has_no_padded_shape(device: torch.device) -> None:
    backend: Any = opened(small("llama"))

    def shape_of(*sequences: SeqStep) -> Any:
        batch = make_batch(StepPlan(0, sequences), 1)
        cuts = step_inputs.cut_tiles(batch, backend.spec, device)
        return step_inputs.padded_shape(batch, cuts, backend.spec)

    prompt = SeqStep(0, tuple(range(40)), 0, ((1, 2, 3),), draws=1)
    assert shape_of(prompt) is not None
    assert shape_of(prompt._replace(draws=0)) is None, "no logits"
    assert shape_of(prompt._replace(hidden=True)).all_rows
    decode = [SeqStep(i, (1,), 0, ((i,),), draws=1) for i in range(1, 258)]
    assert shape_of(prompt, *decode[:255]).outputs == 256
    assert shape_of(prompt, *decode) is None, "more logits than a graph has"
    many = [prompt._replace(seq_id=i) for i in range(200)]
    assert shape_of(*many) is None, "more tiles that are not full"
    longest = SeqStep(0, (1,) * step_inputs.MAX_ROWS, 0, (tuple(range(600)),), draws=1)
    assert shape_of(longest) is not None
    assert shape_of(longest, decode[0]) is None, "more rows than the host's launches delay"


def test_the_inputs_of_a_step_start_at_multiples_of_16_bytes(device: torch.device) -> None:
    """Otherwise Triton compiles another kernel, in the middle of a run."""
    backend: Any = opened(small("llama"))
    sequences = [
        SeqStep(i, tuple(range(n)), 0, ((i, i + 9, i + 18),), draws=1)
        for i, n in enumerate((40, 1, 17, 1, 1))
    ]
    batch = make_batch(StepPlan(0, tuple(sequences)), 1)
    cuts = step_inputs.cut_tiles(batch, backend.spec, device)
    shape = step_inputs.padded_shape(batch, cuts, backend.spec)
    assert shape is not None
    padded = step_inputs.PaddedInputs(shape, backend.padding_blocks, backend.spec, device).step
    for step in (step_inputs.to_device(batch, backend.spec, device), padded):
        first = step.tokens.data_ptr()
        tensors = [step.positions, step.outputs, *step.slots]
        for tiles in step.tiles[0]:
            tensors += [tiles.table, tiles.first_row, tiles.count, tiles.first_position]
        assert all((tensor.data_ptr() - first) % 16 == 0 for tensor in tensors)


# ---- weights in blocks


def block_tensor(type: str, rows: int, k: int) -> Tensor:
    """A weight of random codes whose scales are small integers, so that sums are exact."""
    random = np.random.default_rng(rows)
    values, size = BLOCK_SIZES[type]
    raw = random.integers(0, 256, (rows, k // values, size), dtype=np.uint8)
    halves = dict.fromkeys(("q4_0", "q8_0", "q5_0"), (0,)) | {"q6_k": (208,)}
    if type == "mxfp4":
        raw[..., 0] = random.integers(126, 129, raw.shape[:2])
        return Tensor("w", type, (rows, k), raw.reshape(-1))
    if type in CHECKPOINT_TYPES:
        return checkpoint_tensor(raw, CHECKPOINT_TYPES[type], random)
    for at in halves.get(type, (0, 2)):
        scale = random.integers(1, 3, (rows, k // values, 1)).astype("<f2")
        raw[..., at : at + 2] = scale.view(np.uint8)
    return Tensor("w", type, (rows, k), raw.reshape(-1))


def checkpoint_tensor(raw: np.ndarray, kind: CheckpointType, random: np.random.Generator) -> Tensor:
    """Scales with all bits of their type, and zero points."""
    rows, count, _ = raw.shape
    scale = random.uniform(0.001, 0.002, (rows, count)).astype(np.float32)
    size = kind.scale_bytes
    raw[..., :size] = to_type(scale, kind.scale_type).reshape(rows, count, size)
    if kind.zero:
        zero = random.integers(-8, 8, (rows, count)).astype("<f2")
        raw[..., size : size + 2] = zero[..., None].view(np.uint8)
    if kind.code == "e4m3":
        codes = raw[..., size:]
        codes[codes & 127 == 127] = 1  # NaN
    return Tensor("w", kind.name, (rows, count * kind.group), raw.reshape(-1))


def half_values(tensor: Tensor) -> torch.Tensor:
    """Tensor.to_f32() in the type of the unpacked weight, in float32."""
    values = torch.from_numpy(tensor.to_f32())
    return values.to(HALVES[gpu_weights.BLOCK_FORMATS[tensor.type].result]).float()


# types with another group or result have the code of these; 896 and 160: smaller packs
BLOCK_CASES = [
    *[(type, 512) for type in READERS if type not in CHECKPOINT_TYPES],
    ("q4_0", 160), ("e4m3_128_bf16", 512), ("e4m3_32_f32", 160), ("i4_128_bf16", 896),
    ("i4z_128_f16", 512), ("i4z_32_bf16", 160), ("i8z_128_bf16", 512), ("i4_128_f32", 512),
]  # fmt: skip


@pytest.mark.parametrize(("type", "k"), BLOCK_CASES)
def test_weights_in_blocks_have_the_values_of_the_file(
    type: str, k: int, device: torch.device
) -> None:
    tensor = block_tensor(type, 9, k)
    expected = half_values(tensor)
    weight = quant.to_blocks(tensor, device)
    assert quant.unpack(weight).dtype == weight.dtype
    assert torch.equal(quant.unpack(weight).cpu().float(), expected)
    found = gpu_weights.device_bytes({"layers.0.mlp.up": tensor}, "only")
    assert weight.nbytes == found["layers.0.mlp.up"].held
    chosen = torch.tensor([8, 0, 3], dtype=torch.int32, device=device)
    assert torch.equal(quant.unpack(weight, rows=chosen).cpu().float(), expected[[8, 0, 3]])


@pytest.mark.parametrize(
    ("type", "rows", "n", "k"),
    [
        ("q4_1", 1, 70, 512),
        ("q6_k", 18, 70, 512),
        ("q4_k", 2, 300, 256),
        ("e4m3_128_bf16", 2, 70, 512),
        ("i4z_128_bf16", 2, 70, 512),
        ("i8_32_bf16", 1, 70, 128),
    ],
)
def test_a_matmul_in_blocks_has_the_bits_of_an_unpacked_one(
    type: str, rows: int, n: int, k: int, device: torch.device
) -> None:
    """Weights with two splits and with one. Exact sums: the interpreter adds in any order."""
    weight = quant.to_blocks(block_tensor(type, n, k), device)
    if type in CHECKPOINT_TYPES:
        weight.scales.copy_(torch.randint(1, 3, weight.scales.shape))
    if type.startswith("e4m3"):  # below 2 before the scale
        weight.codes.bitwise_and_(0b10111111)
    x = torch.from_numpy(np.random.default_rng(3).integers(-2, 3, (rows, k)).astype(np.float16))
    x = x.to(weight.dtype)
    assert quant.in_kernel(weight, rows)
    expected = kernels.matmul(x.to(device), quant.unpack(weight))
    got = quant.matmul(x.to(device), weight)
    assert torch.equal(kernels.reduce_splits(got), kernels.reduce_splits(expected))


def with_types(model: Model, types: dict[str, str]) -> Model:
    """The model with random matrices of these types, by the end of their name."""
    tensors = dict(model.weights)
    for name, tensor in tensors.items():
        type = next((type for end, type in types.items() if name.endswith(end)), None)
        if type is not None:
            made = block_tensor(type, tensor.rows, tensor.shape[-1])
            tensors[name] = Tensor(name, type, tensor.shape, made.data)
    return replace(model, weights=replace(model.weights, tensors=tensors))


def unpacked(model: Model) -> Model:
    tensors = {name: without_checkpoint_blocks(t) for name, t in model.weights.items()}
    return replace(model, weights=replace(model.weights, tensors=tensors))


# q, k, v and gate, up have one format, or two of which the first must be unpacked
CHECKPOINT_LAYERS = {
    "attn.q": "i4z_32_bf16", "attn.k": "i4z_32_bf16", "attn.v": "i4z_32_bf16",
    "attn.o": "e4m3_32_bf16", "mlp.gate": "i4_32_bf16", "mlp.up": "i8_32_bf16",
    "mlp.down": "i8z_32_bf16", "moe.gate": "e4m3_32_bf16", "moe.up": "e4m3_32_bf16",
    "moe.down": "i4z_32_bf16", "embed": "e4m3_32_bf16",
}  # fmt: skip


KEPT = (
    "embed", "layers.0.attn.q+k+v", "layers.0.attn.o", "layers.0.mlp.down",
    "layers.0.moe.gate+up", "layers.0.moe.down",
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "size"), [("llama", "intermediate_size"), ("qwen3moe", "moe_intermediate_size")]
)
def test_a_quantised_checkpoint_in_blocks_has_the_bits_of_the_unpacked_one(
    family: str, size: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits, too, except under the interpreter, where sums depend on the shape of a product.
    Matrices of two formats that one matmul reads are unpacked."""
    shape = {**FEW_HEADS, "head_dim": 64, "hidden_size": 64, size: 64}
    model = with_types(small(family, **shape), CHECKPOINT_LAYERS)
    for blocks in ("both", "only"):
        found = load(model.weights, model.spec, device, blocks)
        plain = load(unpacked(model).weights, model.spec, device, "unpacked")
        for name, weight in found.items():
            kept = isinstance(weight, quant.BlockWeight)
            assert kept == (name in KEPT), name
            assert torch.equal(quant.unpack(weight) if kept else weight, plain[name]), name
    monkeypatch.setattr(cuda_backend.CudaBackend, "available_memory", lambda _: 0)
    backend, other = opened(model), opened(unpacked(model))
    assert backend.info.numerics == other.info.numerics
    ours, theirs = run_alone(backend, TOKENS[:3]), run_alone(other, TOKENS[:3])
    assert device.type == "cpu" or same_bits(ours, theirs)
    assert np.allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=0.02)


def test_a_model_that_stays_in_its_blocks_agrees_with_the_reference(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory for float16 weights, few rows are multiplied in blocks, more through the
    buffer, and the embedding's rows are unpacked."""
    model = small("llama", type="q4_0")
    expected = run_alone(opened(model), TOKENS) if device.type == "cuda" else None
    monkeypatch.setattr(cuda_backend.CudaBackend, "available_memory", lambda _: 0)
    monkeypatch.setattr(quant, "ROWS", (16,))
    backend: Any = opened(model)
    held = [w for w in backend.weights.values() if isinstance(w, quant.BlockWeight)]
    assert held
    assert all(weight.unpacked is None for weight in held)
    assert difference(model, [*TOKENS, *TOKENS]) < 0.02
    if expected is not None:  # the interpreter adds in another order
        assert same_bits(expected, run_alone(backend, TOKENS))


def test_a_gpu_that_permutes_inputs_unpacks_every_weight_before_its_matmul(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a result would depend on the number of rows, which chooses between the two."""
    for module in (quant, device_weights):
        monkeypatch.setattr(module, "unpacks_in_order", lambda: False)
    model = small("llama", type="q4_0", tie_word_embeddings=False)
    held = load(model.weights, model.spec, device, "only")
    blocks = [w for w in held.values() if isinstance(w, quant.BlockWeight)]
    assert blocks
    assert all(w.buffer is not None and not quant.in_kernel(w, 1) for w in blocks)
    held = load(model.weights, model.spec, device, "both")
    assert not any(isinstance(w, quant.BlockWeight) for w in held.values())


# ---- overlapped decoding


def open_fake_model(windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cuda backend with the fake model and its canary as its forward pass: the interpreter would
    take minutes for a batch of real ones."""
    backend: Any = open_backend(small("llama"), EngineConfig(backend="cuda"))
    fake = FakeBackend(fake_spec(windows=windows), canary=True)
    execute = backend.execute

    def forward(
        plan: StepPlan, tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = []
        for i, step in enumerate(plan.sequences):
            known = step if tokens is None else step._replace(tokens=(int(tokens[i]),))
            fake._sequence(known._replace(draws=0))
            rows += [
                fake.logits(fake._read(step, 0, at)[2])
                for at in range(step.end - step.draws, step.end)
            ]
        logits = torch.from_numpy(np.array(rows, np.float32).reshape(-1, fake.spec.vocab))
        return torch.zeros((len(rows), 1), device=backend.device), logits.to(backend.device)

    def execute_copies(plan: StepPlan) -> StepResult:
        for group, source, target in plan.copies:
            fake.slots[group][target] = list(fake.slots[group][source])
        return execute(plan._replace(copies=()))  # type: ignore[no-any-return]

    for name, value in (
        ("_forward", forward),
        ("execute", execute_copies),
        ("allocate", fake.allocate),
        ("spec", fake.spec),
        ("_memory", cache_memory.CacheMemory(fake.spec, "f16", backend.device)),
    ):
        monkeypatch.setattr(backend, name, value)
    return backend


def test_overlapped_decoding_does_not_change_the_tokens(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = (None, 20)  # full attention and a sliding window
    if device.type == "cpu":
        # fewer programs for the interpreter; compiled, 16 rows would not fit into registers
        monkeypatch.setattr(gpu_sampler, "ROWS", 16)
        monkeypatch.setattr(gpu_sampler, "CHUNK", 512)
        monkeypatch.setattr(device_filters, "CHUNK", 512)
    monkeypatch.setattr(sampling_plan, "SLACK", 0.3)  # many rows are undecided and computed again
    without_resolving_ties(monkeypatch)
    plain, ahead = open_fake_model(windows, monkeypatch), open_fake_model(windows, monkeypatch)
    plain._can_overlap = False
    rows = count_rows(monkeypatch)
    assert generate_all(ahead, random.Random(3)) == generate_all(plain, random.Random(3))
    assert 30 < rows.matched < rows.launched, "some rows match the plan, and some are discarded"


def test_a_full_garbage_collection_does_not_visit_the_objects_of_pytorch() -> None:
    """It would stop the host for 110 ms, in which no step is launched."""
    backend = opened(small("llama"))
    assert gc.get_freeze_count() > 10_000
    backend.close()
    assert gc.get_freeze_count() == 0


def test_an_open_backend_is_not_frozen_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """nanobind would report the frozen objects of the host sampler as leaked."""
    at_exit: list[Any] = []
    monkeypatch.setattr(cuda_backend.atexit, "register", at_exit.append)
    backend = opened(small("llama"))
    for function in at_exit:
        function()
    assert gc.get_freeze_count() == 0
    backend.close()


@pytest.mark.parametrize("blocks", ["both", "only"])
@pytest.mark.parametrize("type", ["f32", "q4_0", "q8_0", "q4_k"])
def test_the_planned_bytes_are_those_on_the_device(
    type: str, blocks: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q4_k: with some weights in q6_k, as in files named q4_k_m. The values do not matter here."""

    def unpack(weight: quant.BlockWeight) -> torch.Tensor:
        return torch.empty(weight.shape, dtype=torch.float16, device=device)

    monkeypatch.setattr(quant, "unpack", unpack)
    model = small("llama", type=type, hidden_size=512, intermediate_size=512)
    weights = dict(model.weights)
    if type == "q4_k":
        for name in ("layers.0.attn.v", "layers.0.mlp.down"):
            weights[name] = requantise(weights[name], "q6_k")
    loaded = load(weights, model.spec, device, blocks)
    found = gpu_weights.device_bytes(weights, blocks)
    read = sum(weight.nbytes for weight in loaded.values())
    assert sum(size.read for size in found.values()) == read
    copies = [getattr(weight, "unpacked", None) for weight in loaded.values()]
    more = sum(copy.nbytes for copy in copies if copy is not None)
    assert sum(size.held for size in found.values()) == read + more


# ---- mixtures of experts


def ordered_sum(x: torch.Tensor) -> torch.Tensor:
    total = x[:, :1].clone()
    for i in range(1, x.shape[1]):
        total += x[:, i : i + 1]
    return total


def test_a_router_has_the_same_bits_for_any_number_of_rows(device: torch.device) -> None:
    """Tiles of 2, 8, 32 and 64 rows. The interpreter adds in any order, so the values are integers
    there."""
    random = np.random.default_rng(8)
    x = torch.from_numpy(random.integers(-3, 4, (600, 300)).astype(np.float32)).to(device)
    weight = torch.from_numpy(random.integers(-3, 4, (20, 300)).astype(np.float32)).to(device)
    if device.type == "cuda":
        x, weight = torch.randn_like(x), torch.randn_like(weight)
    found = [kernels.reduce_splits(kernels.matmul(x[:n], weight)) for n in (2, 30, 70, 600)]
    assert all(torch.equal(one, found[-1][: len(one)]) for one in found)
    assert torch.allclose(found[-1], x @ weight.T, atol=1e-4)


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_experts_are_chosen_as_a_stable_sort_does(router: Any, device: torch.device) -> None:
    """Equal scores: the expert with the lower number is first. Shares have the bits of PyTorch's
    element-wise operations."""
    random = np.random.default_rng(3)
    scores = torch.from_numpy(random.integers(1, 9, (6, 20)).astype(np.float32) / 7).to(device)
    bias = torch.from_numpy(random.integers(0, 3, 20).astype(np.float32)).to(device)
    scales = torch.from_numpy(random.random(20, np.float32)).to(device)
    spec = replace(
        small("qwen3moe").spec,
        router=router, experts_used=5, experts_scale=1.7, experts_renormalised=router == "softmax",
    )  # fmt: skip
    chosen, shares = experts.choose(scores, spec, bias, scales)
    if router == "softmax":
        scores = scores / ordered_sum(scores)
    wanted = torch.sort(scores + bias, dim=1, descending=True, stable=True)[1][:, :5]
    best = scores.gather(1, wanted)
    if router == "softmax":
        best = best / ordered_sum(best)
    assert torch.equal(chosen, wanted.int())
    assert torch.equal(shares, best * 1.7 * scales[wanted])


def test_experts_are_chosen_in_the_best_groups(device: torch.device) -> None:
    """By the sum of a group's two best; equal sums: the lower group. PyTorch's stable sorts."""
    random = np.random.default_rng(4)
    scores = torch.from_numpy(random.integers(1, 9, (40, 20)).astype(np.float32)).to(device)
    groups = scores.view(40, 5, 4)
    sums = torch.sort(groups, dim=2)[0][:, :, 2:].sum(2)
    kept = torch.sort(sums, dim=1, descending=True, stable=True)[1][:, :2]
    outside = torch.ones(40, 5, dtype=torch.bool, device=device).scatter(1, kept, False)
    left = groups.masked_fill(outside[:, :, None], -torch.inf).view(40, 20)
    wanted = torch.sort(left, dim=1, descending=True, stable=True)[1][:, :3]
    spec = replace(
        small("qwen3moe").spec,
        router="sigmoid", experts_used=3, expert_groups=5, expert_groups_used=2,
    )  # fmt: skip
    chosen, _ = experts.choose(scores, spec, None, None)
    assert torch.equal(chosen, wanted.int())
    scores[3] = torch.nan  # experts that exist
    assert experts.choose(scores, spec, None, None)[0][3].tolist() == [0, 1, 2]


def test_scores_that_are_no_numbers_choose_experts_that_exist(device: torch.device) -> None:
    spec = replace(small("qwen3moe").spec, experts_used=3)
    scores = torch.full((2, 5), torch.nan, device=device)
    chosen, _ = experts.choose(scores, spec, None, None)
    assert chosen.tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("rows", [1, 700])
def test_rows_are_sorted_by_expert_into_whole_tiles(
    rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pick has its own line in a tile of its expert; all others are padding."""
    monkeypatch.setattr(experts, "SORT_BLOCK", 512)
    used, count = 3, 11
    random = np.random.default_rng(rows)
    chosen = np.argsort(random.random((rows, count - 1)), axis=1)[:, :used].astype(np.int32)
    tiles = experts.sort(torch.from_numpy(chosen).to(device), count)
    assert tiles.height == (16 if rows == 1 else 128)
    place, source = tiles.place.cpu().numpy(), tiles.rows.cpu().numpy()
    owners = np.repeat(tiles.experts.cpu().numpy(), tiles.height)
    assert np.array_equal(owners[place], chosen)
    assert np.array_equal(source[place], np.repeat(np.arange(rows), used).reshape(rows, used))
    assert len(np.unique(place)) == rows * used
    inside = owners >= 0
    lines = tiles.lines.cpu().numpy()
    assert np.array_equal(lines[inside] >= 0, source[inside] >= 0)
    assert np.array_equal(lines[place], place)
    assert (source[inside] >= 0).sum() == rows * used
    counts = np.bincount(chosen.reshape(-1), minlength=count)
    assert inside.sum() == (-(-counts // tiles.height) * tiles.height).sum()


@pytest.mark.parametrize(
    ("type", "height"),
    [("mxfp4", 16), ("q8_0", 64), pytest.param("q4_1", 128, marks=MARKS["cuda"])],  # 2 s
)
def test_experts_in_blocks_have_the_bits_of_unpacked_ones(
    type: str, height: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gate and up of three experts, joined; with several splits and with one. Exact sums: the
    interpreter adds in any order."""
    monkeypatch.setattr(experts, "tile_height", lambda *_: height)
    random = np.random.default_rng(6)
    for n, k in ((64, 512), (128, 128)):
        made = [block_tensor(type, 3 * n, k), block_tensor(type, 3 * n, k)]
        parts = [quant.to_blocks(replace(one, shape=(3, n, k)), device) for one in made]
        weight = quant.join(parts)
        assert weight is not None
        assert torch.equal(quant.unpack(weight), torch.cat([quant.unpack(w) for w in parts], 1))
        x = torch.from_numpy(random.integers(-2, 3, (9, k)).astype(np.float32))
        x = x.to(device, weight.dtype)
        chosen = torch.from_numpy(random.integers(0, 3, (9, 1)).astype(np.int32)).to(device)
        tiles = experts.sort(chosen, 3)
        found = quant.expert_matmul(x, weight, tiles, tiles.rows)
        wanted = kernels.expert_matmul(x, quant.unpack(weight), tiles, tiles.rows)
        place = tiles.place[:, 0].long()
        assert torch.equal(found[place], wanted[place])


@pytest.mark.parametrize("height", [64, 128])
def test_the_height_of_an_expert_tile_changes_no_bit(
    height: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small integers: the interpreter adds in any order, and all sums are exact."""
    random = np.random.default_rng(5)
    x = torch.from_numpy(random.integers(-2, 3, (9, 256)).astype(np.float16)).to(device)
    weight = torch.from_numpy(random.integers(-2, 3, (4, 70, 256)).astype(np.float16)).to(device)
    chosen = torch.from_numpy(random.integers(0, 4, (9, 1)).astype(np.int32)).to(device)
    found, fused = [], []
    for tall in (16, height):
        monkeypatch.setattr(experts, "tile_height", lambda *_, tall=tall: tall)
        tiles = experts.sort(chosen, 4)
        lines = kernels.expert_matmul(x, weight, tiles, tiles.rows)
        found.append(experts.add(lines, tiles, torch.ones((9, 1), device=device)))
        inner = kernels.expert_matmul(x, weight, tiles, tiles.rows, "relu2")
        fused.append(experts.add(inner, tiles, torch.ones((9, 1), device=device)))
    assert torch.equal(found[0], found[1])
    wanted = torch.einsum("rk,rnk->rn", x.float(), weight[chosen[:, 0].long()].float())
    assert torch.equal(found[0], wanted)
    gated = torch.relu(wanted[:, :35]) ** 2 * wanted[:, 35:]
    assert torch.equal(fused[0], gated)
    assert torch.equal(fused[0], fused[1])


# ---- the GPU sampler

VOCAB = 701  # three chunks of the size set for the interpreter, the last one short


@pytest.fixture
def sampler(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> GpuSampler:
    if device.type == "cpu":  # the interpreter's time depends on the number of programs
        monkeypatch.setattr(gpu_sampler, "ROWS", 1024)
        monkeypatch.setattr(gpu_sampler, "CHUNK", 256)
        monkeypatch.setattr(gpu_sampler, "GROUP", 4)
        monkeypatch.setattr(device_filters, "CHUNK", 256)
    return GpuSampler(VOCAB, device)


def rows_at(random: np.random.Generator, temperatures: np.ndarray) -> list[Row]:
    """One row per temperature, with a random key and position."""
    params = {t: SamplingParams(temperature=float(t)) for t in set(temperatures.tolist())}
    keys, positions = (
        random.integers(0, 2**64, len(temperatures), np.uint64),
        random.integers(0, 2**31, len(temperatures)),
    )
    return [
        Row(DrawSpec(params[t], int(k), 1), int(p))
        for t, k, p in zip(temperatures.tolist(), keys, positions, strict=True)
    ]


def tokens_of(sampler: GpuSampler, logits: np.ndarray, rows: list[Row]) -> list[int]:
    """Token ids of the rows, each of its own sequence; -1 where the host must sample."""
    drawn = sampler(torch.from_numpy(logits).to(sampler.device), rows, list(range(len(rows))))
    return [-1 if one is None else one.token for one in drawn]


@triton.jit
def gumbel_of(high, low, out, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(
        out + i,
        jit_numerics.gumbel(
            tl.load(high + i).to(tl.uint32, bitcast=True),
            tl.load(low + i).to(tl.uint32, bitcast=True),
        ),
    )


def test_gpu_noise_is_within_its_error_bound(device: torch.device) -> None:
    """The bound of docs/numerics.md, at random bits and at the edges: u near 0, near 1, and where
    the logarithm changes its form."""
    random, size = np.random.default_rng(0), 1 << 15
    edges = np.array(
        [
            0,
            1,
            2,
            3,
            0x7FFFFFFF,
            0xB504F333,
            0xFFFFFFFE,
            0xFFFFFFFF,
            0x5E2D58D8,
            *(1 << np.arange(32)),
        ],
        np.uint64,
    )
    near = (edges[:, None] + np.arange(-64, 64).astype(np.uint64)).ravel()
    high = (
        np.concatenate(
            [near, near, near, random.integers(0, 2**32, size - 3 * len(near), np.uint64)]
        )
        & 0xFFFFFFFF
    )
    low = np.where(
        np.arange(len(high)) < len(near), 0, random.integers(0, 2**32, len(high), np.uint64)
    )
    low[len(near) : 2 * len(near)] = 0xFFFFFFFF
    exact = -log(
        -log((((high << np.uint64(32) | low) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)
    )
    given = [
        torch.from_numpy(half.astype(np.uint32).view(np.int32)).to(device) for half in (high, low)
    ]
    out = torch.empty(size, device=device)
    each = size if device.type == "cpu" else 1024
    gumbel_of[(size // each,)](*given, out, each)
    assert exact.max() > 36.7
    assert exact.min() < -3.6
    error = np.abs(out.cpu().numpy().astype(np.float64) - exact) * 2**24
    assert (error < 23 + 3 * np.abs(exact)).all()


@triton.jit
def noise_of(words, out, FIRST, N: tl.constexpr):
    at = words + tl.arange(0, 1)[:, None]
    k0, k1 = tl.load(at).to(tl.uint32, bitcast=True), tl.load(at + 1).to(tl.uint32, bitcast=True)
    position = tl.load(at + 2).to(tl.uint32, bitcast=True)
    step = tl.load(at + 3).to(tl.uint32, bitcast=True)
    noise = jit_numerics.gumbel_noise(FIRST, position, k0, k1, N, step)
    tl.store(out + tl.arange(0, N)[None, :], noise)


@pytest.mark.parametrize(
    ("key", "position", "step", "first"),
    [
        (0xC949274536500FEE, 8937, 0, 0),
        (0x1FFFFFFFE, 2147419381, 0, 151_000),
        (0x1FFFFFFFE, 2147423567, 0, 151_000),
        (0xC949274536500FEE, 8937, 3, 0),
    ],
)
def test_gpu_noise_uses_all_bits_of_key_position_and_id(
    key: int, position: int, step: int, first: int, device: torch.device
) -> None:
    """At these positions the u of an even or an odd id is within 4e-7 of 1, where the lowest bits
    matter."""
    words = np.array([key & 0xFFFFFFFF, key >> 32, position, step], np.uint32).view(np.int32)
    out = torch.empty((1, 1024), device=device)
    noise_of[(1,)](torch.from_numpy(words).to(device), out, first // 2, 1024)
    exact = gumbel(key, position | step << 32, np.arange(first, first + 1024))
    assert (np.abs(out.cpu().numpy()[0] - exact) * 2**24 < 23 + 3 * np.abs(exact)).all()


def test_the_device_draws_and_reports_denoising_steps_as_the_host(
    sampler: GpuSampler, device: torch.device
) -> None:
    """Tokens and confidences, to the bit: greedy and at temperatures, in two steps of a block, with
    the mask banned, before min_tokens, beside a row of entropies, which the host samples."""
    random = np.random.default_rng(5)
    logits = (random.standard_normal((12, VOCAB)) * 3).astype(np.float32)
    logits[:, 9] = 20.0  # the mask, which no row may draw
    logits[3, 4:7] = logits[3].max()
    rows, common = [], {"banned_token_ids": (9,), "remasking": "low_confidence_dynamic"}
    for i, temperature in enumerate([0.0, 0.7, 1.0, 0.0, 0.3, 1.0] * 2):
        changes = {"remasking": "entropy_bounded"} if i == 5 else {}
        p = SamplingParams(temperature=temperature, min_tokens=3, **{**common, **changes})
        rows.append(Row(DrawSpec(p, 77 + i % 2, 1, withheld=(5,), step=i // 6), 2 + i % 4))
    found = sampler(torch.from_numpy(logits).to(device), rows, [0] * len(rows))
    expected = host_sampler(EngineConfig(threads=1))(logits).draw(rows)
    assert [one is None for one in found] == [i == 5 for i in range(len(rows))]
    for one, host in zip(found, expected, strict=True):
        assert one is None or (one.token, one.confidence) == (host.token, host.confidence)
    assert not sampler.supports(rows[0].spec)  # no step is launched ahead


def test_gpu_sampler_gives_the_host_samplers_token_or_none(
    sampler: GpuSampler, device: torch.device
) -> None:
    """Logits and temperatures of all sizes, ties, ids with -inf: the host sampler's token or -1,
    and rarely -1."""
    random = np.random.default_rng(1)
    count = 3072 if device.type == "cuda" else 384
    logits = random.standard_normal((count, VOCAB)) * random.choice(
        [0.01, 1.0, 5.0, 30.0, 1e4], (count, 1)
    )
    logits += random.choice([0.0, 0.0, -70.0, 1e4], (count, 1))
    logits[::3] = np.rint(logits[::3])  # ties
    logits[random.random((count, VOCAB)) < random.choice([0.0, 0.1, 0.9], (count, 1))] = -np.inf
    logits[np.arange(count), random.integers(0, VOCAB, count)] = 3.0
    logits[7, :], logits[7, 700] = -np.inf, -2.0
    logits = logits.astype(np.float32)
    rows = rows_at(random, random.choice([0.0, 1e-20, 1e-3, 0.1, 0.6, 1.0, 1.5, 100.0], count))
    found = tokens_of(sampler, logits, rows)
    drawn = host_sampler(EngineConfig(threads=2))(logits).draw(rows)
    assert all(token in (-1, one.token) for token, one in zip(found, drawn, strict=True))
    assert all(token >= 0 for token, row in zip(found, rows, strict=True) if row.spec.params.greedy)
    assert all(one == Drawn(one.token, 0.0) for one in drawn)
    assert sampler.rows == count
    assert found.count(-1) == sampler.undecided == 0


def without_resolving_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave rows to the host that the float32 screen does not decide."""

    def launch(kernel: Any, *args: Any, **options: Any) -> None:
        if kernel is not jit_sampling.resolve_ties:
            plain(kernel, *args, **options)

    plain = gpu_sampler.launch
    monkeypatch.setattr(gpu_sampler, "launch", launch)


def test_gpu_sampler_resolves_near_ties(
    sampler: GpuSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ids whose keys differ by a chosen gap. Within SLACK the float32 screen must not decide;
    beyond it the screen must decide, and correctly. The sampler decides all rows."""
    random = np.random.default_rng(2)
    count, ids = 1024 if sampler.device.type == "cuda" else 64, np.arange(VOCAB)
    temperature = random.choice([0.05, 0.6, 1.0, 20.0], count)
    rows = rows_at(random, temperature)
    logits = np.full((count, VOCAB), -2000.0, np.float32)
    gaps = np.empty(count)
    for i, row in enumerate(rows):
        a, b = random.choice(VOCAB, 2, replace=False)
        noise = gumbel(row.spec.key, row.position, ids)
        gap = 2.0 ** random.uniform(-30.0, -8.0) * random.choice([-1.0, 1.0])
        logits[i, a] = random.choice([0.0, 5.0, -12.0])
        logits[i, b] = logits[i, a] + (noise[a] - noise[b] + gap) * temperature[i]
        scores = (logits[i, [a, b]].astype(np.float64) - logits[i].max()) / temperature[i] + noise[
            [a, b]
        ]
        gaps[i] = abs(scores[0] - scores[1])
    drawn = np.array([o.token for o in host_sampler(EngineConfig(threads=2))(logits).draw(rows)])
    assert tokens_of(sampler, logits, rows) == drawn.tolist()
    without_resolving_ties(monkeypatch)
    found = np.array(tokens_of(sampler, logits, rows))
    assert ((found == -1) | (found == drawn)).all()
    assert (found[gaps < 0.8 * sampling_plan.SLACK] == -1).all()
    assert (found[gaps > 1.2 * sampling_plan.SLACK] >= 0).all()
    assert (gaps < 1e-6).sum() > count // 20


def test_gpu_sampler_leaves_rows_that_are_not_finite_to_the_host(
    sampler: GpuSampler, device: torch.device
) -> None:
    logits = np.zeros((6, VOCAB), np.float32)
    logits[:2, 300], logits[2:4, 650], logits[4:] = np.nan, np.inf, -np.inf
    rows = rows_at(np.random.default_rng(3), np.array([0.0, 1.0] * 3))
    assert tokens_of(sampler, logits, rows) == [-1] * 6


def test_gpu_sampler_lists_alternatives_by_their_logits(
    sampler: GpuSampler, device: torch.device
) -> None:
    """Far below the largest logit all log-probabilities are equal, in float64, too."""
    logits = np.random.default_rng(9).standard_normal((2, VOCAB), np.float32)
    logits[:, 300] = 1e30
    rows = [Row(DrawSpec(SamplingParams(temperature=t, logprobs=5), 1, 1), 2) for t in (0.0, 1.0)]
    found = sampler(torch.from_numpy(logits).to(device), rows, [1, 2])
    assert found == sample_rows(logits, rows)


def test_gpu_sampler_keeps_the_lower_id_of_equal_distances(
    sampler: GpuSampler, device: torch.device
) -> None:
    """Logits near 0 differ, but not their distances from 0.5, in float64: top-k keeps the first.
    None: too many ids for the list, so the host samples the row."""
    logits = np.random.default_rng(9).standard_normal((8, VOCAB), np.float32) * np.float32(1e-30)
    logits[:, 300] = 0.5
    params = SamplingParams(temperature=100, top_k=33)
    rows = [Row(DrawSpec(params, seed, 1), 2) for seed in range(8)]
    found = sampler(torch.from_numpy(logits).to(device), rows, list(range(8)))
    wanted = sample_rows(logits, rows)
    assert all(one is None or one == other for one, other in zip(found, wanted, strict=True))


def test_the_host_scores_logits_of_the_device_like_the_specification() -> None:
    logits = np.random.default_rng(4).normal(size=(5, VOCAB)).astype(np.float32)
    host = host_sampler(EngineConfig(threads=2))(logits)
    assert host.score([7, 8, 9], 2, first=1) == score_targets(logits[1:4], [7, 8, 9], 2)


# Parameters that reach the sampler in another form (a row's mask, key, beam or withheld ids, a
# plan's targets), or that do not concern sampling.
ELSEWHERE = {
    *DIFFUSION,
    "max_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop", "ignore_eos",
    "skip_special", "on_loop", "seed", "n", "num_beams", "num_return_sequences", "length_penalty",
    "early_stopping", "num_beam_groups", "diversity_penalty", "json_schema", "regex", "grammar",
    "choice", "prompt_logprobs", "logprobs_mode", "receipt", "speculate", "priority", "cache_salt",
    "dry_base", "dry_allowed_length", "dry_range", "dry_breakers", "xtc_threshold",
    "thinking_budget", "adapter", "output_prefix",
}  # fmt: skip
# Parameters with a value that the device does not support.
HOST_ONLY: dict[str, object] = {
    **{name: value for name, value in WEAK.items() if name not in sampling_plan.DEVICE_FILTERS},
    "dry_multiplier": 0.8, "no_repeat_ngram": 3, "temperature": 1e-35, "explain": 1, "logprobs": 33,
    "top_k": 513, "penalty_range": 5,
}  # fmt: skip
# Parameters that change the plan of the device.
ON_DEVICE: dict[str, object] = {
    "allowed_token_ids": (1, 2), "banned_token_ids": (7,), "repetition_penalty": 1.1,
    "frequency_penalty": 0.1, "presence_penalty": 0.1, "best_of": 2, "logit_bias": {3: 1.0},
    **{name: value for name, value in WEAK.items() if name in sampling_plan.DEVICE_FILTERS},
}  # fmt: skip


def test_gpu_sampler_classifies_every_sampling_parameter() -> None:
    """A new sampling parameter must be added here and to row_plan, or the device would ignore
    it."""
    assert ELSEWHERE | set(HOST_ONLY) | set(ON_DEVICE) == set(FIELDS)
    plan_of, plain = sampling_plan.row_plan, SamplingParams()
    for name, value in HOST_ONLY.items():
        assert plan_of(plain.with_(**{name: value})) is None, name
    for name, value in ON_DEVICE.items():
        assert plan_of(plain.with_(**{name: value})) not in (None, plan_of(plain)), name
    processed = plain.with_(logprobs=1, logprobs_mode="processed")
    assert plan_of(processed) is None
    plan = plan_of(SamplingParams(temperature=0.5))
    assert plan is not None
    assert (plan.scale, plan.slack, plan.list_k) == (2.0, sampling_plan.SLACK, 0)
    assert plan_of(SamplingParams(temperature=0.0, top_p=0.5)) == sampling_plan.RowPlan()


def random_params(r: random.Random) -> SamplingParams:
    options: dict[str, Any] = {"temperature": r.choice((0.0, 0.3, 0.8, 1.0, 1.7))}
    choices: dict[str, tuple[Any, ...]] = {
        **{name: FIELDS[name].trials for name in sampling_plan.DEVICE_FILTERS},
        "top_k": (1, 3, 20, 40), "top_p": (0.01, 0.3, 0.9, 0.999), "min_p": (0.001, 0.1, 1.0),
        "repetition_penalty": (1.3, 0.7), "frequency_penalty": (0.4, -0.3),
        "presence_penalty": (0.7, -1.1), "banned_token_ids": ((0, 5, 700),),
        "allowed_token_ids": ((1, 2, 3, 9, 77, 300, 699),), "logprobs": (0, 1, 5), "best_of": (2,),
        "min_tokens": (30,), "logit_bias": ({0: 4.0, 5: -100.0, 300: 2.5},),
    }  # fmt: skip
    for name, values in choices.items():
        if r.random() < 0.3:
            options[name] = r.choice(values)
    return SamplingParams(**options)


def random_row(r: random.Random, logits: np.ndarray, vocab: int) -> Row:
    params = random_params(r)
    prompt, written = r.randint(1, 20), r.randint(0, 40)
    likely = np.argsort(-logits)[:30].tolist()
    history = tuple(r.choice(likely) for _ in range(prompt + written))
    withheld = (2, likely[0]) if params.min_tokens and written < 30 else ()
    mask = None
    if r.random() < 0.2:
        bits = np.zeros(-(-vocab // 8) * 8, bool)
        bits[r.sample(range(vocab), r.choice((1, 5, 600)))] = True
        mask = np.packbits(bits, bitorder="little").tobytes()[: r.choice((None, 60))]
        mask = mask if any(mask) else None
    spec = DrawSpec(
        params, r.getrandbits(64), prompt, history if params.needs_history else (), withheld,
        (mask,) if mask else (),
    )  # fmt: skip
    return Row(spec, prompt + written, spec.history, mask)


def test_gpu_sampler_equals_the_host_sampler_for_all_parameters(
    sampler: GpuSampler, device: torch.device
) -> None:
    """Random combinations of filters, penalties, bans, masks and log-probabilities: equal tokens
    and log-probabilities to the last bit, and few rows left to the host."""
    r, numbers = random.Random(5), np.random.default_rng(5)
    count = 32 if device.type == "cpu" else 4096
    logits = numbers.standard_normal((count, VOCAB)) * numbers.choice([1.0, 3.0, 10.0], (count, 1))
    logits[::4] = np.rint(logits[::4])  # ties
    logits = logits.astype(np.float32)
    rows = [random_row(r, logits[i], VOCAB) for i in range(count)]
    found = sampler(torch.from_numpy(logits).to(device), rows, list(range(count)))
    drawn = host_sampler(EngineConfig(threads=2))(logits).draw(rows)
    left = [i for i, one in enumerate(found) if one is None]
    for i, (one, wanted) in enumerate(zip(found, drawn, strict=True)):
        assert one is None or one == wanted, (i, rows[i].spec.params)
    undecided = [
        i
        for i in left
        if drawn[i].token >= 0  # not: no id is allowed
        # typical_p may remove every id that top_n_sigma would keep: the host keeps the best one
        and not (rows[i].spec.params.typical_p < 1.0 and rows[i].spec.params.top_n_sigma)
    ]
    assert len(undecided) <= count // 1000, [rows[i].spec.params for i in undecided]
    kinds = {bool(row.spec.params.top_k) for i, row in enumerate(rows) if i not in left}
    assert kinds == {True, False}


@pytest.mark.parametrize(
    "option",
    [
        {"typical_p": 0.3},
        {"typical_p": 0.3, "top_k": 20},
        {"top_n_sigma": 1.6},
        {"typical_p": 0.5, "top_n_sigma": 0.1, "top_k": 40},
        {"typical_p": 0.9, "top_p": 0.8},
        {"top_p": 0.7},
        {"top_p": 0.9, "min_p": 0.1},
        {"logit_bias": {5: 15.0, 650: 14.0}},
    ],
)
def test_gpu_sampler_applies_each_filter(
    option: dict[str, Any], sampler: GpuSampler, device: torch.device
) -> None:
    """At temperature 2 most draws change without the filter, so a filter that is ignored, or keeps
    an id more or less, gives another token. No row is left to the host."""
    count = 6 if device.type == "cpu" else 512
    logits = np.random.default_rng(8).standard_normal((count, VOCAB)).astype(np.float32) * 2
    plain = SamplingParams(temperature=2.0)
    rows = [Row(DrawSpec(plain.with_(**option), i, 1), i) for i in range(count)]
    free = [Row(DrawSpec(plain, i, 1), i) for i in range(count)]
    wanted = [one.token for one in sample_rows(logits, rows)]
    assert tokens_of(sampler, logits, rows) == wanted
    changed = [a != b.token for a, b in zip(wanted, sample_rows(logits, free), strict=True)]
    assert sum(changed) >= max(2, count // 4)


def test_token_counts_follow_a_sequence_and_recover(device: torch.device) -> None:
    """Counts grow by known tokens and by tokens that only the device has; a history that does not
    continue the counts fills them again."""
    counts = TokenCounts(50, device)
    params = SamplingParams(frequency_penalty=0.5)

    def check(seq_id: int, history: tuple[int, ...], drawn: int | None = None) -> None:
        spec = DrawSpec(params, 0, 3, history)
        tokens = None if drawn is None else torch.tensor([4, drawn], dtype=torch.int32).to(device)
        slot = counts.slots([99, seq_id], [None, spec], tokens)[1]
        wanted = np.zeros(50, int)
        for token in (*history[3:], *(() if drawn is None else (drawn,))):
            wanted[token] += 2
        wanted[list(set(history[:3]))] += 1
        assert counts.table[slot].tolist() == wanted.tolist()

    check(1, (7, 7, 8))
    check(1, (7, 7, 8, 9))  # one token more
    check(1, (7, 7, 8, 9), drawn=5)
    counts.confirm(1, 5)
    check(1, (7, 7, 8, 9, 5))
    check(1, (7, 7, 8, 9, 5), drawn=6)
    counts.confirm(1, -1)  # the token was not decided
    check(1, (7, 7, 8, 9, 5, 3))
    check(1, (7, 7, 8, 9, 5, 3, 3, 3))  # two tokens more
    for seq_id in range(2, 40):  # more sequences than slots
        check(seq_id, (seq_id, 1, 2, 3))
    check(1, (7, 7, 8, 9, 5, 3, 3, 3, 1))


def test_only_rows_that_the_device_cannot_sample_are_copied_to_the_host(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows for the device and rows for the host in one batch give the host sampler's tokens."""
    backend: Any = opened(small("llama"))
    kinds = [
        {"temperature": 0.0},
        {"xtc_probability": 0.5},
        {"temperature": 0.7},
        {"no_repeat_ngram": 3},
        {"temperature": 2.0},
    ]
    specs = [DrawSpec(SamplingParams(**kind), 50 + i, 4) for i, kind in enumerate(kinds)]  # type: ignore[arg-type]
    plain = SamplingParams()
    specs += [
        DrawSpec(plain, 9, 4, beam=3),
        DrawSpec(plain, 9, 4),
        DrawSpec(plain, 9, 4, beam=2),
        DrawSpec(plain, 9, 4),
    ]
    rows = [Row(spec, 6 + i) for i, spec in enumerate(specs)]
    logits = torch.from_numpy(
        np.random.default_rng(4).standard_normal((len(rows), backend.spec.vocab)).astype(np.float32)
    )
    draws = backend._draws
    on_host, draw_on_host = [], draws._on_host

    def record(logits: torch.Tensor, rows: list[Row]) -> list[Drawn]:
        on_host.append([row.position - 6 for row in rows])
        return draw_on_host(logits, rows)  # type: ignore[no-any-return]

    monkeypatch.setattr(draws, "_on_host", record)
    ids = list(range(len(rows)))
    host = draws.host_rows(logits.numpy()).draw(rows)
    assert draws.draw(logits.to(device), rows, ids) == host
    assert on_host == [[1, 3, 5, 7]]
    for row, value in ((2, torch.nan), (3, torch.inf)):  # sampled on the device, on the host
        logits[row, 3] = value
        host[row] = Drawn(BROKEN, 0.0)
    assert draws.draw(logits.to(device), rows, ids) == host


def test_unsupported_options_and_missing_gpus_are_errors_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "present", lambda: False)
    with pytest.raises(
        BackendError, match="finds no NVIDIA GPU that PyTorch can use; use the backend cpu"
    ):
        open_backend(tiny_model("llama"), EngineConfig(backend="cuda"))
    monkeypatch.setattr(gpu, "present", lambda: True)
    monkeypatch.setattr(gpu, "missing", lambda: None)

    def too_old() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040).\nPlease update"
        )

    monkeypatch.setattr(torch.cuda, "init", too_old)
    with pytest.raises(
        BackendError, match=r"driver on your system is too old \(found version 11040\)\.$"
    ):
        open_backend(tiny_model("llama"), EngineConfig(backend="cuda"))


# ---- the test kernel


@pytest.fixture
def uncached() -> Iterator[None]:
    """kernel_ran() caches its result in the process; clear it before and after the test."""
    kernel_ran.cache_clear()
    yield
    kernel_ran.cache_clear()


def test_the_test_kernel_runs(uncached: None, device: torch.device) -> None:
    wanted = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    assert kernel_ran().startswith(wanted)


def test_a_test_kernel_with_a_wrong_result_is_an_error(
    uncached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One value in one row of the largest tile is off by one."""
    reduce_splits = kernels.reduce_splits

    def broken(sums: kernels.SplitSums) -> torch.Tensor:
        result = reduce_splits(sums)
        if len(result) > 1:
            result[200, 100] += 1
        return result

    monkeypatch.setattr(kernels, "reduce_splits", broken)
    with pytest.raises(gpu.WrongResult):
        kernel_ran()


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (
            RuntimeError("Failed to find C compiler.\nPlease specify"),
            "did not run on the GPU: RuntimeError: Failed to find C compiler.$",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), "the GPU has no free memory"),
    ],
)
def test_a_test_kernel_that_does_not_run_gives_the_reason(
    error: Exception, wanted: str, uncached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(kernels, "matmul", fails)
    with pytest.raises(BackendError, match=wanted):
        kernel_ran()


def test_a_model_that_does_not_fit_is_rejected_before_and_during_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, config = small("llama"), EngineConfig(backend="cuda")
    assert opening.open_checked(model, config).info.name == "cuda"
    needs = r"the model needs 0\.5 GB of GPU memory and \d+\.\d GB are free; end other programs"

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device_weights, "load", full)
    with pytest.raises(BackendError, match=r"did not fit into the \d+\.\d GB of GPU memory that"):
        opening.open_checked(model, config)
    monkeypatch.setattr(opening, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 10**9))
    monkeypatch.setattr(device_weights, "load", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(BackendError, match=needs):
        opening.open_checked(model, config)
