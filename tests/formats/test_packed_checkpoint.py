"""Quantised safetensors checkpoints: every weight has the bits of its format's own dequantiser.

tests/data/awq.npz was made by AutoAWQ 0.2.9 (`dequantize_gemm`), gptq.npz by auto-round 0.16.1
(the PyTorch QuantLinear of each version of the format, applied to the identity), both from random
words and scales. The other oracles run here: transformers and compressed-tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity_types import REFUSED_FORMATS
from verbatim.base.errors import ModelError
from verbatim.files.gguf_write import write_gguf
from verbatim.files.safetensors import read_directory
from verbatim.formats.checkpoint_blocks import CHECKPOINT_TYPES, E4M3, to_type
from verbatim.formats.packed.packed_checkpoint import RawTensor, unpack_checkpoint
from verbatim.formats.packed.packed_config import check_keys
from verbatim.formats.registry import BLOCKS
from verbatim.formats.tensor import Tensor

DATA = Path(__file__).parents[1] / "data"
TYPES = {"float16": "f16", "float32": "f32", "bfloat16": "bf16"}
RAW = {"int32": "I32", "int8": "I8", "uint8": "U8", "int64": "I64"}


def split(arrays: dict[str, np.ndarray]) -> tuple[dict[str, Tensor], dict[str, RawTensor]]:
    floats, raw = {}, {}
    for name, array in arrays.items():
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if array.dtype.name in TYPES:
            floats[name] = Tensor(name, TYPES[array.dtype.name], array.shape, flat)
        else:
            raw[name] = RawTensor(RAW[array.dtype.name], array.shape, flat)
    return floats, raw


def from_torch(tensors: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, RawTensor]]:
    """Tensors of PyTorch as the reader of safetensors gives them."""
    import torch

    names = {
        torch.float32: "f32",
        torch.float16: "f16",
        torch.bfloat16: "bf16",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.int32: "I32",
        torch.int64: "I64",
    }
    floats, raw = {}, {}
    for name, tensor in tensors.items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        kind, shape = names[tensor.dtype], tuple(tensor.shape)
        if kind in TYPES.values():
            floats[name] = Tensor(name, kind, shape, data)
        else:
            raw[name] = RawTensor(kind, shape, data)
    return floats, raw


def unpack(config: dict[str, Any], parts: Any) -> dict[str, Tensor]:
    floats, rest, _ = unpack_checkpoint(config, *parts, "config.json")
    assert not rest, f"left over: {sorted(rest)}"
    blocks, rest, _ = unpack_checkpoint(config, *parts, "config.json", gpu=True)
    assert not rest, f"left over: {sorted(rest)}"
    for name, tensor in floats.items():  # blocks for a GPU have the same bits
        assert blocks[name].to_f32().tobytes() == tensor.to_f32().tobytes()
    return floats


def test_awq_equals_autoawq() -> None:
    with np.load(DATA / "awq.npz") as found:
        arrays = {f"m.{name}": found[name] for name in ("qweight", "qzeros", "scales")}
        made = unpack({"quant_method": "awq", "bits": 4, "group_size": 16}, split(arrays))
        assert made["m.weight"].shape == found["weight"].shape
        assert made["m.weight"].data.tobytes() == found["weight"].tobytes()


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("act_order", [0, 1])
def test_gptq_equals_auto_round(version: str, bits: int, act_order: int) -> None:
    with np.load(DATA / "gptq.npz") as found:
        key = f"{version}_{bits}_{act_order}_"
        mine = {name.removeprefix(key): found[name] for name in found.files if name.startswith(key)}
    weight = mine.pop("weight")
    config = {"quant_method": "gptq", "bits": bits, "checkpoint_format": version}
    made = unpack(config, split({f"m.{name}": array for name, array in mine.items()}))
    assert made["m.weight"].data.tobytes() == weight.tobytes()


def test_every_fp8_byte_equals_pytorch() -> None:
    torch = pytest.importorskip("torch")
    bytes_ = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(E4M3, bytes_.view(torch.float8_e4m3fn).float().numpy())


def test_rounding_to_bf16_equals_pytorch() -> None:
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32)
    values = bits.view(np.float32)
    want = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy()
    got = to_type(values, "bf16").view(np.int16)
    finite = ~np.isnan(values)
    np.testing.assert_array_equal(got[finite], want[finite])


@pytest.mark.torch
@pytest.mark.parametrize("shape", [(256, 384), (128, 128)])
def test_block_fp8_equals_transformers(shape: tuple[int, int]) -> None:
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    torch.manual_seed(0)
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    scale = torch.rand(shape[0] // 128, shape[1] // 128)
    want = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.bfloat16)
    parts = from_torch({"m.weight": weight, "m.weight_scale_inv": scale})
    made = unpack({"quant_method": "fp8", "weight_block_size": [128, 128]}, parts)
    assert made["m.weight"].data.tobytes() == want.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.torch
def test_mxfp4_equals_transformers() -> None:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (2, 24, 3, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 24, 3), dtype=torch.uint8)
    want = convert_moe_packed_tensors(blocks, scales)
    made = unpack({"quant_method": "mxfp4"}, from_torch({"e_blocks": blocks, "e_scales": scales}))
    assert made["e"].type == "mxfp4"
    values = made["e"].to_f32().swapaxes(-1, -2)  # the weight of transformers has inputs first
    np.testing.assert_array_equal(values, want.to(torch.float32).numpy())


COMPRESSED: list[tuple[str, dict[str, Any]]] = [
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
    ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32}),
    (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False}),
    ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "tensor", "symmetric": False}),
    ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False}),
]


@pytest.mark.torch
@pytest.mark.parametrize(("form", "weights"), COMPRESSED)
def test_compressed_tensors_equal_their_library(form: str, weights: dict[str, Any]) -> None:
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(1)
    arguments = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    rows, columns = 16, 96
    groups = columns // 32 if weights["strategy"] == "group" else 1
    shape = (1,) if weights["strategy"] == "tensor" else (rows, groups)
    state = {
        "weight": torch.randn(rows, columns, dtype=torch.bfloat16),
        "weight_scale": (torch.rand(shape) * 0.1 + 0.01).to(torch.bfloat16),
    }
    if not weights.get("symmetric", True):
        state["weight_zero_point"] = torch.randint(-8, 8, shape, dtype=torch.int8)
    compressor = BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(dict(state), scheme)
    want = compressor.decompress(dict(packed), scheme)["weight"]
    parts = from_torch({f"m.{name}": tensor for name, tensor in packed.items()})
    made = unpack({"quant_method": "compressed-tensors", "format": form}, parts)
    got = made["m.weight"].to_f32()
    np.testing.assert_array_equal(got, want.float().numpy())


@pytest.mark.torch
@pytest.mark.parametrize("shape", [(576, 256), (192, 576), (300, 64), (128, 128)])
def test_block_fp8_of_compressed_tensors_equals_its_library(shape: tuple[int, int]) -> None:
    """Also where the last block of a row or column is smaller."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(2)
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    counts = [-(-n // 128) for n in shape]
    state = {
        "weight": torch.randn(shape, dtype=torch.bfloat16),
        "weight_scale": (torch.rand(counts) * 0.1 + 0.01).to(torch.bfloat16),
    }
    compressor = BaseCompressor.get_value_from_registry("float-quantized")
    packed = compressor.compress(dict(state), scheme)
    want = compressor.decompress(dict(packed), scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    made = unpack(config, from_torch({f"m.{name}": tensor for name, tensor in packed.items()}))
    np.testing.assert_array_equal(made["m.weight"].to_f32(), want.float().numpy())


@pytest.mark.torch
@pytest.mark.parametrize("scales", ["[rows]", "[rows, 1]", "[1]", "blocks"])
def test_fp8_scales_per_row_tensor_and_partial_block(scales: str) -> None:
    import torch

    torch.manual_seed(3)
    weight = torch.randn(200, 130).to(torch.float8_e4m3fn)
    shape = {"[rows]": (200,), "[rows, 1]": (200, 1), "[1]": (1,), "blocks": (2, 2)}[scales]
    scale = torch.rand(shape)
    config: dict[str, Any] = {"quant_method": "fp8"}
    spread = scale.reshape(-1, 1)
    if scales == "blocks":
        config["weight_block_size"] = [128, 128]
        spread = scale[torch.arange(200) // 128][:, torch.arange(130) // 128]
    want = (weight.float() * spread).to(torch.bfloat16)
    made = unpack(config, from_torch({"m.weight": weight, "m.weight_scale": scale}))
    np.testing.assert_array_equal(made["m.weight"].to_f32(), want.float().numpy())


def partial_gptq() -> dict[str, np.ndarray]:
    """144 inputs in groups of 64: the last has 16."""
    random = np.random.default_rng(4)
    return {
        "m.qweight": random.integers(-(2**31), 2**31, (18, 16), dtype=np.int64).astype(np.int32),
        "m.qzeros": random.integers(-(2**31), 2**31, (3, 2), dtype=np.int64).astype(np.int32),
        "m.scales": (random.random((3, 16)) * 0.02).astype(np.float16),
    }


def test_gptq_without_g_idx_follows_group_size() -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    index = {"m.g_idx": np.arange(144, dtype=np.int32) // 64}
    made = unpack(config, split(partial_gptq()))["m.weight"]
    stated = unpack(config, split({**partial_gptq(), **index}))["m.weight"]
    assert made.data.tobytes() == stated.data.tobytes()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"desc_act": True}, "m.g_idx is missing"),
        ({"group_size": 32}, "144 inputs in groups of 32 cannot have 3 scales"),
        ({"group_size": "x"}, "group_size is 'x'"),
        ({"desc_act": "x"}, "desc_act is 'x'"),
        ({"sym": 1}, "sym is 1; supported: true, false"),
    ],
)
def test_groups_that_the_config_does_not_explain_are_refused(
    changes: dict[str, Any], why: str
) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, **changes}
    with pytest.raises(ModelError, match=why):
        unpack(config, split(partial_gptq()))
    index = {"m.g_idx": np.arange(144, dtype=np.int32) // 64}
    if changes != {"desc_act": True}:
        with pytest.raises(ModelError, match=why):
            unpack(config, split({**partial_gptq(), **index}))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"m.g_idx": np.zeros(1, np.int32)}, "g_idx is .1,., and the weight has 144 inputs"),
        ({"m.weight": np.zeros((16, 144), np.float16)}, "m.weight is in the files twice"),
        ({"m.qweight": np.zeros((18, 16), np.int64)}, "type int64, not int32"),
        ({"m.qzeros": np.zeros((4, 2), np.int32)}, "zero points .4, 16. do not fit scales .3, 16."),
    ],
)
def test_tensors_that_contradict_each_other_are_refused(
    changes: dict[str, np.ndarray], why: str
) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    with pytest.raises(ModelError, match=why):
        unpack(config, split(partial_gptq() | changes))


