"""Tests of the KV cache types of the cuda backend, on a GPU or under Triton's interpreter, as those
of cuda_kernels.py.

The oracle of attention over 8 bits is attention over a float16 cache that holds the values of the
codes: equal to the bit, in every tile. So a product adds in the same order whatever the type.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from cuda_kernels import FEW_HEADS, TOKENS, small
from plans import BLOCKS, MARKS, Blocks, run, run_alone, same_bits

from verbatim.backend import open_backend
from verbatim.backend.cuda.kernels import kernels
from verbatim.backend.cuda.kernels.jit_kv import store_heads, widen
from verbatim.backend.cuda.kernels.kernels import QueryTiles
from verbatim.backend.cuda.kernels.kv_cache import KvLayer, has_e4m3
from verbatim.backend.reference.kv_types import E4M3_VALUES, e4m3_codes, q8_codes
from verbatim.base.config import EngineConfig
from verbatim.base.params import SamplingParams
from verbatim.base.records import DrawSpec, SeqStep, StepPlan
from verbatim.model.loading.load import Model

# the interpreter warns about arithmetic with infinities, which the kernels mask
pytestmark = pytest.mark.filterwarnings("ignore")
EIGHT_BITS = ("q8", "fp8")


@triton.jit
def store_rows(x, to, scales, DIM, BLOCK: tl.constexpr, KV: tl.constexpr):
    row = tl.program_id(0) * 2 + tl.arange(0, 2)[:, None]
    d = tl.arange(0, BLOCK)[None, :] + tl.zeros((2, 1), tl.int32)
    inside = d < DIM
    vector = tl.load(x + row * DIM + d, mask=inside, other=0.0)
    store_heads(vector, to, scales, row, d, DIM, inside, row >= 0, KV)


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
        store_rows[(12,)](given, found, scales, 24, 32, kind, enable_fp_fusion=False)
        codes, expected = q8_codes(x) if kind == "q8" else (e4m3_codes(x), scales.cpu().numpy())
        assert (found.cpu().numpy() == codes).all(), kind
        assert (scales.cpu().numpy() == expected).all(), kind


def test_a_value_that_is_not_finite_is_not_hidden(device: torch.device) -> None:
    x = np.ones((4, 24), np.float32)
    x[1, 5], x[2, 7] = np.nan, -np.inf
    given, scales = torch.tensor(x, device=device), torch.zeros(4, device=device)
    found = torch.zeros((4, 24), dtype=torch.int8, device=device)
    store_rows[(2,)](given, found, scales, 24, 32, "q8", enable_fp_fusion=False)
    assert (
        scales.isnan().tolist() == np.isnan(q8_codes(x)[1]).tolist() == [False, True, True, False]
    )
    codes = torch.zeros((4, 24), dtype=torch.uint8, device=device)
    store_rows[(2,)](given, codes, scales, 24, 32, "fp8", enable_fp_fusion=False)
    assert (codes.cpu().numpy() == e4m3_codes(x)).all()
    assert codes[1, 5] == 0x7F
    # the value of attention, too: e4m3 where the GPU converts its NaN itself
    for kv_type in ("q8", "fp8") if has_e4m3(device) else ("q8",):
        kv, _ = random_cache(kv_type, (1, 1, 16, 16), device)
        if kv_type == "q8":
            assert kv.value_scales is not None
            kv.value_scales[0, 0, 3] = torch.nan
        else:
            kv.values[0, 0, 3] = 0x7F
        table, q = torch.zeros((1, 1), dtype=torch.int32, device=device), torch.ones(1, 16)
        assert attend(q.to(device), kv, table, 5, 16).isnan().all()
        assert attend(q.to(device), kv, table, 2, 16).isfinite().all()


def test_every_code_is_widened_exactly(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    out = torch.zeros(256, dtype=torch.float16, device=device)
    widen_codes[(1,)](codes.view(torch.int8), out, "q8")
    assert (out.cpu() == codes.view(torch.int8).cpu().half() / 128).all()
    finite = ~np.isnan(E4M3_VALUES)
    for kind in ("fp8_bits", "fp8") if has_e4m3(device) else ("fp8_bits",):
        widen_codes[(1,)](codes, out.zero_(), kind)
        assert (out.float().cpu().numpy()[finite] == E4M3_VALUES[finite]).all(), kind


# ---- attention


def random_cache(
    kv_type: str, shape: tuple[int, int, int, int], device: torch.device
) -> tuple[KvLayer, KvLayer]:
    """A cache of 8 bits, and the float16 cache with the values of its codes."""
    r = np.random.default_rng(3)
    exact = [r.normal(size=shape).astype(np.float32) for _ in range(2)]
    if kv_type == "fp8":
        parts = [e4m3_codes(x) for x in exact]
        wide = [E4M3_VALUES[codes].astype(np.float16) for codes in parts]
    else:
        codes, scales = zip(*(q8_codes(x) for x in exact), strict=True)
        parts = [*codes, *scales]
        wide = [
            (c / np.float16(128)).astype(np.float16) * (s * 128).astype(np.float16)[..., None]
            for c, s in zip(codes, scales, strict=True)
        ]
    eight, sixteen = ([torch.tensor(x, device=device) for x in xs] for xs in (parts, wide))
    return KvLayer(*eight), KvLayer(*sixteen)


def attend(
    q: torch.Tensor, kv: KvLayer, table: torch.Tensor, start: int, lines: int, **options: Any
) -> torch.Tensor:
    """Attention of rows at the positions from `start` on, in tiles of this many lines."""
    _, kv_heads, _, dim = kv.keys.shape
    rows, device = len(q), q.device
    most = lines // (q.shape[1] // dim // kv_heads)
    first = torch.arange(0, rows, most, dtype=torch.int32, device=device)
    count = (rows - first).clamp(max=most)
    tables = table.repeat(len(first), 1)
    tiles = QueryTiles(tables, first, count, first + start, lines, most)
    spans = kernels.span_count(start + rows)
    given = {"scale": dim**-0.5, "cap": 0.0, "window": None, "dtype": torch.float32, **options}
    return kernels.attend(q, kv, [tiles], spans, **given)


@pytest.mark.parametrize("kv_type", EIGHT_BITS)
@pytest.mark.parametrize(
    ("dim", "options"), [(128, {}), (64, {"cap": 30.0, "window": 150}), (512, {})]
)
def test_attention_equals_that_over_float16_in_every_tile(
    dim: int,
    options: dict[str, Any],
    kv_type: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In tiles of few, more and many lines, whose spans one program or several programs reduce. On
    a GPU the products of the tiles are different instructions."""
    start, rows, tiles = 280, 40, (16, 64, 128) if dim <= kernels.WIDE_HEAD else (16, 32)
    if device.type == "cpu":
        dim, start, rows = dim // 8, 20, 6
        tiles = (16, 32) if dim == 16 else (16,)
        monkeypatch.setattr(kernels, "SPAN", 16)
        monkeypatch.setattr(kernels, "WIDE_HEAD", 32)
        monkeypatch.setattr(kernels, "WIDE_SPAN", 16)
        options = {**options, "window": 9} if options else options
    blocks = -(-(start + rows) // 16)
    eight, wide = random_cache(kv_type, (blocks, 2, 16, dim), device)
    made = torch.Generator().manual_seed(1)
    q = torch.randn((rows, 4 * dim), generator=made).half().to(device)
    table = torch.randperm(blocks, generator=made).to(torch.int32)[None].to(device)
    found = {}
    for merged in (True, False):
        monkeypatch.setattr(kernels, "ATTENTION_BUFFER", 1 if merged else 1 << 30)
        for lines in tiles:
            for name, kv in (("8", eight), ("f16", wide)):
                key = (name, lines, merged)
                found[key] = attend(q, kv, table, start, lines, **options).cpu()
    expected = found.pop(("f16", 16, True))
    assert torch.isfinite(expected).all()
    assert len(expected.unique()) > 100
    for key, one in found.items():
        assert torch.equal(one, expected), key


# ---- the backend


@pytest.mark.parametrize("kv_type", EIGHT_BITS)
@pytest.mark.parametrize("family", ["gemma2", pytest.param("gemma4", marks=MARKS["cuda"])])
def test_a_model_agrees_with_the_reference_of_the_same_type(family: str, kv_type: str) -> None:
    """gemma4: heads per layer, and layers that read the keys and values of others."""
    model, tokens = small(family), TOKENS[:7]
    ours, theirs, plain = (
        run_alone(opened(model, kind, backend), tokens, seed=3)
        for kind, backend in ((kv_type, "cuda"), (kv_type, "reference"), ("f16", "reference"))
    )
    assert np.abs(np.array(ours.logprobs) - np.array(theirs.logprobs)).mean() < 0.02
    assert not same_bits(theirs, plain)


@pytest.mark.parametrize("kv_type", ["q8", pytest.param("fp8", marks=MARKS["cuda"])])
def test_chunks_batches_and_restored_blocks_keep_the_bits(
    kv_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans of 16 positions, 20 tokens: two spans, merged in one program or in the last of several;
    beside another sequence; and a prefix that another backend computed and read_block returned."""
    monkeypatch.setattr(kernels, "SPAN", 16)
    tokens = np.random.default_rng(2).integers(0, 260, 20).tolist()
    model = small("llama", **FEW_HEADS)
    backend = opened(model, kv_type)
    expected = run_alone(backend, tokens, seed=3)
    blocks = Blocks(backend.spec, backend.block_size, 7)
    seq, other = blocks.allocate(0, tokens), blocks.allocate(1, tokens[::-1])
    run(backend, [other, seq], [3, 9])
    run(backend, [seq, other], [8, 1])
    kept = [backend.read_block(0, block) for block in seq.tables[0]]
    assert all(len(data) == backend.block_bytes()[0] for data in kept)
    monkeypatch.setattr(kernels, "ATTENTION_BUFFER", 1)  # one program merges the spans
    restored = opened(model, kv_type)
    for block, data in zip(seq.tables[0], kept, strict=True):
        restored.write_block(0, block, data)
    run(restored, [seq], [2])
    assert same_bits(expected, seq)


@pytest.mark.parametrize("kv_type", EIGHT_BITS)
def test_attention_reads_neither_codes_nor_scales_of_a_released_block(kv_type: str) -> None:
    backend = opened(small("gemma2"), kv_type)
    for cache in (cache for caches in backend._memory.caches for cache in caches):
        cache.copy_(torch.rand(cache.shape) * (100 if cache.element_size() == 1 else 0.02))
    tables = tuple((-1, 4) if group.window else (3, 4) for group in backend.spec.groups)
    step = SeqStep(1, (9,), 20, tables, 1, DrawSpec(SamplingParams(logprobs=3), 5, 1))
    clean = backend.execute(StepPlan(1, (step,)))
    for group, caches in zip(backend.spec.groups, backend._memory.caches, strict=True):
        for cache in caches if group.window else ():
            cache[:, 0] = cache[:, 3] = 127 if cache.element_size() == 1 else torch.nan
    assert backend.execute(StepPlan(1, (step,))) == clean


@pytest.mark.parametrize(("kv_type", "share"), [("f16", 1.0), ("q8", 0.5), ("fp8", 0.5)])
def test_the_memory_plan_is_what_is_allocated(kv_type: str, share: float) -> None:
    backend = opened(small("gemma4"), kv_type)
    spec, planned = backend.spec, 0
    for caches, size in zip(backend._memory.caches, backend.block_bytes(), strict=True):
        assert sum(cache.nbytes for cache in caches) == size * (BLOCKS + 1)  # a padding block
        assert KvLayer(*(cache[0] for cache in caches)).kind.startswith(kv_type)
        planned += size
    assert planned == backend.info.kv_token_bytes * backend.block_size
    heads = sum(len(g.layers) * 2 * spec.kv_shape(g.layers[0])[0] for g in spec.groups)
    scales = 4 * heads if kv_type == "q8" else 0
    assert backend.info.kv_token_bytes == spec.kv_token_values * 2 * share + scales
    assert (f"cuda-3-{kv_type}" in backend.info.numerics) == (kv_type != "f16")
