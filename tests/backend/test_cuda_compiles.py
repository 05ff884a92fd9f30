"""Kernels of the cuda backend compile for a GPU that is not there.

Triton's interpreter shows what a kernel computes, but not that the compiler accepts it, nor in
which order tensor cores add.
"""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from filter_values import WEAK
from verbatim import SamplingParams
from verbatim.base.records import DrawSpec
from verbatim.formats.registry import BLOCKS, FORMATS

VOCAB = 49_152
OPTIONS: dict[str, dict[str, Any]] = {
    "filters": {"top_k": 0},  # and every other filter of the device
    "list": {"top_k": 8},  # the same
    "bias": {"top_p": 0.9, "logit_bias": {1: 2.0}},
    "counts": {"repetition_penalty": 1.2, "banned_token_ids": (3,), "logprobs": 2},
}


@pytest.mark.torch
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("capability", "name"),
    [
        (90, "list"),
        *[
            pytest.param(capability, name, marks=pytest.mark.soak)
            for capability in (90, 80)
            for name in OPTIONS
            if (capability, name) != (90, "list")
        ],
    ],
)
def test_the_kernels_of_the_sampler_compile(
    capability: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    torch = pytest.importorskip("torch")
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from verbatim.backend.cuda.kernels import launch
    from verbatim.backend.cuda.sampler import (
        device_filters,
        gpu_sampler,
        sampling_plan,
        token_counts,
    )

    if launch.INTERPRETED:
        pytest.skip("the kernels of this process are interpreted")
    types = {
        torch.float32: "*fp32", torch.float64: "*fp64", torch.int16: "*i16",
        torch.int32: "*i32", torch.int64: "*i64",
    }  # fmt: skip
    compiled: set[Any] = set()

    def compile_only(
        kernel: Any, grid: Any, args: Any, constants: Any, *, warps: int = 4, stages: int = 3
    ) -> None:
        names = kernel.arg_names
        signature = {
            name: types[arg.dtype] if isinstance(arg, torch.Tensor) else "i32"
            for name, arg in zip(names, args, strict=False)
        }
        signature |= dict.fromkeys(names[len(args) :], "constexpr")
        values = {(len(args) + i,): value for i, value in enumerate(constants)}
        key = (kernel, tuple(signature.items()), constants, warps)
        if key not in compiled:
            source = ASTSource(fn=kernel, signature=signature, constexprs=values)
            target = GPUTarget("cuda", capability, 32)
            options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
            code = compile(source, target=target, options=options)
            # masses, filters and noise must have the bits of the specification
            assert "fma.rn.f64" not in code.asm["ptx"], kernel
            compiled.add(key)

    for module in (device_filters, gpu_sampler, token_counts):
        monkeypatch.setattr(module, "launch", compile_only)
    sampler = gpu_sampler.GpuSampler(VOCAB, torch.device("cpu"))
    filters = sampling_plan.DEVICE_FILTERS if "top_k" in OPTIONS[name] else ()
    options = {filter: WEAK[filter] for filter in filters} | OPTIONS[name]
    params = SamplingParams(temperature=1.0, **options)
    specs = [DrawSpec(params, i, 1, (1, 2, 3)) for i in range(2)]
    sampler.launch(torch.zeros((2, VOCAB)), specs, [5, 5], [0, 1])
    assert len({key[0] for key in compiled}) >= 5


# head sizes and lines of attention's query tiles, GPU architecture; the quick one takes 3 s
SIZES = ((64, 16), (64, 64), (64, 128), (128, 16), (128, 64), (128, 128), (256, 16), (256, 128))
TILES = [(*size, gpu) for size in (*SIZES, (512, 16), (512, 32)) for gpu in (90, 80)]
QUICK_TILES = ((128, 16, 90),)


def compile_attention(
    capability: int, kernel: Any, args: Any, constants: Any, warps: int, stages: int
) -> Any:
    """Compile `attend`, given what kernels.attend launches."""
    import torch
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {
        torch.float16: "*fp16", torch.float32: "*fp32", torch.int8: "*i8", torch.uint8: "*u8",
        torch.int32: "*i32",
    }  # fmt: skip
    constants = (*constants, False)  # no dependent launch
    names, given = kernel.arg_names, len(args)
    given_args = list(zip(names[:given], args, strict=True))
    signature = {
        name: types[arg.dtype] if isinstance(arg, torch.Tensor)
        else "i32" if isinstance(arg, int) else "fp32"
        for name, arg in given_args
    }  # fmt: skip
    aligned = [isinstance(a, torch.Tensor) or name == "DIM" for name, a in given_args]
    source = ASTSource(
        fn=kernel,
        signature=signature | dict.fromkeys(names[given:], "constexpr"),
        constexprs={(given + i,): value for i, value in enumerate(constants)},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(given) if aligned[i]},
    )
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


