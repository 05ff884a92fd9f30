"""Safetensors reader: files of the safetensors library are read; invalid files are rejected."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from verbatim.base.errors import ModelError
from verbatim.files.safetensors import read_directory, read_json, read_safetensors
from verbatim.formats.conversion import dequantise, quantise

RNG = np.random.default_rng(0)
A = RNG.standard_normal((3, 8), dtype=np.float32)
B = RNG.standard_normal((5,), dtype=np.float32).astype(np.float16)


def raw_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def directory(path: Path, **files: Any) -> Path:
    """A model directory; file names have __ for dots."""
    path.mkdir(exist_ok=True)
    for name, content in {"config__json": {"model_type": "llama"}, **files}.items():
        (path / name.replace("__", ".")).write_text(json.dumps(content))
    return path


def test_a_directory_with_one_file_is_read(tmp_path: Path) -> None:
    model = directory(tmp_path / "m", generation_config__json={"eos_token_id": [1, 2]})
    save_file(
        {"a": A, "b": B, "mask": np.ones((2, 2), dtype=np.bool_), "ids": np.arange(3)},
        model / "model.safetensors",
        metadata={"format": "pt"},
    )
    found = read_directory(model)
    assert found.config == {"model_type": "llama"}
    assert found.generation_config == {"eos_token_id": [1, 2]}
    assert set(found.tensors) == {"a", "b"}
    types = {name: tensor.dtype for name, tensor in found.others.items()}
    assert types == {"mask": "BOOL", "ids": "I64"}
    assert (found.tensors["a"].type, found.tensors["b"].type) == ("f32", "f16")
    np.testing.assert_array_equal(found.tensors["a"].to_f32(), A)
    np.testing.assert_array_equal(found.tensors["b"].to_f32(), B.astype(np.float32))


@pytest.mark.torch
def test_bf16_and_scalars_written_by_pytorch_are_read(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    values = torch.randn(7, 6, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    save_torch({"w": values, "s": torch.tensor(2.5)}, tmp_path / "x.safetensors")
    tensors, _ = read_safetensors(tmp_path / "x.safetensors")
    assert tensors["w"].type == "bf16"
    np.testing.assert_array_equal(tensors["w"].to_f32(), values.float().numpy())
    assert tensors["s"].shape == (1,)
    assert tensors["s"].to_f32()[0] == 2.5


def sharded(path: Path, index: Any = None) -> Path:
    model = directory(path)
    save_file({"a": A}, model / "model-00001-of-00002.safetensors")
    save_file({"b": B}, model / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    content = (
        {"metadata": {"total_size": 106}, "weight_map": weight_map} if index is None else index
    )
    (model / "model.safetensors.index.json").write_text(json.dumps(content))
    return model


def test_a_directory_with_shards_is_read(tmp_path: Path) -> None:
    found = read_directory(sharded(tmp_path / "m"))
    np.testing.assert_array_equal(found.tensors["a"].to_f32(), A)
    np.testing.assert_array_equal(found.tensors["b"].to_f32(), B.astype(np.float32))


def test_the_digest_depends_on_the_weights_and_not_on_the_shards(tmp_path: Path) -> None:
    whole = directory(tmp_path / "whole")
    save_file({"b": B, "a": A}, whole / "model.safetensors")
    split = sharded(tmp_path / "split")
    assert read_directory(whole).digest == read_directory(split).digest
    save_file({"b": B, "a": A + 1}, whole / "model.safetensors")
    assert read_directory(whole).digest != read_directory(split).digest


def test_symbolic_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    """A snapshot in the hub's cache is a directory of links to ../../blobs."""
    (tmp_path / "blobs").mkdir()
    save_file({"a": A}, tmp_path / "blobs" / "abc")
    model = directory(tmp_path / "snapshot")
    (model / "model.safetensors").symlink_to(tmp_path / "blobs" / "abc")
    assert set(read_directory(model).tensors) == {"a"}


