"""Tests of the KV cache types of the cuda backend, on a GPU or under Triton's interpreter, as those
of cuda_kernels.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from cuda_kernels import TOKENS, small
from plans import BLOCKS, Blocks, run, run_alone, same_bits

from verbatim.backend import open_backend
from verbatim.backend.cuda import kernels
from verbatim.backend.cuda.jit_kv import store_head, widen
from verbatim.backend.cuda.kv_cache import KvLayer, has_e4m3
from verbatim.backend.reference.kv_types import E4M3_VALUES, e4m3_codes, q8_codes
from verbatim.base.config import EngineConfig
from verbatim.base.params import SamplingParams
from verbatim.base.records import DrawSpec, SeqStep, StepPlan
from verbatim.model.load import Model

pytestmark = pytest.mark.filterwarnings("ignore")
EIGHT_BITS = ("q8", "fp8")


@triton.jit
def store_rows(x, to, scales, DIM, BLOCK: tl.constexpr, KV: tl.constexpr):
    row, d = tl.program_id(0), tl.arange(0, BLOCK)
    vector = tl.load(x + row * DIM + d, mask=d < DIM, other=0.0)
    store_head(vector, to, scales, row, DIM, BLOCK, KV, True)


@triton.jit
def widen_codes(codes, out, KV: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(out + i, widen(tl.load(codes + i), KV))


def opened(model: Model, kv_type: str, kind: str = "cuda") -> Any:
    backend = open_backend(model, EngineConfig(backend=kind, kv_type=kv_type))
    backend.allocate((BLOCKS,) * len(backend.spec.groups))
    return backend


def test_a_head_vector_is_rounded_as_the_reference_does(device: torch.device) -> None:
    """Magnitudes from below the smallest subnormal to beyond the largest e4m3, ties, and zeros."""
    r = np.random.default_rng(1)
    x = (r.normal(size=(24, 24)) * 2.0 ** r.integers(-14, 12, (24, 1))).astype(np.float32)
    x[0], x[1, :8], x[2, :8] = 0, E4M3_VALUES[1:9], (E4M3_VALUES[1:9] + E4M3_VALUES[2:10]) / 2
    given, scales = torch.tensor(x, device=device), torch.zeros(24, device=device)
    for kind, dtype in (("q8", torch.int8), ("fp8", torch.uint8)):
        found = torch.zeros((24, 24), dtype=dtype, device=device)
        store_rows[(24,)](given, found, scales, 24, 32, kind, enable_fp_fusion=False)
        codes, expected = (q8_codes(x)) if kind == "q8" else (e4m3_codes(x), scales.cpu().numpy())
        assert (found.cpu().numpy() == codes).all(), kind
        assert (scales.cpu().numpy() == expected).all(), kind


def test_every_e4m3_code_is_widened_exactly(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    finite = ~np.isnan(E4M3_VALUES)
    for kind in ("fp8_bits", "fp8") if has_e4m3(device) else ("fp8_bits",):
        out = torch.zeros(256, dtype=torch.float16, device=device)
        widen_codes[(1,)](codes, out, kind)
        assert (out.float().cpu().numpy()[finite] == E4M3_VALUES[finite]).all(), kind


@pytest.mark.parametrize("kv_type", EIGHT_BITS)
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_model_agrees_with_the_reference_of_the_same_type(family: str, kv_type: str) -> None:
    model = small(family)
    ours, theirs, plain = (
        run_alone(opened(model, kind, backend), TOKENS, seed=3)
        for kind, backend in ((kv_type, "cuda"), (kv_type, "reference"), ("f16", "reference"))
    )
    error, cost = (
        np.abs(np.array(ours.logprobs) - np.array(other.logprobs)).mean()
        for other in (theirs, plain)
    )
    assert error < 0.02
    assert not same_bits(theirs, plain)
    assert cost > 0


@pytest.mark.parametrize("kv_type", EIGHT_BITS)
def test_chunks_batches_and_restored_blocks_keep_the_bits(
    kv_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans of 16 positions, 20 tokens: two spans, merged in one program or by a second kernel;
    beside another sequence; and a prefix that another backend computed and read_block returned."""
    monkeypatch.setattr(kernels, "SPAN", 16)
    tokens = np.random.default_rng(2).integers(0, 260, 20).tolist()
    backend = opened(small("llama"), kv_type)
    expected = run_alone(backend, tokens, seed=3)
    blocks = Blocks(backend.spec, backend.block_size, 7)
    seq, other = blocks.allocate(0, tokens), blocks.allocate(1, tokens[::-1])
    run(backend, [other, seq], [3, 9])
    run(backend, [seq, other], [8, 1])
    kept = [backend.read_block(0, block) for block in seq.tables[0]]
    assert all(len(data) == backend.block_bytes()[0] for data in kept)
    monkeypatch.setattr(kernels, "ATTENTION_BUFFER", 1)  # one program merges the spans
    restored = opened(small("llama"), kv_type)
    for block, data in zip(seq.tables[0], kept, strict=True):
        restored.write_block(0, block, data)
    run(restored, [seq], [2])
    assert same_bits(expected, seq)


@pytest.mark.parametrize("kv_type", EIGHT_BITS)
def test_attention_reads_neither_codes_nor_scales_of_a_released_block(kv_type: str) -> None:
    backend = opened(small("gemma2"), kv_type)
    for cache in (cache for caches in backend._caches for cache in caches):
        cache.copy_(torch.rand(cache.shape) * (100 if cache.element_size() == 1 else 0.02))
    tables = tuple((-1, 4) if group.window else (3, 4) for group in backend.spec.groups)
    step = SeqStep(1, (9,), 20, tables, 1, DrawSpec(SamplingParams(logprobs=3), 5, 1))
    clean = backend.execute(StepPlan(1, (step,)))
    for group, caches in zip(backend.spec.groups, backend._caches, strict=True):
        for cache in caches if group.window else ():
            cache[:, 0] = cache[:, 3] = 127 if cache.element_size() == 1 else torch.nan
    assert backend.execute(StepPlan(1, (step,))) == clean


@pytest.mark.parametrize(("kv_type", "share"), [("f16", 1.0), ("q8", 0.5), ("fp8", 0.5)])
def test_the_memory_plan_is_what_is_allocated(kv_type: str, share: float) -> None:
    backend = opened(small("qwen3"), kv_type)
    spec, (caches,) = backend.spec, backend._caches
    held = sum(cache.nbytes for cache in caches)
    assert held == backend.block_bytes()[0] * (BLOCKS + 1)  # and the padding block
    scales = 8 * spec.kv_heads * spec.attention_layers if kv_type == "q8" else 0
    plain = spec.kv_values * 2 * spec.attention_layers
    assert backend.info.kv_token_bytes == plain * share + scales
    assert KvLayer(*(cache[0] for cache in caches)).kind.startswith(kv_type)
    assert ("-" + kv_type in backend.info.numerics) == (kv_type != "f16")