class Lowered(Exception):
    """Ends a compilation; its argument is Triton's GPU dialect (TTGIR) of the kernel."""


def dots(ttgir: str) -> list[str]:
    """The products of a kernel: types and layouts of operands and result."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.M))
    # a buffer that is filled ahead is mutable; the order of its values is the same
    found = re.findall(r"(?:tt\.dot|ttng\.warp_group_dot) .* : (.*?)(?: loc\(.*)?$", ttgir, re.M)
    plain = [re.sub(r", mutable(, [0-9x]+)?", "", types) for types in found]
    return [
        re.sub(r"#\w+(?![\w.])", lambda name: layouts.get(name[0], name[0]), types)
        for types in plain
    ]


@pytest.mark.torch
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("dim", "lines", "capability"),
    [pytest.param(*tile, marks=() if tile in QUICK_TILES else pytest.mark.soak) for tile in TILES],
)
def test_attention_over_8_bits_has_the_products_of_float16(
    dim: int, lines: int, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order in which a tensor core adds follows from the layouts of its operands. For operands
    that are converted from 8 bits, Triton permutes them in small tiles (kWidth 4) and not in large
    ones (jit_kv.py): then a text depends on the batch. Compiles down to the layouts only."""
    pytest.importorskip("triton")
    torch = pytest.importorskip("torch")
    from triton.backends.nvidia.compiler import CUDABackend

    from verbatim.backend.cuda.kernels import kernels, kv_cache, launch

    if launch.INTERPRETED:
        pytest.skip("the kernels of this process are interpreted")
    lowered: list[str] = []

    def stop(backend: Any, module: Any, *_: Any) -> None:
        raise Lowered(str(module))

    def compile_only(kernel: Any, grid: Any, args: Any, constants: Any, **options: Any) -> None:
        try:
            warps, stages = options["warps"], options["stages"]
            code = compile_attention(capability, kernel, args, constants, warps, stages)
            lowered.append(code.asm["ttgir"])  # from Triton's cache
        except Lowered as found:
            lowered.append(found.args[0])

    monkeypatch.setattr(CUDABackend, "make_llir", stop)
    monkeypatch.setattr(kernels, "launch", compile_only)
    monkeypatch.setattr(kv_cache, "has_e4m3", lambda _: capability >= 89)
    monkeypatch.setattr(kernels, "is_large", lambda _: capability >= 90)
    number = torch.zeros(1, dtype=torch.int32)
    tiles = kernels.QueryTiles(number[None], number, number, number, lines, lines // 2)
    q = torch.zeros((1, 4 * dim), dtype=torch.float16)
    found = {}
    for kv_type, dtype in kv_cache.DTYPES.items():
        codes = torch.zeros((1, 2, 16, dim), dtype=dtype)
        scales = [torch.zeros((1, 2, 16))] * (2 if kv_type == "q8" else 0)
        kv = kv_cache.KvLayer(codes, codes, *scales)
        for buffer in (1, 1 << 30):  # one program merges the spans, or the last of several
            monkeypatch.setattr(kernels, "ATTENTION_BUFFER", buffer)
            kernels.attend(q, kv, [tiles], 4, 0.1, 0.0, None, torch.float16)
        found[kv_type] = [dots(ir) for ir in lowered]
        lowered.clear()
    assert [len(products) for products in found["f16"]] == [6, 3]
    large = capability >= 90 and lines >= 64
    assert all(("versionMajor = 3" in one) == large for one in found["f16"][0])
    assert all("kWidth = 2" in one or large for one in found["f16"][0])
    assert found["q8"] == found["f16"]
    assert found["fp8"] == found["f16"]


# compute capability -> bytes of shared memory that one program may use
SHARED_BYTES = {90: 227 << 10, 86: 99 << 10}
HEADS = (64, 128, 192, 256, 512)


@pytest.mark.soak
@pytest.mark.torch
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kv_type", ["f16", "q8", "fp8"])
@pytest.mark.parametrize("rows", [1, 1000])
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("dim", HEADS)
def test_the_tiles_of_attention_fit_into_shared_memory(
    dim: int, rows: int, kv_type: str, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 8 query heads per KV head, merged in one program, which needs the most."""
    pytest.importorskip("triton")
    torch = pytest.importorskip("torch")
    from verbatim.backend.cuda.kernels import kernels, kv_cache, launch

    if launch.INTERPRETED:
        pytest.skip("the kernels of this process are interpreted")
    used: list[int] = []

    def compile_only(kernel: Any, grid: Any, args: Any, constants: Any, **options: Any) -> None:
        warps, stages = options["warps"], options["stages"]
        code = compile_attention(capability, kernel, args, constants, warps, stages)
        used.append(code.metadata.shared)

    monkeypatch.setattr(kernels, "launch", compile_only)
    monkeypatch.setattr(kernels, "ATTENTION_BUFFER", 1)
    monkeypatch.setattr(kv_cache, "has_e4m3", lambda _: capability >= 89)
    monkeypatch.setattr(kernels, "is_large", lambda _: capability >= 90)
    number = torch.zeros(1, dtype=torch.int32)
    lines = kernels.tile_lines(16, 2, dim, rows, torch.device("cpu"))
    tiles = kernels.QueryTiles(number[None], number, number, number, lines, lines // 8)
    q = torch.zeros((1, 16 * dim), dtype=torch.float16)
    codes = torch.zeros((1, 2, 16, dim), dtype=kv_cache.DTYPES[kv_type])
    scales = [torch.zeros((1, 2, 16))] * (2 if kv_type == "q8" else 0)
    kv = kv_cache.KvLayer(codes, codes, *scales)
    kernels.attend(q, kv, [tiles], 4, 0.1, 0.0, None, torch.float16)
    assert 0 < used[0] <= SHARED_BYTES[capability]


# types of BLOCK_FORMATS whose kernels differ
BLOCK_TYPES = (
    *(name for name in BLOCKS if FORMATS[name].gpu and name != "q4_0"),
    "e4m3_128_bf16", "e4m3_32_f16", "i4_128_bf16", "i4z_128_bf16", "i4z_32_f16", "i8_128_bf16",
    "i8z_128_f16", "i4_128_f32",
)  # fmt: skip


@pytest.mark.torch
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("type", "rows"),
    [("q4_0", 1), *[pytest.param(type, 20, marks=pytest.mark.soak) for type in BLOCK_TYPES]],
)
def test_a_matmul_in_blocks_has_the_products_of_half_precision(
    type: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are operands in registers, in the order of large tiles (kWidth 2), and the thread
    that loads their codes uses them: nothing but the loads passes through shared memory. They are
    rounded as NumPy rounds them: no product in float32 is fused, except with an offset (then it is
    exact)."""
    pytest.importorskip("triton")
    torch = pytest.importorskip("torch")
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from verbatim.backend.cuda.kernels import experts, launch, quant
    from verbatim.formats.registry import SIZES
    from verbatim.formats.tensor import Tensor

    if launch.INTERPRETED:
        pytest.skip("the kernels of this process are interpreted")
    types = {
        torch.float16: "*fp16", torch.float32: "*fp32", torch.uint8: "*u8", torch.bfloat16: "*bf16",
        torch.int32: "*i32",
    }  # fmt: skip
    compiled: list[Any] = []

    def compile_only(kernel: Any, grid: Any, args: Any, constants: Any, **options: Any) -> None:
        names, given = kernel.arg_names, len(args)
        signature = {
            name: types[arg.dtype] if isinstance(arg, torch.Tensor) else "i32"
            for name, arg in zip(names, args, strict=False)
        }
        signature |= dict.fromkeys(names[given:], "constexpr")
        source = ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={(given + i,): value for i, value in enumerate(constants)},
            attrs={
                (i,): [["tt.divisibility", 16]]
                for i, name in enumerate(names[:given])
                if name not in ("M", "PACKS")
            },
        )
        chosen = {
            "num_warps": options.get("warps", 4),
            "num_stages": options.get("stages", 3),
            "enable_fp_fusion": options.get("fuse", False),
        }
        compiled.append(compile(source, target=GPUTarget("cuda", 90, 32), options=chosen))

    monkeypatch.setattr(quant, "launch", compile_only)
    monkeypatch.setattr(quant, "INTERPRETED", False)
    monkeypatch.setattr(quant, "unpacks_in_order", lambda: True)
    values, size = SIZES[type]
    raw = torch.zeros(512 * 256 // values * size, dtype=torch.uint8).numpy()
    weight = quant.to_blocks(Tensor("w", type, (512, 256), raw), torch.device("cpu"))
    quant.matmul(torch.zeros((rows, 256), dtype=weight.dtype), weight)
    products = dots(compiled[0].asm["ttgir"])
    assert products
    assert all("versionMajor = 3" in one and "kWidth = 2" in one for one in products)
    ptx = compiled[0].asm["ptx"]
    assert "ldmatrix" not in ptx
    assert len(re.findall(r"st\.shared", ptx)) <= 8  # only the sums, after the loop
    assert ("fma.rn.f32" in ptx) == (weight.form.offset == "add")
    if rows == 1:
        return
    quant.unpack(weight)
    quant.unpack(weight, rows=torch.zeros(3, dtype=torch.int32))
    stacked = replace(weight, shape=(2, 256, 256))
    for height in (16, 128):
        number = torch.zeros(height, dtype=torch.int32)
        tiles = experts.ExpertTiles(number, number, number[:1], number[:, None], height)
        quant.expert_matmul(torch.zeros((1, 256)), stacked, tiles, number)
        # a program of 64 rows has the products of one with 16: only their number differs
        products = dots(compiled[-1].asm["ttgir"])
        assert all("versionMajor = 3" in one and "kWidth = 2" in one for one in products)
        assert "ldmatrix" not in compiled[-1].asm["ptx"]


def compile_few_rows(
    kernel: Any, grid: Any, args: Any, constants: Any, warps: int = 4, stages: int = 3, **_: Any
) -> Any:
    """Compile what a function of few_rows or kernels launches, starting early."""
    import torch
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {
        torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32",
        torch.int32: "*i32",
    }  # fmt: skip
    constants = (*constants, 2)
    names, given = kernel.arg_names, len(args)
    signature = {
        name: types[arg.dtype] if isinstance(arg, torch.Tensor)
        else "i32" if isinstance(arg, int) else "fp32"
        for name, arg in zip(names, args, strict=False)
    }  # fmt: skip
    make: Any = ASTSource
    if getattr(kernel, "is_gluon", bool)():
        make = import_module("triton.experimental.gluon._runtime").GluonASTSource
    source = make(
        fn=kernel,
        signature=signature | dict.fromkeys(names[given:], "constexpr"),
        constexprs={(given + i,): value for i, value in enumerate(constants)},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, arg in enumerate(args)
            if isinstance(arg, torch.Tensor) or (isinstance(arg, int) and arg % 16 == 0)
        },
    )
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def reductions(ttgir: str, axis: int) -> set[str]:
    """The layouts in which float32 values are added along an axis."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.M))
    operation = r'"tt\.reduce".*?<\{axis = (\d)[^(]*\(\{.*?arith\.(\w+).*?\}\)'
    found = re.findall(operation + r" : \(tensor<[\dx]+f32, (#\w+)>", ttgir, re.S)
    return {layouts[name] for at, add, name in found if int(at) == axis and add == "addf"}


@pytest.mark.torch
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("rows", "norm"), [(1, True), (16, False)])
def test_a_product_of_few_rows_reads_only_weights_before_it_waits(
    rows: int, norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else it reads is written by the kernels before it. Its norm is reduced like that of
    add_norm: 8 adjacent values per thread, 256 per warp."""
    pytest.importorskip("triton.experimental.gluon")
    torch = pytest.importorskip("torch")
    from verbatim.backend.cuda.kernels import kernels, launch
    from verbatim.backend.cuda.kernels.few_rows import product

    if launch.INTERPRETED:
        pytest.skip("the kernels of this process are interpreted")
    compiled: list[Any] = []

    def compile_only(*args: Any, **options: Any) -> None:
        compiled.append(compile_few_rows(*args, **options))

    monkeypatch.setattr(product, "launch", compile_only)
    monkeypatch.setattr(kernels, "launch", compile_only)
    weight = torch.zeros((3072, 1024), dtype=torch.bfloat16)
    x, sums = torch.zeros((rows, 1024)), torch.zeros((4, rows, 1024))
    row = product.Normed(x, sums, x[0], 1e-6, 0.0) if norm else x.to(weight.dtype)
    product.product(row, weight, "silu", weight.dtype)
    before, after = compiled[0].asm["ptx"].split("griddepcontrol.wait")
    assert "cp.async" in before
    assert "ld.global" not in before
    assert "st.global" not in before
    assert "mma.sync" in after
    if norm:
        given = kernels.Norm(x[0], None, 1e-6, 0.0)
        kernels.add_norm(x, kernels.SplitSums(sums), given, weight.dtype)
        (layout,) = reductions(compiled[1].asm["ttgir"], 0)
        assert "sizePerThread = [8], threadsPerWarp = [32], warpsPerCTA = [4]" in layout


@pytest.mark.torch
@pytest.mark.timeout(0)
@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.soak)])
def test_attention_of_one_row_reduces_heads_like_the_kernel_for_many_rows(
    dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order in which a head's norm is added follows from the layout."""
    pytest.importorskip("triton")
    torch = pytest.importorskip("torch")
    from verbatim.backend.cuda.kernels import kernels, kv_cache, launch

    if launch.INTERPRETED:
        pytest.skip("the kernels of this process are interpreted")
    compiled: list[Any] = []

    def compile_only(*args: Any, **options: Any) -> None:
        compiled.append(compile_few_rows(*args, **options))

    monkeypatch.setattr(kernels, "launch", compile_only)
    monkeypatch.setattr(kernels, "is_large", lambda _: True)
    number, half = torch.zeros(16, dtype=torch.int32), torch.float16
    tiles = kernels.QueryTiles(number[None], number[:1], number[:1], number[:1], 16, 1)
    kv = kv_cache.KvLayer(*(torch.zeros((1, 2, 16, dim), dtype=half) for _ in "kv"))
    weight, angles = torch.zeros(dim), torch.zeros((16, dim // 2))
    heads = kernels.Heads((weight, weight), 1e-6, 0.0, (angles, angles), number[:1])
    qkv = kernels.SplitSums(torch.zeros((1, 1, 8 * dim)))
    kernels.qkv_rope_cache(qkv, heads, kv, number[:1], half)
    kernels.attend_one(qkv, heads, kv, number[:1], tiles, 4, 0.1, 0.0, None, torch.bfloat16)
    found = [
        {re.sub(r"warpsPerCTA = \[\d+, 1\]", "", one) for one in reductions(c.asm["ttgir"], 1)}
        for c in compiled
    ]
    assert len(found[0]) == 1
    assert found[0] == found[1]


@pytest.mark.torch
@pytest.mark.timeout(0)
def test_the_blocks_of_a_delta_net_read_only_states_before_they_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernels before this one write all else that it reads."""
    pytest.importorskip("triton.experimental.gluon")
    torch = pytest.importorskip("torch")
    from verbatim.backend.cuda.kernels import launch, recurrent
    from verbatim.model.spec import DeltaSpec

    if launch.INTERPRETED:
        pytest.skip("the kernels of this process are interpreted")
    compiled: list[Any] = []

    def compile_only(*args: Any, **options: Any) -> None:
        options.pop("dependent")
        compiled.append(compile_few_rows(*args, **options))

    monkeypatch.setattr(recurrent, "launch", compile_only)
    delta = DeltaSpec(key_heads=2, value_heads=4, key_dim=128, value_dim=128)
    number, one = torch.zeros(16, dtype=torch.int32), torch.zeros((1, 1024 + 512 + 8))
    step = recurrent.RecurrentStep(*[number[:n] for n in (4, 1, 2, 1, 1, 1, 1, 1)])
    shapes = ((1, 4, 128, 128), (1, 2, 16, 128), (1, 4, 16, 128), (1, 4, 16, 2))
    layer = recurrent.DeltaLayer(
        torch.zeros((1024, 4)), one[0], one[0], one[0], torch.zeros((1, 16, 1024)),
        tuple(torch.zeros(shape) for shape in shapes),
    )  # fmt: skip
    square = torch.zeros((1, 4, 16, 16))
    blocks = recurrent.SolvedBlocks(square, square, square)
    recurrent._chain(delta, layer, one, blocks, step)
    before, _, after = compiled[0].asm["ptx"].partition("griddepcontrol.wait")
    assert "ld.global" in before
    assert "st.global" not in before
    assert "cp.async" not in before
    assert "m16n8k8" in after
