"""Hostile model files raise a ModelError that names the fault, before memory is allocated."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from verbatim.base.errors import ModelError
from verbatim.files import gguf as reader
from verbatim.files.gguf import MAX_ARRAYS, MAX_NUMBERS, MAX_STRINGS, read_gguf

U8, U32, STRING, ARRAY, U64, F32 = 0, 4, 8, 9, 10, 0


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, body: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + body


def info(
    name: str | bytes,
    dims: tuple[int, ...],
    kind: int = F32,
    offset: int = 0,
    axes: int | None = None,
) -> bytes:
    return text(name) + struct.pack(
        f"<I{len(dims)}QIQ", len(dims) if axes is None else axes, *dims, kind, offset
    )


def gguf(
    pairs: tuple[bytes, ...] = (),
    infos: tuple[bytes, ...] = (),
    data: bytes = bytes(4096),
    **header: int,
) -> bytes:
    """A GGUF file of raw parts. `version`, `tensors` and `keys` override the header's values."""
    version, tensors, keys = (
        header.get("version", 3),
        header.get("tensors", len(infos)),
        header.get("keys", len(pairs)),
    )
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % 32) + data


HUGE = 2**63
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too few"),
    "one byte": (b"G", "too few"),
    "another kind of file": (b"\x80\x02" + bytes(100), "not a GGUF file: .*; give a .gguf file"),
    "version 1": (gguf(version=1), "version 1"),
    "version 4": (gguf(version=4), "version 4"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64), "big-endian"),
    "tensor count beyond the file": (gguf(tensors=HUGE), "tensor count .* get it again"),
    "tensor count that times 32 is 0 in 64 bits": (gguf(tensors=2**59), "tensor count"),
    "key count beyond the file": (gguf(keys=2**64 - 1), "metadata count .* get it again"),
    "key longer than the file": (gguf((struct.pack("<Q", HUGE),)), "metadata key 0"),
    "key that wraps around 64 bits": (gguf((struct.pack("<Q", 2**64 - 8),)), "metadata key 0"),
    "key that is not text": (gguf((pair(b"\xff\xfe", U8, b"\0"),)), "not UTF-8"),
    "value that is not text": (gguf((pair("k", STRING, text(b"\xc3")),)), "'k' is not UTF-8"),
    "text longer than the file": (
        gguf((pair("k", STRING, struct.pack("<Q", 2**40)),)),
        "value of 'k'",
    ),
    "key twice": (gguf((pair("k", U8, b"\0"), pair("k", U8, b"\1"))), "appears twice"),
    "unknown value type": (gguf((pair("k", 13, b"\0"),)), "unknown value type 13"),
    "bool of 2": (gguf((pair("k", 7, b"\2"),)), "bool"),
    "unknown element type": (gguf((pair("k", ARRAY, array(99, 1)),)), "unknown value type 99"),
    "array longer than the file": (gguf((pair("k", ARRAY, array(U8, 2**50)),)), "array 'k'"),
    "array whose bytes wrap around 64 bits": (
        gguf((pair("k", ARRAY, array(U64, 2**61 + 1)),)),
        "array 'k'",
    ),
    "array of strings beyond the file": (
        gguf((pair("k", ARRAY, array(STRING, 2**40)),)),
        "array 'k'",
    ),
    "string in an array beyond the file": (
        gguf((pair("k", ARRAY, array(STRING, 2, text("a") + struct.pack("<Q", HUGE))),)),
        r"'k'\[1\]",
    ),
    "string in an array that is not text": (
        gguf((pair("k", ARRAY, array(STRING, 2, text("a") + text(b"\x80"))),)),
        r"'k'\[1\] is not UTF-8",
    ),
    "array of arrays beyond the file": (
        gguf((pair("k", ARRAY, array(ARRAY, 2**40)),)),
        "array 'k'",
    ),
    "arrays nested too deeply": (gguf((pair("k", ARRAY, array(ARRAY, 1) * 10_000),)), "deeper"),
    "alignment 0": (gguf((pair("general.alignment", U32, struct.pack("<I", 0)),)), "alignment"),
    "alignment 24": (gguf((pair("general.alignment", U32, struct.pack("<I", 24)),)), "alignment"),
    "alignment of 2 GiB": (
        gguf((pair("general.alignment", U32, struct.pack("<I", 2**31)),)),
        "alignment",
    ),
    "alignment as text": (gguf((pair("general.alignment", STRING, text("32")),)), "alignment"),
    "no dimensions": (gguf((), (info("w", ()),)), "0 dimensions"),
    "five dimensions": (gguf((), (info("w", (1, 1, 1, 1, 1)),)), "5 dimensions"),
    "four billion dimensions": (gguf((), (info("w", (1,), axes=2**32 - 1),)), "dimensions"),
    "a dimension of 0": (gguf((), (info("w", (32, 0)),)), "empty shape"),
    "a product that is 0 in 64 bits": (gguf((), (info("w", (2**32, 2**32)),)), "ends at byte"),
    "a product that is 4 in 64 bits": (gguf((), (info("w", (2**62 + 1, 4)),)), "ends at byte"),
    "sizes whose sum wraps around 64 bits": (
        gguf((), (info("a", (2**61,)), info("b", (2**61,), offset=2**63))),
        "ends at byte",
    ),
    "a row that is not a multiple of its block": (
        gguf((), (info("w", (31, 2), kind=2),)),
        "multiple of 32",
    ),
    "an unsupported type": (gguf((), (info("w", (32,), kind=40),)), "nvfp4"),
    "an unknown type": (gguf((), (info("w", (32,), kind=12345),)), "number 12345"),
    "a removed type": (gguf((), (info("w", (32,), kind=4),)), "number 4"),
    "offset beyond the file": (gguf((), (info("w", (8,), offset=2**40),)), "ends at byte"),
    "offset that wraps around 64 bits": (
        gguf((), (info("w", (8,), offset=2**64 - 32),)),
        "ends at byte",
    ),
    "offset off the alignment": (gguf((), (info("w", (8,), offset=4),)), "alignment 32"),
    "two tensors that overlap": (
        gguf((), (info("a", (16,)), info("b", (16,), offset=32))),
        "overlap",
    ),
    "the same tensor twice": (
        gguf((), (info("a", (8,)), info("a", (8,), offset=32))),
        "appears twice",
    ),
    "one byte of data too few": (gguf((), (info("w", (1024,)),), bytes(4095)), "cut short"),
    "a name that is not text": (gguf((), (info(b"\xe2\x82", (8,)),)), "not UTF-8"),
    "a name of 70 kB": (gguf((), (info("n" * 70_000, (8,)),)), "long"),
    "a long name in a message": (gguf((), (info("n" * 60_000, (0,)),)), "nnnn…"),
    "one part of several": (gguf((pair("split.count", 2, struct.pack("<H", 3)),)), "split"),
    "split count as text": (gguf((pair("split.count", STRING, text("x")),)), "split"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_gguf_file_is_rejected(case: str, tmp_path: Path) -> None:
    raw, message = HOSTILE[case]
    file = tmp_path / "hostile.gguf"
    file.write_bytes(raw)
    with pytest.raises(ModelError, match=message) as caught:
        read_gguf(file)
    assert caught.value.file == str(file)
    assert len(str(caught.value)) < 1100 + len(str(file))


def test_the_builder_of_hostile_files_can_build_a_valid_file(tmp_path: Path) -> None:
    file = tmp_path / "fine.gguf"
    file.write_bytes(
        gguf(
            (pair("k", ARRAY, array(STRING, 1, text("a"))),),
            (info("a", (8,)), info("b", (16,), offset=32)),
        )
    )
    found = read_gguf(file)
    assert found.metadata == {"k": ["a"]}
    assert found.tensors["b"].shape == (16,)


@pytest.mark.parametrize("cut", range(0, 420, 3))
def test_a_file_truncated_anywhere_is_rejected(cut: int, tmp_path: Path) -> None:
    pairs = (
        pair("k", STRING, text("value")),
        pair("a", ARRAY, array(STRING, 3, text("x") * 3)),
        pair("n", ARRAY, array(ARRAY, 1, array(U8, 2, b"ab"))),
    )
    whole = gguf(pairs, (info("w", (8, 8)), info("v", (8,), offset=256)), bytes(288))
    assert len(whole) > 420
    (tmp_path / "x").write_bytes(whole)
    read_gguf(tmp_path / "x")
    (tmp_path / "x").write_bytes(whole[:cut])
    with pytest.raises(ModelError):
        read_gguf(tmp_path / "x")


# ----------------------------------------------------------------------------- not a regular file


def test_missing_files_directories_pipes_and_odd_names_are_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (
        tmp_path / "missing.gguf",
        tmp_path,
        tmp_path / "pipe",
        Path("/dev/zero"),
        Path("a\0b"),
        tmp_path / ("n" * 300),
    ):
        with pytest.raises(ModelError):
            read_gguf(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(gguf())
    (tmp_path / "x").chmod(0)
    with pytest.raises(ModelError, match="cannot be read"):
        read_gguf(tmp_path / "x")


# ----------------------------------------------------------------------------------------- memory


def greedy(size: int, pairs: bytes) -> Callable[[Path], None]:
    """Writer of a sparse file of `size` bytes whose only value claims to fill it.

    The zeros of the hole are valid empty strings or numbers."""

    def write(path: Path) -> None:
        with open(path, "wb") as out:
            out.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pairs)
            out.truncate(size)

    return write


MANY: dict[str, tuple[Callable[[Path], None], str]] = {
    "strings": (greedy(1 << 30, pair("k", ARRAY, array(STRING, MAX_STRINGS + 1))), "more than"),
    "numbers": (greedy(1 << 30, pair("k", ARRAY, array(U8, MAX_NUMBERS + 1))), "more than"),
    "numbers in a small file": (greedy(1 << 22, pair("k", ARRAY, array(U8, 3 << 20))), "memory"),
    "arrays": (greedy(1 << 30, pair("k", ARRAY, array(ARRAY, MAX_ARRAYS + 1))), "more than"),
    "one long string of wide characters": (
        lambda path: path.write_bytes(
            gguf((pair("k", STRING, text("\U0001f600" + "a" * (30 << 20))),))
        ),
        "memory",
    ),
}


@pytest.mark.parametrize("case", MANY)
def test_metadata_that_takes_too_much_memory_is_rejected_below_64_mib(
    case: str, tmp_path: Path
) -> None:
    write, message = MANY[case]
    file = tmp_path / "greedy.gguf"
    write(file)
    tracemalloc.start()
    with pytest.raises(ModelError, match=message):
        read_gguf(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    file.unlink()
    assert peak < 64 << 20


def test_the_memory_budget_counts_the_overhead_of_short_strings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 bytes in the file take 84 bytes of memory. A smaller budget keeps tracemalloc fast."""
    monkeypatch.setattr(reader, "METADATA_MEMORY", 4 << 20)
    file = tmp_path / "greedy.gguf"
    file.write_bytes(gguf((pair("k", ARRAY, array(STRING, 220_000, text("ab") * 220_000)),)))
    tracemalloc.start()
    with pytest.raises(ModelError, match="memory"):
        read_gguf(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (1 + reader.ARRAY_MEMORY) * file.stat().st_size + (4 << 20)


def test_long_strings_in_an_array_do_not_raise_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The array budget is for tokens. Strings of 1 MB with one wide character do not raise it."""
    monkeypatch.setattr(reader, "METADATA_MEMORY", 4 << 20)
    file = tmp_path / "greedy.gguf"
    file.write_bytes(
        gguf((pair("k", ARRAY, array(STRING, 8, text("\U0001f600" + "a" * (1 << 20)) * 8)),))
    )
    tracemalloc.start()
    with pytest.raises(ModelError, match="memory"):
        read_gguf(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < file.stat().st_size + (5 << 20)


@pytest.mark.parametrize("data", [64 << 20, 0])
def test_a_large_vocabulary_is_read(data: int, tmp_path: Path) -> None:
    """The limits exceed real models: 262,144 tokens with scores and types, half a million merges.

    Also without tensors, as in the first part of a split model or llama.cpp's vocabulary files."""
    tokens = b"".join(text(f"token{i}") for i in range(1 << 18))
    merges = b"".join(text(f"a{i} b") for i in range(514_906))
    pairs = (
        pair("t", ARRAY, array(STRING, 1 << 18, tokens)),
        pair("m", ARRAY, array(STRING, 514_906, merges)),
    )
    pairs += (
        pair("s", ARRAY, array(6, 1 << 18, bytes(1 << 20))),
        pair("y", ARRAY, array(5, 1 << 18, bytes(1 << 20))),
    )
    (tmp_path / "x").write_bytes(
        gguf(pairs, (info("w", (data // 4,)),) if data else (), bytes(data))
    )
    found = read_gguf(tmp_path / "x").metadata
    assert found["t"][-1] == "token262143"
    assert len(found["m"]) == 514_906


def test_a_vocabulary_of_one_letter_tokens_is_read(tmp_path: Path) -> None:
    """255,029 tokens and 253,333 merges as in command-r, each as short as possible."""
    tokens = text("a") * 255_029
    merges = text("a b") * 253_333
    pairs = (
        pair("t", ARRAY, array(STRING, 255_029, tokens)),
        pair("m", ARRAY, array(STRING, 253_333, merges)),
    )
    pairs += (pair("y", ARRAY, array(5, 255_029, bytes(4 * 255_029))),)
    (tmp_path / "x").write_bytes(gguf(pairs, (), b""))
    assert len(read_gguf(tmp_path / "x").metadata["t"]) == 255_029


# -------------------------------------------------------------------------------------- mutations

WORKER = Path(__file__).with_name("fuzz_worker.py")


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory if available: these tests write tens of thousands of files."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def fuzz(kind: str, first: int, count: int, directory: Path) -> tuple[int, int]:
    """(files read, files rejected) out of `count`; fails on any other outcome."""
    command = [sys.executable, str(WORKER), kind, str(first), str(count), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]  # the process itself crashed
    result = json.loads(done.stdout)
    assert not result["count"], "\n".join(result["wrong"])
    return result["read"], result["refused"]


@pytest.mark.parametrize(
    ("kind", "count"),
    [("gguf", 1_500), ("split", 600), ("safetensors", 600), ("directory", 700), ("whole", 250)],
)
def test_a_mutated_file_gives_a_model_or_a_model_error(
    kind: str, count: int, memory_path: Path
) -> None:
    read, refused = fuzz(kind, 0, count, memory_path)
    assert read + refused == count
    assert refused > count // 2  # the mutations are hostile
    assert read > count // 50  # and not so coarse that every file fails at its first byte


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("gguf", 1_000_000),
        ("split", 200_000),
        ("safetensors", 200_000),
        ("directory", 200_000),
        ("whole", 100_000),
    ],
)
def test_a_million_mutated_files_give_a_model_or_a_model_error(
    kind: str, count: int, memory_path: Path
) -> None:
    read, refused = fuzz(kind, 1_000_000, count, memory_path)
    assert read + refused == count