def packed_arrays() -> dict[str, np.ndarray]:
    """16 × 64 values of 4 bits in groups of 32, each word with the values 0 to 7."""
    return {
        "m.weight_packed": np.full((16, 8), 0x76543210, np.int32),
        "m.weight_scale": np.arange(1, 33, dtype=np.float32).reshape(16, 2),
        "m.weight_shape": np.array([16, 64], np.int64),
    }


def compressed_config(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32, **weights}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("weights", "arrays", "why"),
    [
        ({"symmetric": False}, {}, "m.weight_zero_point is missing"),
        ({"actorder": "group"}, {}, "m.weight_g_idx is missing"),
        ({"num_bits": 3}, {}, "num_bits is 3"),
        ({"num_bits": 8}, {}, "do not hold 16 × 64 values of 8 bits"),
        ({}, {"m.weight_zero_point": np.zeros((2, 3), np.int32)}, "zero points .16, 3. do not fit"),
        ({}, {"m.weight_g_idx": np.zeros(1, np.int32)}, "the weight has 64 inputs"),
    ],
)
def test_a_compressed_weight_without_what_its_config_needs_is_refused(
    weights: dict[str, Any], arrays: dict[str, np.ndarray], why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        unpack(compressed_config(**weights), split(packed_arrays() | arrays))


def test_a_g_idx_of_minus_one_leaves_the_columns_in_order() -> None:
    """The value with which compressed-tensors fills it before it knows an order."""
    plain = unpack(compressed_config(), split(packed_arrays()))["m.weight"]
    none = {"m.weight_g_idx": np.full(64, -1, np.int32)}
    made = unpack(compressed_config(actorder="group"), split(packed_arrays() | none))["m.weight"]
    assert made.data.tobytes() == plain.data.tobytes()


def test_the_version_of_awq_may_be_in_capitals() -> None:
    assert check_keys("awq", {"version": "GEMM"}) == []
    with pytest.raises(ModelError, match="version is 'GEMV'"):
        check_keys("awq", {"version": "GEMV"})
    with pytest.raises(ModelError, match="zero_point is 'x'"):
        check_keys("awq", {"zero_point": "x"})


def test_other_layouts_of_awq_are_refused_by_the_names_of_transformers() -> None:
    from transformers.utils.quantization_config import AwqConfig

    for keys in ({"format": "gemv"}, {"format": "gemv_fast"}, {"backend": "llm-awq"}):
        assert AwqConfig(**keys).format != "gemm"
        with pytest.raises(ModelError, match="|".join(keys)):
            check_keys("awq", keys)
    assert AwqConfig(format="gemm").format == "gemm"
    assert check_keys("awq", {"format": "gemm", "backend": "auto"}) == []


FP8: dict[str, Any] = {"quant_method": "fp8"}
COMPRESSED_CONFIG: dict[str, Any] = {"quant_method": "compressed-tensors"}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        *[
            ({**FP8, "weight_block_size": value}, "weight_block_size")
            for value in ([0, 128], "x", [128], 5, [128.0, 128], [None, 1], {"a": 1}, [-1, 2])
        ],
        *[
            ({**COMPRESSED_CONFIG, "config_groups": value}, key)
            for value, key in (
                ("x", "config_groups"),
                ({"a": "x"}, "a is 'x'"),
                ({"a": {"weights": "x"}}, "weights"),
                ({"a": {"weights": {"block_structure": [0, 0]}}}, "block_structure"),
                ({"a": {"weights": {"strategy": "block"}}}, "block_structure"),
                ({"a": {"weights": {"group_size": "x"}}}, "group_size"),
                ({"a": {"targets": ["re:("]}, "b": {"targets": ["Linear"]}}, "targets"),
                ({"a": {"targets": 5}, "b": {"targets": ["Linear"]}}, "targets"),
            )
        ],
        ({**COMPRESSED_CONFIG, "sparsity_config": "x"}, "sparsity_config"),
        ({**COMPRESSED_CONFIG, "format": "x"}, "format is 'x'; supported: dense"),
        ({**COMPRESSED_CONFIG, "config_groups": {"a": {"format": "x"}}}, "format is 'x'"),
        *[
            ({**COMPRESSED_CONFIG, "config_groups": {"a": {"weights": {key: value}}}}, key)
            for key, value in (
                ("type", "x"),
                ("type", "int"),
                ("strategy", "x"),
                ("symmetric", "x"),
                ("symmetric", 1),
                ("actorder", "x"),
            )
        ],
        ({**FP8, "activation_scheme": "x"}, "activation_scheme"),
        *[  # nulls that the libraries refuse
            ({**COMPRESSED_CONFIG, "config_groups": {"a": {"weights": {key: None}}}}, key)
            for key in ("type", "symmetric", "num_bits")
        ],
        ({**COMPRESSED_CONFIG, "config_groups": {"a": {"targets": None}}}, "targets is None"),
        ({**COMPRESSED_CONFIG, "config_groups": {"a": None}}, "a is None, not an object"),
        ({**COMPRESSED_CONFIG, "config_groups": None}, "config_groups is None, not an object"),
        ({**COMPRESSED_CONFIG, "config_groups": []}, "config_groups is \\[\\], not an object"),
        ({**COMPRESSED_CONFIG, "format": None}, "format is None"),
        ({**FP8, "activation_scheme": None}, "activation_scheme is None"),
    ],
)
def test_a_wrong_value_in_the_quantization_config_is_named(
    config: dict[str, Any], key: str
) -> None:
    floats, _ = split({"m.weight_scale": np.ones((256, 2), np.float32)})
    raw = {"m.weight": RawTensor("F8_E4M3", (256, 256), np.zeros(65536, np.uint8))}
    with pytest.raises(ModelError, match=key):
        unpack_checkpoint(config, floats, raw, "config.json")


