"""The kernels of the GPU sampler compile for a GPU that is not there.

Triton's interpreter shows what a kernel computes, but not that the compiler accepts it.
"""

from __future__ import annotations

from typing import Any

import pytest

from verbatim import SamplingParams
from verbatim.base.records import DrawSpec

VOCAB = 49_152
OPTIONS: dict[str, dict[str, Any]] = {
    "filters": {"top_p": 0.9, "typical_p": 0.9, "top_n_sigma": 1.0},
    "list": {"top_k": 8, "typical_p": 0.5, "top_n_sigma": 1.0},
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

    from verbatim.backend.cuda import device_filters, gpu_sampler, launch, token_counts

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
    params = SamplingParams(temperature=1.0, **OPTIONS[name])
    specs = [DrawSpec(params, i, 1, (1, 2, 3)) for i in range(2)]
    sampler.launch(torch.zeros((2, VOCAB)), specs, [5, 5], [0, 1])
    assert len({key[0] for key in compiled}) >= 5
