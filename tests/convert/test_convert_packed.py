"""`verbatim convert` of quantised safetensors: the GGUF file has the same weights, bit for bit.
`verbatim plan` knows the types of the loaded weights from the config."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_convert_gguf import byte_level, call, same_weights

from verbatim import backend as backends
from verbatim.backend import gpu_weights, open_backend
from verbatim.base.config import EngineConfig
from verbatim.base.errors import BackendError, ModelError, ParameterError
from verbatim.base.params import SamplingParams
from verbatim.diagnose.footprint import WEIGHT_TYPES, footprint_of_config, read_footprint
from verbatim.engine.calls.llm import LLM
from verbatim.files.gguf import read_gguf
from verbatim.model.loading.load import load_model
from verbatim.model.loading.names import hf_source
from verbatim.testing.tiny_models import tiny_model

Arrays = dict[str, tuple[str, np.ndarray]]  # name -> safetensors dtype, values
GROUP = 32
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 264}


def integers(random: np.random.Generator, *shape: int) -> tuple[str, np.ndarray]:
    return "I32", random.integers(-(2**31), 2**31, shape).astype("<i4")


def scales(random: np.random.Generator, *shape: int, dtype: str = "F16") -> tuple[str, np.ndarray]:
    return dtype, (0.01 + 0.01 * random.random(shape)).astype("<f2" if dtype == "F16" else "<f4")


def fp8(module: str, n: int, k: int, random: np.random.Generator) -> Arrays:
    weight = random.integers(0, 0x7F, (n, k)).astype(np.uint8)  # 0x7F is NaN
    return {
        f"{module}.weight": ("F8_E4M3", weight),
        f"{module}.weight_scale_inv": scales(random, n // 32, k // 32, dtype="F32"),
    }


def compressed(module: str, n: int, k: int, random: np.random.Generator) -> Arrays:
    return {
        f"{module}.weight_packed": integers(random, n, k // 8),
        f"{module}.weight_scale": scales(random, n, k // GROUP),
        f"{module}.weight_shape": ("I64", np.array([n, k], "<i8")),
    }


def awq(module: str, n: int, k: int, random: np.random.Generator) -> Arrays:
    return {
        f"{module}.qweight": integers(random, k, n // 8),
        f"{module}.qzeros": integers(random, k // GROUP, n // 8),
        f"{module}.scales": scales(random, k // GROUP, n),
    }


def gptq(module: str, n: int, k: int, random: np.random.Generator) -> Arrays:
    return {
        f"{module}.qweight": integers(random, k // 8, n),
        f"{module}.qzeros": integers(random, k // GROUP, n // 8),
        f"{module}.scales": scales(random, k // GROUP, n),
        f"{module}.g_idx": ("I32", random.permutation(k).astype("<i4") // GROUP),  # desc_act
    }


def mxfp4(module: str, n: int, k: int, random: np.random.Generator) -> Arrays:
    """The fused experts of gpt-oss; `module` is a whole tensor name here, and n covers experts."""
    return {
        f"{module}_blocks": ("U8", random.integers(0, 256, (4, n, k // 32, 16), dtype=np.uint8)),
        f"{module}_scales": ("U8", random.integers(115, 125, (4, n, k // 32), dtype=np.uint8)),
    }


FORMATS: dict[str, tuple[Callable[..., Arrays], dict[str, Any]]] = {
    "fp8": (fp8, {"weight_block_size": [32, 32]}),
    "compressed-tensors": (
        compressed,
        {
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "strategy": "group",
                        "group_size": GROUP,
                        "symmetric": True,
                    }
                }
            },
        },
    ),
    "awq": (awq, {"bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "gptq": (gptq, {"bits": 4, "group_size": GROUP, "desc_act": True, "sym": True}),
}


def write_directory(directory: Path, arrays: Arrays, config: dict[str, Any]) -> None:
    """A safetensors file of any types, with a config and a tokenizer."""
    directory.mkdir()
    byte_level(directory, vocab=260)
    header, at = {}, 0
    for name, (dtype, values) in arrays.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [at, at + values.nbytes],
        }
        at += values.nbytes
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(values).tobytes() for _, values in arrays.values())
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (directory / "config.json").write_text(json.dumps(config))


def packed_llama(method: str, directory: Path, **changes: Any) -> Path:
    """A directory with a llama model whose matrices are quantised by `method`."""
    pack, config = FORMATS[method]
    model, random, arrays = tiny_model("llama", **SIZES), np.random.default_rng(1), Arrays()
    for name, tensor in model.weights.items():
        target = hf_source("llama", "model.", name, 0).names[0]
        if len(tensor.shape) == 2 and name.startswith("layers."):
            arrays |= pack(target.removesuffix(".weight"), *tensor.shape, random)
        else:
            arrays[target] = ("F32", np.array(tensor.to_f32(), "<f4"))
    quantised = {"quantization_config": {"quant_method": method, **config}}
    write_directory(directory, arrays, {**model.source.config, **quantised, **changes})  # type: ignore[union-attr]
    return directory


@pytest.mark.parametrize("method", FORMATS)
def test_a_packed_llama_becomes_gguf_with_the_same_weights(method: str, tmp_path: Path) -> None:
    packed_llama(method, tmp_path / "dir")
    assert call(str(tmp_path / "dir"), str(tmp_path / "out.gguf")) == 0
    same_weights(load_model(tmp_path / "dir"), load_model(tmp_path / "out.gguf"))
    assert call(str(tmp_path / "dir"), str(tmp_path / "small.gguf"), "--quant", "q8_0") == 0
    assert read_gguf(tmp_path / "small.gguf").tensors["blk.0.ffn_up.weight"].type == "q8_0"


def test_the_experts_of_gpt_oss_stay_mxfp4(tmp_path: Path) -> None:
    """In the GGUF file, too; gate and up are separate there."""
    model = tiny_model("gpt_oss", vocab_size=264, hidden_size=64)
    random, arrays = np.random.default_rng(2), Arrays()
    for name, tensor in model.weights.items():
        if "moe." in name and "router" not in name:
            continue
        target = hf_source("gpt-oss", "model.", name, 4).names[0]
        arrays[target] = ("F32", np.array(tensor.to_f32(), "<f4"))
    inner = model.weights["layers.0.moe.gate"].shape[1]
    for layer in range(len(model.spec.layers)):
        experts = f"model.layers.{layer}.mlp.experts."
        arrays |= mxfp4(f"{experts}gate_up_proj", 2 * inner, 64, random)
        arrays |= mxfp4(f"{experts}down_proj", 64, inner, random)
        arrays[f"{experts}gate_up_proj_bias"] = scales(random, 4, 2 * inner, dtype="F32")
        arrays[f"{experts}down_proj_bias"] = scales(random, 4, 64, dtype="F32")
    quantised = {"quantization_config": {"quant_method": "mxfp4"}}
    write_directory(tmp_path / "dir", arrays, {**model.source.config, **quantised})  # type: ignore[union-attr]
    assert call(str(tmp_path / "dir"), str(tmp_path / "out.gguf")) == 0
    types = {name: tensor.type for name, tensor in read_gguf(tmp_path / "out.gguf").tensors.items()}
    assert {t for name, t in types.items() if "_exps.weight" in name} == {"mxfp4"}
    source = load_model(tmp_path / "dir")
    same_weights(source, load_model(tmp_path / "out.gguf"))
    # gate has the even rows of the fused tensor: value 1 of a row is the high nibble of byte 0
    blocks, exponents = (
        arrays[f"model.layers.0.mlp.experts.gate_up_proj_{part}"][1]
        for part in ("blocks", "scales")
    )
    e2m1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]) / 2
    expected = e2m1[blocks[1, 2::2, 0, 0] >> 4] * 2.0 ** (exponents[1, 2::2, 0].astype(int) - 127)
    np.testing.assert_array_equal(source.weights["layers.0.moe.gate"].to_f32()[1, 1:, 1], expected)
    kept = load_model(tmp_path / "dir", quant="q8_0")
    assert kept.weights["layers.0.moe.up"].type == "mxfp4"
    assert kept.weights["layers.0.attn.q"].type == "q8_0"


@pytest.mark.parametrize("quant", [None, "packed"])
@pytest.mark.parametrize("method", FORMATS)
def test_plan_counts_the_blocks_of_a_packed_model(
    method: str, quant: str | None, tmp_path: Path
) -> None:
    """The planned type of every matrix is that of the loaded weights, without reading any."""
    directory = packed_llama(method, tmp_path / "dir", dtype="float16")
    weights = load_model(directory, quant=quant).weights
    (directory / "model.safetensors").unlink()
    plan = read_footprint(str(directory), quant=quant, kv_type="f16", resolve=Path)
    layers = {n: t for n, t in weights.items() if n.startswith("layers.") and len(t.shape) > 1}
    types = {name: plan.parts[name].type for name in layers}
    floats = ("f16", "bf16")  # equal bytes; the type of the scales decides which
    assert all(types[n] == t.type or {types[n], t.type} <= {*floats} for n, t in layers.items())
    assert ({*types.values()} <= {"f16"}) == (quant is None or method in ("fp8", "gptq"))
    loaded = {name: plan.parts[name] for name in layers}
    size = sum(np.prod(p.shape) * WEIGHT_TYPES[p.type] for p in loaded.values())
    assert size == sum(t.data.nbytes for t in layers.values())
    assert bool(plan.gpu_parts) == (quant is None)


@pytest.mark.parametrize(
    ("method", "type"),
    [
        ("fp8", "e4m3_32_bf16"),
        ("compressed-tensors", "i4_32_f16"),
        ("awq", "i4z_32_f16"),
        ("gptq", "f16"),
    ],
)
def test_a_packed_llama_for_a_gpu(method: str, type: str, tmp_path: Path) -> None:
    """Blocks with the bits of the unpacked weights. The plan knows their bytes."""
    directory = packed_llama(method, tmp_path / "dir", dtype="float16")
    blocks, floats = load_model(directory, gpu=True), load_model(directory)
    assert blocks.weights.digest == floats.weights.digest
    same_weights(floats, blocks)
    assert {t.type for n, t in blocks.weights.items() if ".mlp." in n} == {type}
    (directory / "model.safetensors").unlink()
    plan = read_footprint(str(directory), quant=None, kv_type="f16", resolve=Path)
    for mode in ("both", "only"):
        planned, loaded = (
            sum(size.held for size in gpu_weights.device_bytes(parts, mode).values())
            for parts in (plan.gpu_parts, blocks.weights)
        )
        assert planned == loaded
    assert ("in blocks" in plan.on_gpu(0).kept) == (method != "gptq")
    if find_spec("verbatim.backend.cpu._native"):  # open_backend unpacks for it
        config = EngineConfig(backend="cpu")
        opened = [open_backend(model, config) for model in (blocks, floats)]
        assert opened[0].info.weight_bytes == opened[1].info.weight_bytes


@pytest.mark.parametrize("method", ["fp8", "awq"])
def test_a_packed_llama_on_the_cpu_although_there_is_a_gpu(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """auto finds a GPU and cannot use it: tokens, fingerprint and facts are those of the cpu."""
    directory = packed_llama(method, tmp_path / "dir", dtype="float16")
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=1, ignore_eos=True)

    def answer(backend: str) -> tuple[Any, ...]:
        with LLM(directory, backend=backend, context=64) as llm:
            done = llm.generate([1, 2, 3], params)
            return done.choices, llm.fingerprint, llm.loaded.file, llm.loaded.backend.info.note

    *plain, note = answer("cpu" if find_spec("verbatim.backend.cpu._native") else "reference")
    assert not note

    def refuse(*_: object) -> None:
        raise BackendError("the model needs 9 GB")

    monkeypatch.setattr(backends.gpu, "present", lambda: True)
    monkeypatch.setattr(backends.gpu, "missing", lambda: None)
    monkeypatch.setattr(backends, "_auto_cuda", refuse)
    *found, note = answer("auto")
    assert found == plain
    assert "needs 9 GB" in note


def test_plan_counts_floats_for_a_malformed_quantization_config() -> None:
    config = dict(tiny_model("llama", **SIZES).source.config)  # type: ignore[union-attr]
    for packing in (
        {"quant_method": "fp8", "weight_block_size": 5},
        {"quant_method": "awq", "bits": "x"},
        {"quant_method": "compressed-tensors", "config_groups": {"a": 5}},
    ):
        plan = footprint_of_config({**config, "quantization_config": packing}, "x.json")
        assert {part.type for part in plan.gpu_parts.values()} <= {"f16", "f32"}


def test_plan_packed_needs_a_quantised_config(tmp_path: Path) -> None:
    config = dict(tiny_model("llama").source.config)  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="needs a quantization_config"):
        footprint_of_config(config, "x.json", quant="packed")
    with pytest.raises(ParameterError, match="quantised safetensors"):
        read_footprint("7B", quant="packed", kv_type="f16", resolve=Path)
