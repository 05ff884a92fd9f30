"""Split GGUF models: joined from any part, or rejected with the part and the fault."""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as oracle
import numpy as np
import pytest
from fuzz_worker import whole_gguf
from gguf_splitting import SPLIT_TYPES, split_gguf

from verbatim import LLM, SamplingParams
from verbatim.base.errors import ModelError
from verbatim.files.gguf import read_gguf
from verbatim.files.gguf_file import GGUFFile
from verbatim.files.gguf_write import write_gguf
from verbatim.files.split import MAX_PARTS, group_parts, parts_of
from verbatim.formats.requantise import requantise
from verbatim.formats.tensor import Tensor
from verbatim.model.loading.load import load_model

NAMES = ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-layer llama of eleven tensors with random weights and a tokenizer."""
    path = tmp_path_factory.mktemp("whole") / "whole.gguf"
    whole_gguf(path)
    file = read_gguf(path)
    rng = np.random.default_rng(0)
    tensors = []
    for tensor in file.tensors.values():
        values = rng.standard_normal(tensor.shape, dtype=np.float32) * np.float32(0.3)
        plain = Tensor(tensor.name, "f32", tensor.shape, values.reshape(-1).view(np.uint8))
        tensors.append(requantise(plain, tensor.type))
    write_gguf(path, file.metadata, tensors, types=file.types)
    return path


@pytest.fixture
def parts(whole: Path, tmp_path: Path) -> list[Path]:
    return split_gguf(whole, tmp_path / "parts", "m", (4, 5, 2))


def same(a: GGUFFile, b: GGUFFile) -> None:
    assert a.metadata == b.metadata
    assert a.types == b.types
    assert list(a.tensors) == list(b.tensors)
    for name, tensor in a.tensors.items():
        other = b.tensors[name]
        assert (tensor.name, tensor.type, tensor.shape) == (other.name, other.type, other.shape)
        np.testing.assert_array_equal(tensor.data, other.data)


# ------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_one_part_gives_the_names_of_all(name: str) -> None:
    assert parts_of(name) == NAMES
    assert parts_of(f"a/b.c/{name}") == [f"a/b.c/{part}" for part in NAMES]


@pytest.mark.parametrize(
    "name",
    [
        *("m.gguf", "m-00001-of-00001.gguf", "m-00000-of-00003.gguf", "m-00004-of-00003.gguf"),
        *("m-1-of-3.gguf", "m-00001-of-00003.gguf.part", "-00001-of-00003.gguf"),
        *("m-00001-of-99999.gguf", "m-٠٠٠٠١-of-٠٠٠٠٣.gguf", "m-00001-of-00003.safetensors"),
    ],
)
def test_other_file_names_are_not_parts(name: str) -> None:
    assert parts_of(name) == []


def test_group_parts_lists_each_model_once() -> None:
    found = group_parts(["z.gguf", NAMES[2], NAMES[1], "f/m-00002-of-00002.gguf"])
    two = ["f/m-00001-of-00002.gguf", "f/m-00002-of-00002.gguf"]
    assert found == {two[0]: two, NAMES[0]: NAMES, "z.gguf": ["z.gguf"]}


# ------------------------------------------------------------------------------------------- read


@pytest.mark.parametrize("named", [0, 1, 2])
def test_any_part_gives_the_whole_model(named: int, whole: Path, parts: list[Path]) -> None:
    found = read_gguf(parts[named])
    same(found, read_gguf(whole))
    assert found.path == parts[0]
    assert found.digest == read_gguf(parts[0]).digest


def test_tensors_of_all_parts_are_memory_mapped(parts: list[Path]) -> None:
    for tensor in read_gguf(parts[0]).tensors.values():
        assert not tensor.data.flags.writeable
        base: Any = tensor.data
        while isinstance(base, np.ndarray):
            base = base.base
        assert isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)


def test_the_first_part_may_have_no_tensors(whole: Path, tmp_path: Path) -> None:
    for sizes in [(0, 11), (0, 6, 5), (1,) * 11]:
        same(read_gguf(split_gguf(whole, tmp_path, "n", sizes)[0]), read_gguf(whole))


def test_relative_paths_and_symbolic_links_are_followed(
    parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's cache holds links to files with other names."""
    links = tmp_path / "snapshot"
    links.mkdir()
    for number, part in enumerate(parts):
        part.rename(tmp_path / f"blob{number}")
        (links / part.name).symlink_to(tmp_path / f"blob{number}")
    monkeypatch.chdir(links)
    found = read_gguf(NAMES[1])
    assert found.path == Path(NAMES[0])
    assert len(found.tensors) == 11