@pytest.mark.parametrize("key", ["bits", "group_size", "checkpoint_format", "format"])
def test_a_null_that_decides_the_values_of_gptq_is_refused(key: str) -> None:
    """transformers refuses it, too; absent, each of them but `bits` has a default."""
    config = {"quant_method": "gptq", "bits": 4, key: None}
    with pytest.raises(ModelError, match=f"{key} is None"):
        unpack_checkpoint(config, *split(random_gptq(4, 32, symmetric=False)), "config.json")
    assert unpack({"quant_method": "gptq", "bits": 4}, split(random_gptq(4, 32, symmetric=False)))


def test_a_quantization_config_over_float_weights_is_a_warning() -> None:
    floats, raw = split({"m.weight": np.ones((4, 32), np.float32)})
    for config in (
        {**FP8, "weight_block_size": [128, 128]},
        {**COMPRESSED_CONFIG, "config_groups": {"a": {"targets": ["Linear"]}}},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "mxfp4"},
    ):
        made, _, (warning,) = unpack_checkpoint(config, floats, raw, "config.json")
        assert made == floats
        assert warning == (
            f"quantization_config says {config['quant_method']}, and no weight of the files is "
            "quantised; they are used as they are"
        )


def test_an_unknown_key_of_the_quantization_config_is_named() -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "novelty": 3}
    _, _, warnings = unpack_checkpoint(config, *split(partial_gptq()), "config.json")
    assert warnings == ("quantization_config has keys that are ignored: novelty",)


