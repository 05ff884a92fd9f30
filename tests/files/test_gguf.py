"""GGUF reader and writer, against each other and the `gguf` package.

tests/parity/test_default_model.py compares the default model as both read it."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path
from typing import Any

import gguf as oracle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verbatim.base.errors import ModelError
from verbatim.files import gguf as reader
from verbatim.files import split
from verbatim.files.gguf import read_gguf
from verbatim.files.gguf_types import OTHER_TYPES, TYPES
from verbatim.files.gguf_write import LazyTensor, converted, write_gguf
from verbatim.formats.conversion import nbytes
from verbatim.formats.registry import BLOCKS
from verbatim.formats.tensor import Tensor

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "a.u8": 200,
    "a.i8": -100,
    "a.u16": 60_000,
    "a.i16": -30_000,
    "a.u32": 4_000_000_000,
    "a.i32": -2_000_000_000,
    "a.u64": 2**64 - 1,
    "a.i64": -(2**63),
    "a.f32": 0.5,
    "a.f64": 0.1,
    "a.yes": True,
    "a.no": False,
    "a.text": "Grüße, 世界 \U0001f600 \0 end",
    "a.empty": "",
    "b.ints": [1, -2, 3],
    "b.floats": [0.25, -1.5],
    "b.bools": [True, False, True],
    "b.strings": ["", "a", "Ġthe", "\U0001f600"],
    "b.none": [],
    "b.nested": [[1, 2], [], [3]],
}
KINDS = {f"a.{k}": k for k in ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f32", "f64")}


def random_tensor(name: str, kind: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    raw = np.random.default_rng(seed).integers(0, 256, nbytes(kind, shape), dtype=np.uint8)
    return Tensor(name, kind, shape, raw)


def all_types() -> list[Tensor]:
    return [
        random_tensor(f"t.{kind}", kind, (3, 2, 256 * 2), index)
        for index, kind in enumerate(BLOCKS)
    ]


def test_a_written_file_is_read_back_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "all.gguf"
    write_gguf(path, METADATA, all_types(), types=KINDS)
    file = read_gguf(path)
    assert file.metadata == METADATA
    assert {k: file.types[k] for k in KINDS} == KINDS
    assert list(file.tensors) == [f"t.{kind}" for kind in BLOCKS]
    for made in all_types():
        found = file.tensors[made.name]
        assert (found.name, found.type, found.shape) == (made.name, made.type, made.shape)
        np.testing.assert_array_equal(found.data, made.data)
    assert set(TYPES.values()) == set(BLOCKS)
    assert [p.name for p in tmp_path.iterdir()] == ["all.gguf"]  # no temporary file is left


def test_the_gguf_package_reads_our_files(tmp_path: Path) -> None:
    path = tmp_path / "ours.gguf"
    write_gguf(path, METADATA, all_types(), types=KINDS)
    theirs = oracle.GGUFReader(path)
    for key, value in METADATA.items():
        if key not in ("b.none", "b.nested"):  # GGUFReader cannot return these
            assert theirs.fields[key].contents() == value, key
    tensors = {t.name: t for t in theirs.tensors}
    for made in all_types():
        found = tensors[made.name]
        assert found.tensor_type.name.lower() == made.type
        assert tuple(int(d) for d in found.shape)[::-1] == made.shape
        np.testing.assert_array_equal(found.data.reshape(-1).view(np.uint8), made.data)


def test_files_of_the_gguf_package_are_read(tmp_path: Path) -> None:
    path = tmp_path / "theirs.gguf"
    writer = oracle.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_uint32("n", 7)
    writer.add_float64("x", 0.1)
    writer.add_token_list(["a", "ß", "c"])
    writer.add_token_scores([0.5, -1.0, 2.0])
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    half = np.arange(6, dtype=np.float16).reshape(1, 6)
    writer.add_tensor("matrix", matrix)
    writer.add_tensor("half", half)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(path)
    assert file.metadata == {
        "general.architecture": "llama",
        "general.alignment": 64,
        "n": 7,
        "x": 0.1,
        "tokenizer.ggml.tokens": ["a", "ß", "c"],
        "tokenizer.ggml.scores": [0.5, -1.0, 2.0],
    }
    np.testing.assert_array_equal(file.tensors["matrix"].to_f32(), matrix)
    np.testing.assert_array_equal(file.tensors["half"].to_f32(), half.astype(np.float32))


def test_version_2_is_read(tmp_path: Path) -> None:
    path = tmp_path / "v2.gguf"
    write_gguf(path, {"k": 1}, [random_tensor("w", "q8_0", (2, 64))])
    raw = bytearray(path.read_bytes())
    raw[4] = 2
    path.write_bytes(raw)
    assert read_gguf(path).version == 2


def test_the_digest_depends_on_the_content_and_not_on_the_path(tmp_path: Path) -> None:
    def digest(name: str, metadata: dict[str, Any], seed: int) -> str:
        write_gguf(tmp_path / name, metadata, [random_tensor("w", "q8_0", (64, 256), seed)])
        return read_gguf(tmp_path / name).digest

    first = digest("a", {"k": 1}, 0)
    assert first == digest("b", {"k": 1}, 0)
    assert len({first, digest("c", {"k": 2}, 0), digest("d", {"k": 1}, 1)}) == 3


def test_the_digest_covers_all_bytes_of_small_tensors(tmp_path: Path) -> None:
    tensor = random_tensor("w", "f32", (1000,))
    digests = set()
    for at in (0, 1999, 3999):
        changed = tensor.data.copy()
        changed[at] ^= 1
        write_gguf(tmp_path / "x", {}, [Tensor("w", "f32", (1000,), changed)])
        digests.add(read_gguf(tmp_path / "x").digest)
    assert len(digests) == 3


def test_tensor_views_stay_valid_and_are_read_only(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x", {}, [random_tensor("w", "f32", (4, 4))])
    data = read_gguf(tmp_path / "x").tensors["w"].data  # the GGUFFile is garbage-collected
    assert data.sum() > 0
    assert not data.flags.writeable


# ----------------------------------------------------------------------------------------- writer


def test_lazy_tensors_are_produced_one_at_a_time(tmp_path: Path) -> None:
    order: list[str] = []

    def lazy(name: str) -> LazyTensor:
        def make() -> np.ndarray:
            order.append(name)
            return np.zeros(34 * 8, dtype=np.uint8)

        return LazyTensor(name, "q8_0", (8, 32), make)

    items = [lazy("a"), lazy("b")]
    assert order == []
    write_gguf(tmp_path / "x", {}, items)
    assert order == ["a", "b"]


def test_a_tensor_is_converted_to_another_type_when_written(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((16, 512), dtype=np.float32)
    tensor = Tensor("w", "f32", values.shape, values.reshape(-1).view(np.uint8))
    write_gguf(tmp_path / "x", {}, [converted(tensor, "q8_0")])
    found = read_gguf(tmp_path / "x").tensors["w"]
    assert found.type == "q8_0"
    assert np.abs(found.to_f32() - values).max() < 0.02


def test_conversion_holds_one_tensor_in_memory(tmp_path: Path) -> None:
    """Eight matrices of 4.5 MB are written, 36 MB in total; the peak is below 14 MB."""
    raw = np.full(1 << 22, 0x3F80, dtype="<u2").view(np.uint8)
    items = [converted(Tensor(f"w{i}", "bf16", (2048, 2048), raw), "q8_0") for i in range(8)]
    tracemalloc.start()
    write_gguf(tmp_path / "x", {}, items)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "x").stat().st_size > 35_000_000
    assert peak < 14_000_000


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"k": {}}, [], "k"),
        ({"k": [1, "a"]}, [], "k"),
        ({"k": [[[[[1]]]]]}, [], "nests"),
        ({"k": "\ud800"}, [], "k"),
        ({"general.alignment": 24}, [], "alignment"),
        ({}, [random_tensor("w", "f32", (2,)), random_tensor("w", "f32", (2,))], "twice"),
        ({}, [Tensor("w", "f32", (3,), np.zeros(8, dtype=np.uint8))], "12"),
        ({}, [Tensor("w", "f32", (1, 1, 1, 1, 1), np.zeros(4, dtype=np.uint8))], "dimensions"),
        ({}, [Tensor("w", "q4_0", (33,), np.zeros(18, dtype=np.uint8))], "multiple of 32"),
    ],
)
def test_a_failed_write_leaves_no_file(
    tmp_path: Path, metadata: Any, tensors: Any, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        write_gguf(tmp_path / "x", metadata, tensors)
    assert list(tmp_path.iterdir()) == []


SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(width=32, allow_nan=False),
    st.text(max_size=20).filter(lambda s: s.isprintable() or "\0" in s),
)
VALUES = st.one_of(
    SCALARS,
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
    st.lists(st.floats(width=32, allow_nan=False), max_size=5),
    st.lists(st.text(max_size=8), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=1, max_size=5),
    st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3), min_size=1, max_size=3),
)


@given(metadata=st.dictionaries(st.text(min_size=1, max_size=12), VALUES, max_size=6))
def test_random_metadata_is_read_back_unchanged(
    metadata: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    for key in ("general.alignment", *split.KEYS):  # a reader follows these
        metadata.pop(key, None)
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    write_gguf(path, metadata)
    back = read_gguf(path).metadata
    assert back == metadata
    assert {k: type(v) for k, v in back.items()} == {k: type(v) for k, v in metadata.items()}


def test_a_nan_is_read_back(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x", {"k": math.nan})
    assert math.isnan(read_gguf(tmp_path / "x").metadata["k"])


@pytest.mark.parametrize("chunk", [1, 3, 100, 8192])
def test_string_arrays_with_strings_of_any_length_are_read_back(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast path of the reader ends at strings of 256 bytes and at strings with a NUL."""
    monkeypatch.setattr(reader, "_STRING_CHUNK", chunk)
    rng = np.random.default_rng(chunk)
    alphabet = ["a", "Ġ", "世", "\U0001f600", "é", "\x01"]
    lengths = [0, 1, 254, 255, 256, 257, 511, 512, 70_000, *rng.integers(0, 40, 3000).tolist()]
    strings = ["".join(rng.choice(alphabet, n).tolist())[:n] for n in lengths] + [
        "x" * n for n in (254, 255, 256, 257, 65_536)
    ]
    rng.shuffle(strings)
    short = [s for s in strings if len(s) < 60] * 3
    metadata = {
        "mixed": strings,
        "short": short,
        "nul": ["a", "b\0c", "\0", "", "d"] * 20,
        "empty": [""] * 50,
    }
    write_gguf(tmp_path / "x", metadata)
    assert read_gguf(tmp_path / "x").metadata == metadata


@pytest.mark.parametrize(("number", "name"), OTHER_TYPES.items())
def test_a_tensor_of_another_type_is_refused_by_name(
    number: int, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.gguf"
    tensor = Tensor("a-matrix", "f32", (2, 32), np.zeros(256, np.uint8))
    write_gguf(path, {"general.architecture": "llama"}, [tensor])
    raw = bytearray(path.read_bytes())
    at = raw.index(b"a-matrix") + len(b"a-matrix") + 4 + 2 * 8  # after the dimensions
    raw[at : at + 4] = number.to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=f"'a-matrix' has the type {name}, which is not supp"):
        read_gguf(path)
