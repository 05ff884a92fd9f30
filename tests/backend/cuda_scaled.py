"""Tests of products of FP8 codes on the cuda backend, on a GPU or under Triton's interpreter, as
those of cuda_kernels.py. docs/numerics.md has the definition that `specified` repeats in NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_kernels import FEW_HEADS, TOKENS, small
from plans import BLOCKS, Blocks, run, run_alone, same_bits

from verbatim.backend import open_backend
from verbatim.backend.cuda import kernel_compile
from verbatim.backend.cuda.device_weights import scaled_mode
from verbatim.backend.cuda.kernels import kernels
from verbatim.backend.cuda.kernels.fp8 import scaled_product
from verbatim.backend.cuda.kernels.fp8.scaled_product import ScaledTile, ScaledWeight
from verbatim.base.config import EngineConfig
from verbatim.base.errors import BackendError, ParameterError
from verbatim.formats.packed.packed_weight import PackedWeight
from verbatim.formats.tensor import Tensor
from verbatim.model.loading.load import Model

pytestmark = pytest.mark.filterwarnings("ignore")  # NaN is meant
GROUP, LARGEST, SMALLEST = 128, np.float32(448), np.float32(2.0**-100)
PUBLISHED = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
SIZES = {**FEW_HEADS, "head_dim": 128, "hidden_size": 128, "intermediate_size": 256}
# rows of x, rows of weights, warps, stages
TILES = ((16, 64, 4, 6), (32, 128, 4, 4), (128, 128, 8, 3))


def codes_of(values: np.ndarray) -> np.ndarray:
    """The values of the nearest e4m3 codes, as PyTorch rounds."""
    return torch.from_numpy(values).to(torch.float8_e4m3fn).float().numpy()


def specified(x: torch.Tensor, weight: ScaledWeight) -> np.ndarray:
    """The product as docs/numerics.md defines it, its sums in float64."""
    rows = x.to(torch.bfloat16).float().cpu().numpy().reshape(len(x), -1, GROUP)
    scales = np.maximum(np.abs(rows).max(2), SMALLEST) / LARGEST
    codes = codes_of(rows / scales[:, :, None])
    n, k = weight.shape
    weights = weight.codes.float().cpu().numpy().reshape(n, k // GROUP, GROUP)
    blocks = np.repeat(weight.scales.cpu().numpy(), GROUP, 0)[:n]
    parts = np.einsum("mgk,ngk->mng", codes.astype(np.float64), weights.astype(np.float64))
    return np.asarray((parts * scales[:, None, :] * blocks[None]).sum(2))


def random_weight(n: int, k: int, device: torch.device, seed: int = 0) -> ScaledWeight:
    make = torch.Generator().manual_seed(seed)
    return scaled_product.quantise(torch.randn((n, k), generator=make).to(device))


def added(sums: kernels.SplitSums) -> torch.Tensor:
    return kernels.reduce_splits(sums)


@pytest.mark.parametrize(("n", "k"), [(160, 384), (256, 1024), (384, 256)])
def test_a_product_is_the_specified_one(n: int, k: int, device: torch.device) -> None:
    """Four splits (n <= k) of which the last may be short, a block of weights that is not whole,
    and a group of zeros, whose scale is not zero."""
    weight = random_weight(n, k, device)
    x = torch.randn((5, k), generator=torch.Generator().manual_seed(1)).to(device)
    x[1, :GROUP], x[2, 7] = 0.0, 300.0
    want = specified(x, weight)
    # tensor cores add the 128 products of a group with about 14 bits
    tolerance = (1e-6 if device.type == "cpu" else 2e-4) * np.abs(want).max()
    assert np.abs(added(scaled_product.product(x, weight)).cpu().numpy() - want).max() < tolerance


def test_rows_are_rounded_as_pytorch_does(device: torch.device) -> None:
    """All magnitudes of e4m3, ties, and a row that is not finite, which stays so."""
    r = np.random.default_rng(2)
    x = (r.normal(size=(9, 256)) * 2.0 ** r.integers(-12, 12, (9, 256))).astype(np.float32)
    x[0, :130] = np.arange(130) / 16
    x[8, 3], x[7, 200] = np.nan, np.inf
    given = torch.from_numpy(x).to(torch.bfloat16)
    codes, scales = (part.cpu() for part in scaled_product.quantise_rows(given.to(device)))
    groups = given.float().numpy()[:7].reshape(7, 2, GROUP)
    want = np.maximum(np.abs(groups).max(2), SMALLEST) / LARGEST
    assert np.array_equal(scales.numpy()[:, :7].T, want)
    assert np.array_equal(
        codes.float().numpy()[:7], codes_of(groups / want[:, :, None]).reshape(7, 256)
    )
    assert bool(codes.float()[7:].isnan().any(1).all())


def test_no_bit_depends_on_the_tile_or_the_number_of_rows(device: torch.device) -> None:
    """The interpreter adds in any order, so the values are integers there, with scales that are
    powers of two."""
    for n, k, gate in ((192, 1024, "none"), (512, 256, "silu")):
        weight = random_weight(n, k, device)
        x = torch.randn((70, k), generator=torch.Generator().manual_seed(3)).to(device)
        if device.type == "cpu":
            x = (x * 2).round().clamp(-7, 7)
            x[:, ::GROUP] = 7.0  # the scale of each group is 7 / 448, a power of two
            codes = weight.codes.float().mul(0.02).round().to(torch.float8_e4m3fn)
            weight = ScaledWeight(codes, torch.exp2(torch.floor(torch.log2(weight.scales))))
        want = added(scaled_product.product(x, weight, gate=gate))
        splits = 4 if n <= k else 1
        for sizes in TILES:
            for parallel in {1, splits}:
                tile = ScaledTile(*sizes, parallel)
                found = added(scaled_product.product(x[:37], weight, gate=gate, tile=tile))
                assert torch.equal(found, want[:37]), tile


def test_a_fused_activation_has_the_bits_of_its_own_kernel(device: torch.device) -> None:
    weight = random_weight(512, 256, device)
    x = torch.randn((20, 256), generator=torch.Generator().manual_seed(4)).to(device)
    assert scaled_product.can_fuse(weight, "silu")
    assert not scaled_product.can_fuse(weight, "gelu_tanh")
    fused = scaled_product.product(x, weight, gate="silu").splits[0]
    apart = scaled_product.product(x, weight)
    assert torch.equal(fused, kernels.mlp_activation(apart, "silu", True, torch.bfloat16))


# ---- whole models


def published(model: Model) -> Model:
    """The model as a checkpoint in FP8 blocks would be loaded."""
    tensors = dict(model.weights)
    for name, tensor in tensors.items():
        if name.startswith("layers.") and len(tensor.shape) == 2:
            n, k = tensor.shape
            weight = scaled_product.quantise(torch.from_numpy(tensor.to_f32().copy()))
            codes, scales = weight.codes.view(torch.uint8).numpy(), weight.scales.numpy()
            scales, groups = np.repeat(scales, GROUP, 0)[:n], np.arange(k) // GROUP
            packed = PackedWeight(name, "e4m3", (n, k), codes, scales, "bf16", groups=groups)
            blocks = packed.to_checkpoint_blocks()
            assert blocks is not None
            tensors[name] = blocks
    source = replace(model.source, packing=PUBLISHED)  # type: ignore[type-var]
    return replace(model, source=source, weights=replace(model.weights, tensors=tensors))


def opened(model: Model, **options: Any) -> Any:
    backend = open_backend(model, EngineConfig(backend="cuda", **options))
    backend.allocate((BLOCKS,) * len(backend.spec.groups))
    return backend


def test_a_checkpoint_in_blocks_has_products_of_codes(device: torch.device) -> None:
    """By default; its own numerics version says so. Values are near those of unpacked weights, and
    a batch and chunks change no bit."""
    model = published(small("llama", **SIZES))
    backend, half = opened(model), opened(model, activations="half")
    assert backend.info.numerics.startswith("cuda-3-w8a8,")
    assert half.info.numerics.startswith("cuda-3,")
    scaled = {n for n, w in backend.weights.items() if isinstance(w, ScaledWeight)}
    assert scaled == {f"layers.0.{n}" for n in ("attn.q+k+v", "attn.o", "mlp.gate+up", "mlp.down")}
    assert not any(isinstance(w, ScaledWeight) for w in half.weights.values())
    ours, theirs = run_alone(backend, TOKENS), run_alone(half, TOKENS)
    difference = np.abs(np.array(ours.logprobs) - np.array(theirs.logprobs))
    assert 0 < difference.mean() < 0.1
    blocks = Blocks(backend.spec, backend.block_size, seed=1)
    seqs = [blocks.allocate(i, TOKENS[: 5 + 2 * i]) for i in range(3)]
    while any(not seq.finished for seq in seqs):
        left = [seq for seq in seqs if not seq.finished]
        run(backend, left, [3] * len(left))
    if device.type == "cuda":  # the interpreter adds in any order
        assert same_bits(seqs[2], run_alone(backend, TOKENS))
    else:
        assert np.allclose(seqs[2].logprobs, ours.logprobs, rtol=0, atol=1e-3)


def test_another_checkpoint_has_products_of_codes_only_when_asked(device: torch.device) -> None:
    model = small("llama", **SIZES)
    assert opened(model).info.numerics.startswith("cuda-3,")
    backend = opened(model, activations="fp8", kv_type="fp8")
    assert backend.info.numerics.startswith("cuda-3-w8a8-fp8,")
    assert isinstance(backend.weights["layers.0.mlp.down"], ScaledWeight)
    assert isinstance(backend.weights["embed"], torch.Tensor)
    assert all(np.isfinite(run_alone(backend, TOKENS).logprobs))


@pytest.mark.parametrize(
    "changed",
    [
        {"weight_block_size": None},
        {"weight_block_size": [64, 128]},
        {"activation_scheme": "static"},
        {"scale_fmt": "ue8m0"},
        {"quant_method": "compressed-tensors"},
    ],
)
def test_other_scales_than_those_of_blocks_are_not_taken_for_them(changed: dict[str, Any]) -> None:
    model = small("llama", **SIZES)
    source: Any = model.source
    taken = replace(model, source=replace(source, packing=PUBLISHED))
    assert scaled_mode(taken, "auto", available=True) == "published"
    assert scaled_mode(taken, "auto", available=False) == "none"
    other = replace(model, source=replace(source, packing={**PUBLISHED, **changed}))
    assert scaled_mode(other, "auto", available=True) == "none"


def test_a_block_whose_rows_have_several_scales_stays_as_it_is(device: torch.device) -> None:
    codes = np.full((256, 128), 56, np.uint8)  # 1.0
    scales = np.repeat(np.array([[1.0], [2.0]], np.float32), 128, 0)
    for rows, kept in ((scales, True), (scales[64:], False)):
        groups = np.zeros(128, np.int64)
        data = codes[: len(rows)]
        packed = PackedWeight("w", "e4m3", data.shape, data, rows, "bf16", groups=groups)
        tensor = packed.to_checkpoint_blocks()
        assert isinstance(tensor, Tensor)
        found = scaled_product.from_blocks(tensor, device)
        assert (found is not None) == kept
    assert found is None


def test_what_cannot_compute_with_codes_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"backend": "cpu"}, {"backend": "auto"}):
        with pytest.raises(ParameterError, match="needs the backend cuda"):
            EngineConfig(activations="fp8", **options)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="several ranks"):
        EngineConfig(activations="fp8", backend="cuda", tensor_parallel=2)
    monkeypatch.setattr(scaled_product, "available", lambda: False)
    with pytest.raises(BackendError, match="needs an NVIDIA Hopper GPU"):
        opened(small("llama", **SIZES), activations="fp8")


def test_compiling_ahead_launches_the_tiles_of_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(published(small("llama", **SIZES)))
    launched: set[tuple[str, Any]] = set()

    def product(x: torch.Tensor, weight: Any, gate: str = "none", tile: Any = None) -> None:
        launched.add((gate, tile))

    monkeypatch.setattr(scaled_product, "product", product)
    kernel_compile.compile_scaled(backend)
    for name, gate in (("mlp.gate+up", "silu"), ("mlp.down", "none"), ("attn.q+k+v", "none")):
        n, k = backend.weights[f"layers.0.{name}"].shape
        for rows in (1, 17, 64, 65, 300, 513, 5000):
            splits = scaled_product.split_k(n, k)[0]
            tile = scaled_product.choose_tile(rows, n, splits, gate != "none")
            assert (gate, tile) in launched