# ------------------------------------------------------------------------- blocks (quant packed)


def random_gptq(bits: int, group: int, *, symmetric: bool, order: bool = False) -> dict[str, Any]:
    """A random GPTQ module of 128 inputs and 16 outputs, in the format gptq_v2."""
    random, (k, n) = np.random.default_rng(bits + group), (128, 16)
    per, groups = 32 // bits, k // group
    words = random.integers(-(2**31), 2**31, (k // per, n), dtype=np.int64).astype(np.int32)
    zeros = random.integers(-(2**31), 2**31, (groups, n // per), dtype=np.int64).astype(np.int32)
    if symmetric:
        middle = sum(1 << (bits - 1) << (bits * i) for i in range(per))
        zeros[:] = np.array(middle, np.uint32).view(np.int32)
    index = np.arange(k, dtype=np.int32) // group
    return {
        "m.qweight": words,
        "m.qzeros": zeros,
        "m.scales": (random.random((groups, n)) * 0.02 + 0.001).astype(np.float16),
        "m.g_idx": random.permutation(index) if order else index,
    }


def test_a_format_in_capitals_is_the_same_format() -> None:
    arrays = random_gptq(4, 32, symmetric=False)
    made = [
        unpack({"quant_method": "gptq", "bits": 4, "checkpoint_format": name}, split(arrays))
        for name in ("gptq_v2", "GPTQ_V2", "gptq")
    ]
    small, capital, other = (one["m.weight"].to_f32() for one in made)
    assert (small == capital).all()
    assert (small != other).any()


def test_format_is_the_newer_name_of_checkpoint_format() -> None:
    from transformers.utils.quantization_config import GPTQConfig

    for keys in (
        {"format": "gptq_v2"},
        {"format": "gptq"},
        {"format": "gptq_v2", "checkpoint_format": "gptq"},
        {"format": "gptq", "checkpoint_format": "gptq_v2"},
    ):
        config = {"quant_method": "gptq", "bits": 4, **keys}
        wanted = {**config, "format": None, "checkpoint_format": GPTQConfig(bits=4, **keys).format}
        arrays = random_gptq(4, 32, symmetric=False)
        made, same = (unpack(one, split(arrays))["m.weight"] for one in (config, wanted))
        assert (made.to_f32() == same.to_f32()).all(), keys
        assert check_keys("gptq", config) == []
    with pytest.raises(ModelError, match="format is 'marlin'"):
        check_keys("gptq", {"format": "marlin"})


@pytest.mark.parametrize("name", ["m.qzeros", "m.scales"])
def test_a_tensor_without_dimensions_is_an_error_that_names_the_weight(name: str) -> None:
    arrays = random_gptq(4, 32, symmetric=False)
    arrays[name] = arrays[name].reshape(-1)[0].reshape(())
    with pytest.raises(ModelError, match="gptq, m"):
        unpack({"quant_method": "gptq", "bits": 4}, split(arrays))


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(
    ("bits", "symmetric", "type"),
    [(4, True, "q4_0"), (4, False, "q5_0"), (8, True, "q8_0"), (2, False, "q4_0")],
)
def test_blocks_hold_the_product_before_its_last_rounding(
    bits: int, symmetric: bool, type: str, group: int
) -> None:
    config = {"quant_method": "gptq", "bits": bits, "checkpoint_format": "gptq_v2"}
    arrays = random_gptq(bits, group, symmetric=symmetric)
    floats = unpack(config, split(arrays))["m.weight"]
    made, rest, warnings = unpack_checkpoint(config, *split(arrays), "config.json", blocks=True)
    assert (made["m.weight"].type, made["m.weight"].shape) == (type, floats.shape)
    assert not rest
    assert not warnings
    values = made["m.weight"].to_f32()
    assert to_type(values, "f16").tobytes() == floats.data.tobytes()
    assert (values != floats.to_f32()).any(), "the dequantiser rounds; blocks do not"


def test_blocks_of_awq_and_compressed_tensors() -> None:
    random = np.random.default_rng(4)
    words = random.integers(-(2**31), 2**31, (64, 5), dtype=np.int64).astype(np.int32)
    awq = {
        "m.qweight": words[:, :4],
        "m.qzeros": words[:2, :4],
        "m.scales": (random.random((2, 32)) * 0.02).astype(np.float16),
    }
    compressed = {
        "m.weight_packed": words[:32, :4],
        "m.weight_scale": (random.random((32, 1)) * 0.02).astype(np.float16),
        "m.weight_shape": np.array([32, 32], np.int64),
    }
    for config, arrays, kind in (
        ({"quant_method": "awq", "bits": 4}, awq, "q5_0"),
        ({"quant_method": "compressed-tensors"}, compressed, "q4_0"),
    ):
        floats = unpack(config, split(arrays))["m.weight"]
        made = unpack_checkpoint(config, *split(arrays), "config.json", blocks=True)[0]["m.weight"]
        assert made.type == kind
        assert to_type(made.to_f32(), "f16").tobytes() == floats.data.tobytes()


def test_what_no_block_holds_is_unpacked_with_a_warning() -> None:
    config = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}
    ordered = random_gptq(4, 32, symmetric=True, order=True)
    narrow = random_gptq(4, 16, symmetric=True)
    tiny = random_gptq(4, 32, symmetric=True)
    tiny["m.scales"] = np.full(tiny["m.scales"].shape, 1.1e-7, np.float32)
    wide = random_gptq(8, 32, symmetric=False)
    for arrays, bits in ((ordered, 4), (narrow, 4), (tiny, 4), (wide, 8)):
        packing = {**config, "bits": bits}
        floats = unpack(packing, split(arrays))["m.weight"]
        made, _, warnings = unpack_checkpoint(packing, *split(arrays), "config.json", blocks=True)
        assert made["m.weight"].type == floats.type
        assert made["m.weight"].data.tobytes() == floats.data.tobytes()
        assert "1 quantised weights are unpacked to floats, such as m.weight" in warnings[0]


# ------------------------------------------------------------------------- blocks for a GPU


def gpu_type(config: dict[str, Any], parts: Any) -> str:
    """The type in which the weight stays; it has the bits of the unpacked weight (unpack)."""
    unpack(config, parts)
    made, _, warnings = unpack_checkpoint(config, *parts, "config.json", gpu=True)
    type = made["m.weight"].type
    assert ("unpacked to floats" in "".join(warnings)) == (type in TYPES.values())
    return type


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "type"),
    [
        (4, 128, True, "i4_128_f16"),
        (4, 64, True, "i4_32_f16"),
        (4, 32, False, "i4z_32_f16"),
        (8, 128, True, "i8_128_f16"),
        (8, 32, False, "i8z_32_f16"),
        (2, 128, False, "i4z_128_f16"),
        (4, 16, True, "f16"),
    ],
)
def test_gptq_in_blocks_for_a_gpu(bits: int, group: int, symmetric: bool, type: str) -> None:
    config = {"quant_method": "gptq", "bits": bits, "checkpoint_format": "gptq_v2"}
    arrays = random_gptq(bits, group, symmetric=symmetric)
    assert gpu_type(config, split(arrays)) == type
    ordered = random_gptq(bits, 32, symmetric=symmetric, order=True)
    assert gpu_type(config, split(ordered)) == "f16", "desc_act"


def test_awq_and_compressed_integers_in_blocks_for_a_gpu() -> None:
    random = np.random.default_rng(4)
    words = random.integers(-(2**31), 2**31, (64, 8), dtype=np.int64).astype(np.int32)
    awq = {
        "m.qweight": words,
        "m.qzeros": words[:2],
        "m.scales": (random.random((2, 64)) * 0.02).astype(np.float16),
    }
    assert gpu_type({"quant_method": "awq", "bits": 4}, split(awq)) == "i4z_32_f16"
    compressed = {
        "m.weight_packed": words[:8].repeat(2, 1),
        "m.weight_scale": (random.random((8, 1)) * 0.02).astype(np.float32),
        "m.weight_shape": np.array([8, 128], np.int64),
    }
    config = {"quant_method": "compressed-tensors"}
    assert gpu_type(config, split(compressed)) == "i4_128_f32"
    compressed["m.weight_zero_point"] = random.integers(-8, 8, (8, 1)).astype(np.int8)
    assert gpu_type(config, split(compressed)) == "i4z_128_f32"
    for name in ("packed", "shape", "zero_point"):
        del compressed[f"m.weight_{name}"]
    compressed["m.weight"] = random.integers(-128, 128, (8, 128)).astype(np.int8)
    compressed["m.weight_scale"] = compressed["m.weight_scale"].astype(np.float16)
    assert gpu_type(config, split(compressed)) == "i8_128_f16"


def test_fp8_in_blocks_for_a_gpu() -> None:
    random = np.random.default_rng(5)
    codes = random.integers(0, 256, (8, 256), dtype=np.uint8)
    codes[codes & 127 == 127] = 3  # NaN
    for columns, scale, block, type in (
        (256, (1, 2), [128, 128], "e4m3_128_bf16"),
        (64, (2, 2), [4, 32], "e4m3_32_bf16"),
        (128, (8,), None, "e4m3_128_bf16"),
        (32, (1,), None, "e4m3_32_bf16"),
        (48, (1,), None, "bf16"),
    ):
        floats, _ = split({"m.weight_scale": random.random(scale, dtype=np.float32)})
        data = np.ascontiguousarray(codes[:, :columns])
        config = {"quant_method": "fp8", "weight_block_size": block}
        for byte, expected in ((3, type), (255, "bf16")):  # a NaN is unpacked
            data[5, 7] = byte
            raw = {"m.weight": RawTensor("F8_E4M3", (8, columns), data.reshape(-1))}
            assert gpu_type(config, (floats, raw)) == expected


def test_a_type_that_exists_in_memory_only_is_not_written(tmp_path: Path) -> None:
    tensor = Tensor("w", "i8_32_f16", (1, 32), np.zeros(34, np.uint8))
    with pytest.raises(ModelError, match="unknown type 'i8_32_f16'"):
        write_gguf(tmp_path / "x.gguf", {}, [tensor])
    assert set(CHECKPOINT_TYPES).isdisjoint(BLOCKS)


@pytest.mark.parametrize(("config", "why"), REFUSED_FORMATS)
def test_other_formats_are_refused_by_name(config: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        unpack_checkpoint(config, {}, {}, "config.json")


def test_a_quantised_directory_loads_as_floats(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    weight = torch.randn(128, 128).to(torch.float8_e4m3fn)
    tensors = {"m.weight": weight, "m.weight_scale_inv": torch.ones(1, 1), "n": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    packing = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": packing}))
    found = read_directory(tmp_path)
    assert "quantization_config" not in found.config
    assert {name: tensor.type for name, tensor in found.tensors.items()} == {
        "m.weight": "bf16",
        "n": "f32",
    }
    np.testing.assert_array_equal(found.tensors["m.weight"].to_f32(), weight.float().numpy())
    tensors["m.weight"] = (weight.float() * 2).to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_directory(tmp_path).digest != found.digest, "the digest covers packed weights"


def test_unknown_keys_of_a_config_group_are_named() -> None:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = dict.fromkeys(QuantizationArgs.model_fields)
    group = {**dict.fromkeys(QuantizationScheme.model_fields), "weights": weights}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    assert check_keys("compressed-tensors", config) == []
    group["rotate"] = weights["zero_offset"] = True
    (warning,) = check_keys("compressed-tensors", config)
    assert warning.endswith("ignored: group_0.rotate, group_0.weights.zero_offset")


@pytest.mark.parametrize("key", ["input_activations", "output_activations"])
def test_quantised_activations_of_a_config_group_are_a_warning(key: str) -> None:
    config = {"quant_method": "compressed-tensors", "config_groups": {"g": {key: {"num_bits": 8}}}}
    *_, (warning, _) = unpack_checkpoint(config, {}, {}, "config.json")
    assert "asks for quantised activations" in warning