def test_a_split_model_gives_the_tokens_and_logprobs_of_the_whole_file(
    whole: Path, parts: list[Path]
) -> None:
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=24, logprobs=5, prompt_logprobs=5)
    for backend in ("reference", "cpu"):
        outputs = []
        for path in (whole, parts[0], parts[2]):
            with LLM(str(path), backend=backend) as llm:
                done = llm.generate("he was here", params)
                outputs.append((done.token_ids, done.logprobs, done.prompt_logprobs))
        assert len(outputs[0][0]) > 8
        assert outputs[0] == outputs[1] == outputs[2]


def test_parts_written_by_the_gguf_package_are_read(tmp_path: Path) -> None:
    """Split by tensor count and by size, with and without tensors in the first part."""
    rng = np.random.default_rng(1)
    made = {f"t{i}": rng.standard_normal((3, 32), dtype=np.float32) for i in range(7)}
    for name, options in {
        "a": {"split_max_tensors": 3},
        "b": {"split_max_size": 800},
        "c": {"split_max_tensors": 4, "small_first_shard": True},
    }.items():
        writer = oracle.GGUFWriter(tmp_path / f"{name}.gguf", "llama", **options)
        writer.add_uint32("n", 7)
        for tensor, values in made.items():
            writer.add_tensor(tensor, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        files = sorted(tmp_path.glob(f"{name}-*.gguf"))
        assert len(files) > 1
        found = read_gguf(files[0])
        assert found.metadata == {"general.architecture": "llama", "n": 7}
        assert list(found.tensors) == list(made)
        for tensor, values in made.items():
            np.testing.assert_array_equal(found.tensors[tensor].to_f32(), values)


def test_the_gguf_package_reads_the_parts_of_these_tests(parts: list[Path]) -> None:
    ours = read_gguf(parts[0]).tensors
    theirs = {}
    for number, path in enumerate(parts):
        reader = oracle.GGUFReader(path)
        assert reader.fields["split.no"].contents() == number
        assert reader.fields["split.no"].types == [oracle.GGUFValueType.UINT16]
        assert reader.fields["split.tensors.count"].types == [oracle.GGUFValueType.INT32]
        theirs |= {tensor.name: tensor for tensor in reader.tensors}
    assert set(theirs) == set(ours)
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name].data, tensor.data.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("count", [0, 1])
def test_a_merged_file_is_not_a_part(count: int, whole: Path, tmp_path: Path) -> None:
    """gguf-split --merge keeps the keys of the first part, with a split.count of 0."""
    file = read_gguf(whole)
    keys = {"split.no": 0, "split.count": count, "split.tensors.count": 11}
    write_gguf(
        tmp_path / "m.gguf",
        file.metadata | keys,
        file.tensors.values(),
        types=file.types | SPLIT_TYPES,
    )
    assert len(read_gguf(tmp_path / "m.gguf").tensors) == 11


def test_a_whole_file_with_the_name_of_a_part_is_read_alone(whole: Path, parts: list[Path]) -> None:
    """The header decides whether a file is a part, not its name."""
    shutil.copy(whole, parts[1])
    found = read_gguf(parts[1])
    assert found.path == parts[1]
    assert found.digest == read_gguf(whole).digest


# ----------------------------------------------------------------------------------------- digest


def test_the_digest_covers_all_parts(whole: Path, parts: list[Path], tmp_path: Path) -> None:
    digests = {read_gguf(parts[0]).digest, read_gguf(whole).digest}
    for part in parts:
        raw = bytearray(part.read_bytes())
        raw[-40] ^= 1
        kept = part.read_bytes()
        part.write_bytes(raw)
        digests.add(read_gguf(parts[0]).digest)
        part.write_bytes(kept)
    assert len(digests) == 5
    moved = split_gguf(whole, tmp_path / "elsewhere", "other", (4, 5, 2))
    assert read_gguf(moved[0]).digest == read_gguf(parts[0]).digest, (
        "the digest depends on the content, not on the path"
    )