SHARD = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../m/" + SHARD}, "leads out"),
        ({"a": "/etc/x.safetensors"}, "leads out"),
        ({"a": "..\\x.safetensors"}, "leads out"),
        ({"a": "c:x.safetensors"}, "leads out"),
        ({"a": "a\0.safetensors"}, "leads out"),
        ({"a": "..safetensors"}, "not the name"),
        ({"a": "/etc/passwd"}, "leads out"),
        ({"a": "model.bin"}, "not the name"),
        ({"a": 3}, "not the name"),
        ({"a": None}, "not the name"),
        ({"a": "missing.safetensors"}, "missing"),
        ({"z": SHARD}, "'z'"),
        ({"b": SHARD}, "'b'"),
        ({}, "weight_map"),
        ([], "weight_map"),
    ],
)
def test_an_invalid_index_is_rejected(weight_map: Any, message: str, tmp_path: Path) -> None:
    model = sharded(tmp_path / "m", {"weight_map": weight_map})
    with pytest.raises(ModelError, match=message):
        read_directory(model)


def test_a_tensor_in_two_shards_is_rejected(tmp_path: Path) -> None:
    model = sharded(tmp_path / "m")
    save_file({"a": A, "b": B}, model / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelError, match="two shards"):
        read_directory(model)


def test_a_single_file_beside_the_shards_of_an_index_is_rejected(tmp_path: Path) -> None:
    """transformers reads model.safetensors there, and not the shards."""
    model = sharded(tmp_path / "m")
    save_file({"a": A + 1, "b": B}, model / "model.safetensors")
    with pytest.raises(ModelError, match="two sets of weights"):
        read_directory(model)


