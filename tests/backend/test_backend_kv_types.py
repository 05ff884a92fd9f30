"""KV caches of 8 bits: the rounding rules, and what the backends keep of them (ADR 24)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from plans import BLOCKS, Blocks, Open, run, run_alone, same_bits

from verbatim.backend import open_backend
from verbatim.backend.protocol import Backend
from verbatim.backend.reference.kv_types import E4M3_VALUES, e4m3_codes, q8_codes, round_kv
from verbatim.base.config import CHOICES, EngineConfig
from verbatim.testing.tiny_models import tiny_model

EIGHT_BITS = [kv_type for kv_type in CHOICES["kv_type"] if kv_type != "f16"]
TOKENS = np.random.default_rng(5).integers(0, 260, 37).tolist()


def vectors() -> np.ndarray:
    """Vectors from below the smallest e4m3 number to beyond the largest, and one of zeros."""
    r = np.random.default_rng(1)
    x = r.normal(size=(500, 64)) * 2.0 ** r.integers(-16, 10, (500, 1))
    x[0] = 0
    return x.astype(np.float32)


def opened(kind: str, kv_type: str, family: str = "llama") -> Any:
    backend = open_backend(tiny_model(family), EngineConfig(backend=kind, kv_type=kv_type))
    backend.allocate((BLOCKS,) * len(backend.spec.groups))
    return backend


@pytest.mark.torch
def test_e4m3_is_the_format_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(E4M3_VALUES, theirs, equal_nan=True)
    finite = E4M3_VALUES[~np.isnan(E4M3_VALUES)]
    ties = (finite[:-1] + finite[1:]) / 2
    x = np.concatenate([vectors().reshape(-1), finite, ties]).astype(np.float32)
    x = x[np.abs(x) <= 448]
    rounded = torch.tensor(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert (e4m3_codes(x) == rounded).all()


def test_the_rounding_of_a_vector_depends_on_that_vector_only() -> None:
    x = vectors()
    for kv_type in EIGHT_BITS:
        together = round_kv(x.reshape(50, 10, 64), kv_type).reshape(x.shape)
        alone = np.concatenate([round_kv(row[None], kv_type) for row in x])
        assert (together == alone).all()
    codes, scales = q8_codes(x)
    assert np.abs(codes[1:]).max(axis=1).tolist() == [127] * 499
    assert not codes[0].any()
    assert (np.abs(codes * scales[:, None] - x) <= scales[:, None] * 0.5001).all()
    assert np.abs(round_kv(x * 1e6, "fp8")).max() == 448
    normal = (np.abs(x) >= 2.0**-6) & (np.abs(x) <= 448)
    error = np.abs(round_kv(x, "fp8") - x)
    assert (error[normal] <= np.abs(x[normal]) / 16).all()
    assert (error[np.abs(x) < 2.0**-6] <= 2.0**-10).all()


@pytest.mark.native
@pytest.mark.parametrize("kv_type", EIGHT_BITS)
def test_the_cpu_cache_holds_the_codes_of_the_reference(kv_type: str) -> None:
    """In the first layer; a value next to a rounding border may fall on its other side."""
    cpu, reference = opened("cpu", kv_type), opened("reference", kv_type)
    table = [run_alone(backend, TOKENS, seed=2).tables[0] for backend in (cpu, reference)]
    assert table[0] == table[1]
    spec, block = cpu.spec, table[0][0]
    heads, dim = spec.kv_heads, spec.head_dim
    wide = -(-dim // 16) * 16
    slices = np.frombuffer(cpu.read_block(0, block), np.uint8).reshape(len(spec.layers), heads, -1)[
        0
    ]
    keys = slices[:, : dim * 16].reshape(heads, dim, 16).transpose(0, 2, 1)
    values = slices[:, dim * 16 : (dim + wide) * 16].reshape(heads, 16, wide)[..., :dim]
    cache = reference._caches[0]
    for n, (codes, exact) in enumerate(((keys, cache.keys), (values, cache.values))):
        if kv_type == "q8":
            at = (dim + wide) * 16 + 64 * n
            scales = slices[:, at : at + 64].copy().view(np.float32)
            found = codes.view(np.int8).astype(np.float32) * scales[..., None]
        else:
            found = E4M3_VALUES[codes]
        close = np.isclose(found, exact[0, block], rtol=1e-4, atol=1e-7)
        assert close.mean() > 0.98
        assert np.abs(found).max() > 0


@pytest.mark.parametrize("kv_type", EIGHT_BITS)
def test_batches_and_chunks_keep_the_bits(kv_type: str, open_tiny: Open) -> None:
    backend = open_tiny(tiny_model("gemma2"), kv_type=kv_type)
    expected = run_alone(backend, TOKENS)
    blocks = Blocks(backend.spec, backend.block_size, 5)
    seq, other = blocks.allocate(0, TOKENS), blocks.allocate(1, TOKENS[::-1])
    run(backend, [other, seq], [20, 5])
    for count in (1, 12, 3, 40):
        run(backend, [seq], [count])
    assert same_bits(expected, seq)


@pytest.mark.parametrize("kv_type", EIGHT_BITS)
def test_every_backend_follows_the_type_and_names_it(kv_type: str, open_tiny: Open) -> None:
    model = tiny_model("qwen3")
    plain, small = open_tiny(model), open_tiny(model, kv_type=kv_type)
    one, other = run_alone(plain, TOKENS), run_alone(small, TOKENS)
    assert not same_bits(one, other)
    specified = run_alone(opened("reference", kv_type, "qwen3"), TOKENS)
    error = np.abs(np.array(other.logprobs) - np.array(specified.logprobs)).mean()
    assert error < 0.02
    assert small.info.numerics == plain.info.numerics.replace(
        version(plain), f"{version(plain)}-{kv_type}"
    )
    if plain.info.name != "reference":  # whose cache is float32, as info.detail says
        assert small.info.kv_token_bytes < 0.75 * plain.info.kv_token_bytes
        assert small.block_bytes()[0] == 16 * small.info.kv_token_bytes
    else:
        assert "KV cache float32" in plain.info.detail
        assert f"KV cache {kv_type} in float32" in small.info.detail


def version(backend: Backend) -> str:
    return backend.info.numerics.split(",")[0]