def test_the_digest_of_a_whole_file_does_not_change(tmp_path: Path) -> None:
    """Receipts and the bundled draft head identify files by this digest."""
    raw = np.arange(64 * 256 // 32 * 34, dtype=np.uint64).astype(np.uint8)
    write_gguf(tmp_path / "x", {"k": 1, "split.count": 1}, [Tensor("w", "q8_0", (64, 256), raw)])
    assert (
        read_gguf(tmp_path / "x").digest
        == "68be374b2e3a024bb4c1ae7502cda9c396548da1b235c624072040a5257e6036"
    )


# ---------------------------------------------------------------------------------- invalid parts

Change = Callable[[list[Path], Path], object]


def rewritten(
    number: int, tensors: Callable[[dict[str, Tensor]], list[Tensor]] | None = None, **keys: Any
) -> Change:
    """Rewrite one part with other keys (None: remove the key) or other tensors."""

    def change(parts: list[Path], whole: Path) -> None:
        from verbatim.files import gguf

        file = gguf._read_file(parts[number])
        metadata = file.metadata | {key.replace("_", "."): value for key, value in keys.items()}
        metadata = {key: value for key, value in metadata.items() if value is not None}
        types = {key: kind for key, kind in file.types.items() if key.replace(".", "_") not in keys}
        kept = tensors(dict(file.tensors)) if tensors else list(file.tensors.values())
        write_gguf(
            parts[number],
            metadata,
            [Tensor(t.name, t.type, t.shape, t.data.copy()) for t in kept],
            types=types,
        )

    return change


def cut(number: int, keep: Callable[[int], int]) -> Change:
    return lambda parts, whole: parts[number].write_bytes(
        parts[number].read_bytes()[: keep(parts[number].stat().st_size)]
    )


def of_another(number: int) -> Change:
    """Replace a part by that of a model with another number of tensors."""

    def change(parts: list[Path], whole: Path) -> None:
        other = split_gguf(whole, parts[0].parent / "other", "m", (4, 5, 2), split_tensors_count=12)
        shutil.copy(other[number], parts[number])

    return change


def foreign_tensor(tensors: dict[str, Tensor]) -> list[Tensor]:
    return [
        *tensors.values(),
        Tensor("token_embd.weight", "f32", (4,), np.zeros(16, dtype=np.uint8)),
    ]


def exchanged(parts: list[Path], whole: Path) -> None:
    kept = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    parts[2].write_bytes(kept)


# name -> (change to the files, index of the part that the error names, error text)
INVALID: dict[str, tuple[Change, int, str]] = {
    "a part is missing": (
        lambda p, w: p[1].unlink(),
        1,
        "part 2 of 3 is missing; put all parts into one folder",
    ),
    "the first is missing": (lambda p, w: p[0].unlink(), 0, "part 1 of 3 is missing"),
    "two are missing": (
        lambda p, w: [p[1].unlink(), p[2].unlink()],
        1,
        r"part 2 of 3 is missing \(and 1 more\)",
    ),
    "a broken link": (
        lambda p, w: [p[2].unlink(), p[2].symlink_to("gone")],
        2,
        "part 3 of 3 is missing",
    ),
    "a part without data": (
        cut(1, lambda size: size - 300),
        1,
        r"ends at byte .* \(cut short\? get it again\)",
    ),
    "a part with half a header": (cut(2, lambda size: 100), 2, "cut short"),
    "an empty part": (cut(1, lambda size: 0), 1, "0 bytes are too few"),
    "another kind of file": (lambda p, w: p[1].write_bytes(b"PK" * 50), 1, "not a GGUF file"),
    "a whole model as a part": (
        lambda p, w: shutil.copy(w, p[1]),
        1,
        "it has no split.count: it is not a part of this model",
    ),
    "a part of another model": (
        of_another(1),
        1,
        r"split.tensors.count is 12, and in m-00001-of-00003.gguf 11",
    ),
    "another count": (
        rewritten(2, split_count=4),
        2,
        r"split.count is 4, and by its name \(part 3 of 3\) it should be 3",
    ),
    "one part twice": (
        lambda p, w: shutil.copy(p[1], p[2]),
        2,
        r"split.no is 1, and by its name .* it should be 2",
    ),
    "parts exchanged": (exchanged, 1, r"split.no is 2, and by its name .* it should be 1"),
    "another model's metadata": (
        rewritten(1, general_architecture="qwen2"),
        1,
        "'general.architecture' is not that of m-00001",
    ),
    "metadata that the first part lacks": (rewritten(1, a_b=3), 1, "'a.b' is not that of"),
    "a tensor twice": (
        rewritten(2, foreign_tensor),
        2,
        "'token_embd.weight' is in m-00001-of-00003.gguf too; get all parts",
    ),
    "a missing tensor": (
        rewritten(1, lambda t: list(t.values())[1:]),
        0,
        "hold 10 tensors, and split.tensors.count says 11",
    ),
    "no split.no": (rewritten(1, split_no=None), 1, "split.no is missing; get this part again"),
    "no split.tensors.count": (
        rewritten(1, split_tensors_count=None),
        1,
        "split.tensors.count is missing",
    ),
    "no split.tensors.count in the first part": (
        rewritten(0, split_tensors_count=None),
        0,
        "split.tensors.count is missing",
    ),
    "a number as text": (
        rewritten(1, split_no="1"),
        1,
        "split.no is '1', which is not a valid number",
    ),
    "a negative number": (
        rewritten(2, split_no=-1),
        2,
        "split.no is -1, which is not a valid number",
    ),
    "a negative count": (
        rewritten(1, split_tensors_count=-11),
        1,
        "split.tensors.count is -11, which is not a valid number",
    ),
    "a number beyond the count": (rewritten(1, split_no=3), 1, "split.no is 3, beyond the 3 parts"),
    "too many parts": (
        rewritten(1, split_count=MAX_PARTS + 1),
        1,
        f"split.count is {MAX_PARTS + 1}; .* up to {MAX_PARTS}",
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_part_is_rejected_by_name(case: str, whole: Path, parts: list[Path]) -> None:
    change, faulty, message = INVALID[case]
    change(parts, whole)
    with pytest.raises(ModelError, match=message) as caught:
        read_gguf(parts[0] if parts[0].exists() else parts[1])
    assert caught.value.file == str(parts[faulty])


@pytest.mark.parametrize("named", [1, 2])
@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_part_is_rejected_whichever_part_the_user_names(
    case: str, named: int, whole: Path, parts: list[Path]
) -> None:
    change, faulty, _ = INVALID[case]
    change(parts, whole)
    if case == "a whole model as a part" and named == faulty:
        return  # a whole model is read alone, see above
    with pytest.raises(ModelError) as caught:
        read_gguf(parts[named])
    # In the other cases the named part is invalid too.
    if named != faulty and parts[named].exists() and case != "parts exchanged":
        assert caught.value.file == str(parts[faulty])
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "name",
    ["x.gguf", NAMES[1], "m-00001-of-00004.gguf", "m-00001-of-00002.gguf", "m-00001-of-00001.gguf"],
)
def test_a_part_whose_file_name_contradicts_its_keys_is_rejected(
    name: str, parts: list[Path]
) -> None:
    path = parts[0].rename(parts[0].with_name(name))
    with pytest.raises(
        ModelError, match=r"this is part 1 of 3 .* call it NAME-00001-of-00003\.gguf"
    ) as caught:
        read_gguf(path)
    assert caught.value.file == str(path)


def test_load_model_rejects_a_part_with_tensors_of_other_shapes(parts: list[Path]) -> None:
    """The split keys cannot reveal such a part of another model; the architecture does."""

    def other(tensors: dict[str, Tensor]) -> list[Tensor]:
        return [
            *list(tensors.values())[:-1],
            Tensor(list(tensors)[-1], "f32", (64,), np.zeros(256, dtype=np.uint8)),
        ]

    rewritten(1, other)(parts, parts[0])
    with pytest.raises(ModelError, match=r"64"):
        load_model(parts[1])


# ------------------------------------------------------------------------------------ command line


def call(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Any, str, str]:
    from verbatim.cli.main import main

    with pytest.raises(SystemExit) as ended:
        main(arguments)
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


def test_convert_joins_the_parts(
    whole: Path, parts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    joined = tmp_path / "joined.gguf"
    assert call(["convert", str(parts[1]), str(joined)], capsys)[0] == 0
    same(read_gguf(joined), read_gguf(whole))
    assert joined.read_bytes() == whole.read_bytes(), "no split keys are left"


def test_convert_does_not_overwrite_a_part(
    parts: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for target in parts:
        code, _, err = call(["convert", str(parts[0]), str(target), "--force"], capsys)
        assert code == 2
        assert "is the source itself" in err
    assert len(read_gguf(parts[0]).tensors) == 11


def test_the_command_line_names_the_missing_part(
    parts: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    parts[2].unlink()
    code, _, err = call(["run", "-m", str(parts[0]), "--raw", "Hi"], capsys)
    assert code == 3
    [line] = err.strip().splitlines()
    assert f"{parts[2]}: part 3 of 3 is missing" in line
    code, _, err = call(["run", "-m", str(parts[0].parent), "--raw", "Hi"], capsys)
    assert f"give the GGUF file itself: {parts[0]}\n" in err