def test_an_index_may_name_the_single_file(tmp_path: Path) -> None:
    model = directory(tmp_path / "m")
    save_file({"a": A}, model / "model.safetensors")
    index = {"weight_map": {"a": "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(read_directory(model).tensors) == {"a"}


def test_the_error_says_which_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a directory"):
        read_directory(tmp_path / "nowhere")
    model = tmp_path / "m"
    model.mkdir()
    with pytest.raises(ModelError, match=r"needs config\.json"):
        read_directory(model)
    directory(model)
    with pytest.raises(ModelError, match="no safetensors file"):
        read_directory(model)
    (model / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(ModelError, match="pickle"):
        read_directory(model)
    save_file({"a": A}, model / "x.safetensors")
    assert set(read_directory(model).tensors) == {"a"}
    save_file({"a": A}, model / "y.safetensors")
    with pytest.raises(ModelError, match="no model"):
        read_directory(model)


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE: dict[str, tuple[Any, bytes, str]] = {
    "not JSON": (b"{abc}", b"", "not valid JSON"),
    "not UTF-8": (b'{"\xff":1}', b"", "not valid JSON"),
    "not an object": ([1], b"", "not an object"),
    "nested too deeply": (b'{"a":' + b"[" * 100_000, b"", "deep|memory"),
    "a number of 10,000 digits": (b'{"a":' + b"9" * 10_000 + b"}", b"", "not valid JSON"),
    "a name twice": (b'{"a":1,"a":2}', b"", "twice"),
    "an entry that is not an object": ({"a": 3}, b"", "exactly"),
    "a missing field": ({"a": {"dtype": "F32", "shape": [2]}}, b"", "exactly"),
    "an extra field": ({"a": entry() | {"x": 1}}, bytes(8), "exactly"),
    "an unknown dtype": ({"a": entry("F7")}, bytes(8), "dtype"),
    "a dtype that is a list": ({"a": entry(["F32"])}, bytes(8), "dtype"),
    "a negative dimension": ({"a": entry(shape=[-2])}, bytes(8), "shape"),
    "a dimension of true": ({"a": entry(shape=[True, 2])}, bytes(8), "shape"),
    "a dimension of 2.0": ({"a": entry(shape=[2.0])}, bytes(8), "shape"),
    "a shape that is text": ({"a": entry(shape="22")}, bytes(8), "shape"),
    "thousands of dimensions": ({"a": entry(shape=[1] * 5000)}, bytes(8), "shape"),
    "a dimension beyond 64 bits": ({"a": entry(shape=[10**100])}, bytes(8), "shape"),
    "a product that wraps around 64 bits": (
        {"a": entry(shape=[2**62 + 1, 2**2])},
        bytes(16),
        "takes",
    ),
    "an empty weight": ({"a": entry(shape=[0], offsets=[0, 0])}, b"", "empty"),
    "offsets that are text": ({"a": entry(offsets="08")}, bytes(8), "offsets"),
    "three offsets": ({"a": entry(offsets=[0, 8, 8])}, bytes(8), "offsets"),
    "negative offsets": ({"a": entry(offsets=[-8, 0])}, bytes(8), "offsets"),
    "offsets in reverse": ({"a": entry(offsets=[8, 0])}, bytes(8), "takes"),
    "more bytes than the shape": ({"a": entry(offsets=[0, 12])}, bytes(12), "takes"),
    "beyond the file": ({"a": entry()}, bytes(7), "cut short"),
    "trailing bytes": ({"a": entry()}, bytes(9), "belong to none"),
    "a gap": ({"a": entry(), "b": entry(offsets=[16, 24])}, bytes(24), "begins at 16"),
    "an overlap": ({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12), "begins at 4"),
    "equal offsets": ({"a": entry(), "b": entry()}, bytes(8), "begins at 0"),
    "not at the beginning": ({"a": entry(offsets=[8, 16])}, bytes(16), "begins at 8"),
    "a name of 100 kB": ({"a" * 100_000: 1}, b"", "exactly"),
    "half a byte": ({"a": entry("F4", [1], [0, 0])}, b"", "takes 4 bits"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_an_invalid_header_is_rejected(case: str, tmp_path: Path) -> None:
    header, data, message = HOSTILE[case]
    file = raw_file(tmp_path / "x.safetensors", header, data)
    with pytest.raises(ModelError, match=message) as caught:
        read_safetensors(file)
    assert caught.value.file == str(file)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("length", [0, 1, 10**6, 2**40, 2**63, 2**64 - 1, 2**64 - 8])
def test_an_invalid_header_length_is_rejected(length: int, tmp_path: Path) -> None:
    file = raw_file(tmp_path / "x.safetensors", {"a": entry()}, bytes(8), length)
    with pytest.raises(ModelError, match="header"):
        read_safetensors(file)


def test_a_tensor_name_with_a_lone_surrogate_is_read(tmp_path: Path) -> None:
    """JSON can encode a lone surrogate; no weight has such a name."""
    model = directory(tmp_path / "m")
    raw_file(
        model / "model.safetensors", b'{"\\ud800":' + json.dumps(entry()).encode() + b"}", bytes(8)
    )
    assert list(read_directory(model).tensors) == ["\ud800"]


@pytest.mark.parametrize("filling", [b"[],", b"1,", b'"a":1,', b"{}," * 2, b'{"a":{"b":[]}},'])
def test_json_that_would_take_too_much_memory_is_rejected_unparsed(
    filling: bytes, tmp_path: Path
) -> None:
    """Three bytes of JSON can become a hundred bytes of Python objects."""
    body = b'{"x":[' + filling * ((8 << 20) // len(filling)) + b"0]}"
    (tmp_path / "config.json").write_bytes(body)
    raw_file(tmp_path / "x.safetensors", body)
    for read in (
        lambda: read_json(tmp_path / "config.json"),
        lambda: read_safetensors(tmp_path / "x.safetensors"),
    ):
        tracemalloc.start()
        with pytest.raises(ModelError, match="memory"):
            read()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < len(body) + (64 << 20)


def test_configs_that_are_too_long_or_not_objects_are_rejected(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_bytes(b" " * (33 << 20))
    with pytest.raises(ModelError, match="longer than"):
        read_json(config)
    config.write_bytes(b"[1]")
    with pytest.raises(ModelError, match="not an object"):
        read_json(config)
    config.unlink()
    config.mkdir()
    with pytest.raises(ModelError, match="not a regular file"):
        read_json(config)


def test_unaligned_data_are_read(tmp_path: Path) -> None:
    """The length of the header decides where the data start; the format has no alignment."""
    values = RNG.standard_normal((4, 32), dtype=np.float32)
    header = json.dumps({"a": entry("F32", [4, 32], [0, 512])}).encode()
    for pad in range(4):
        file = raw_file(tmp_path / "x.safetensors", header + b" " * pad, values.tobytes())
        tensor = read_safetensors(file)[0]["a"]
        np.testing.assert_array_equal(tensor.to_f32(), values)
        np.testing.assert_array_equal(
            dequantise("q8_0", quantise("q8_0", tensor.to_f32()), (4, 32)),
            dequantise("q8_0", quantise("q8_0", values), (4, 32)),
        )
