"""Read a GGUF model: path in, metadata and memory-mapped tensors out. Nothing of the weights is read until someone asks.

The file: magic, version, two counts; metadata (key, type, value); tensor infos (name, dimensions, type, offset); padding; data.
It is a stranger's file. Every count, length, offset and dimension is checked against the file before anything is allocated
for it, with Python's integers, which do not overflow. Two budgets bound the rest: the objects made of the metadata may take the
file's size, 48 MiB and five times the bytes of the arrays that were read, and no array may be so long that reading it takes a
second (the limits below; real files of today hold fewer than 800,000 strings). Whatever is wrong is a ModelError that names the
file and the item.

The share for arrays is for vocabularies: a token of 6 bytes takes 14 bytes in the file and 92 as a Python string in a list, so
that 262,144 tokens and 514,906 merges need about 100 MB, in a file of 15 MB where there are no tensors (the first part of a
split model, a vocabulary alone).

Strings must be UTF-8: a tokenizer built on half a character would not be the model's.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.weights.block_formats import BLOCKS, nbytes
from verbatim.weights.gguf_file import GGUFFile as GGUFFile
from verbatim.weights.split import join, place_of
from verbatim.weights.tensor import Tensor

DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4
MAX_NAME = 1 << 16  # bytes of a key or a tensor's name
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 15
MAX_STRINGS = 1 << 20  # in all arrays of the file together
MAX_NUMBERS = 1 << 22
MAX_ARRAYS = 1 << 16  # inside other arrays
MAX_NESTING = 4
METADATA_MEMORY = 48 << 20  # bytes beyond the file's own size
ARRAY_MEMORY = 5  # bytes more for each byte of an array in the header
_STRING_CHUNK = 8192  # strings decoded at once: 2 MiB at most

# tensor types by number; those without a reader here are named so that the error can name them
TYPES: dict[int, str] = {
    0: "f32",
    1: "f16",
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    7: "q5_1",
    8: "q8_0",
    10: "q2_k",
    11: "q3_k",
    12: "q4_k",
    13: "q5_k",
    14: "q6_k",
    15: "q8_k",
    30: "bf16",
}
OTHER_TYPES: dict[int, str] = {
    9: "q8_1",
    16: "iq2_xxs",
    17: "iq2_xs",
    18: "iq3_xxs",
    19: "iq1_s",
    20: "iq4_nl",
    21: "iq3_s",
    22: "iq2_s",
    23: "iq4_xs",
    24: "i8",
    25: "i16",
    26: "i32",
    27: "i64",
    28: "f64",
    29: "iq1_m",
    34: "tq1_0",
    35: "tq2_0",
    39: "mxfp4",
    40: "nvfp4",
}

# metadata value types by number: struct code of the scalar ones
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS: dict[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
KINDS: dict[int, str] = {
    0: "u8",
    1: "i8",
    2: "u16",
    3: "i16",
    4: "u32",
    5: "i32",
    6: "f32",
    7: "bool",
    8: "str",
}
KINDS |= {10: "u64", 11: "i64", 12: "f64"}
_SCALAR_STRUCTS = {
    number: struct.Struct("<" + code.replace("?", "B")) for number, code in SCALARS.items()
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Map the file, or all files of a split model (see split.py), and read all but the weights. Any fault is a ModelError."""
    file = _read_file(Path(path))
    place = place_of(file.metadata, file.path)
    return file if place is None else join(file, place, _read_file)


def _read_file(file: Path) -> GGUFFile:
    view = map_file(file, least=24)
    reader = _Reader(file, view)
    version, tensor_count, key_count = reader.header()
    metadata = reader.metadata(key_count)
    infos = reader.tensor_infos(tensor_count)
    header_end = reader.pos
    tensors = _place(reader, metadata, infos)
    return GGUFFile(
        file, metadata, tensors, _digest(view, header_end, tensors), version, reader.types
    )


def map_file(file: Path, *, least: int = 0) -> mmap.mmap:
    """A read-only map of a regular file of at least `least` bytes."""
    try:
        with open(file, "rb", opener=_open_nonblocking) as handle:
            info = os.fstat(handle.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise ModelError("not a regular file", file=str(file))
            if info.st_size < max(least, 1):
                raise ModelError(
                    f"{info.st_size} bytes are too few for a model file (cut short? get it again)",
                    file=str(file),
                )
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot be read: {getattr(error, 'strerror', None) or error}", file=str(file)
        ) from error


def _open_nonblocking(path: str, flags: int) -> int:
    """A named pipe must not hold us until someone writes to it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


# ------------------------------------------------------------------------------------------------------------- header


class _Reader:
    """A cursor over the header. Every method checks the bytes it needs before it reads them."""

    def __init__(self, file: Path, view: mmap.mmap) -> None:
        self.file = file
        self.view = view
        self.size = len(view)
        self.pos = 0
        self.memory = self.size + METADATA_MEMORY
        self.strings = MAX_STRINGS
        self.numbers = MAX_NUMBERS
        self.arrays = MAX_ARRAYS
        self.types: dict[str, str] = {}

    def fail(self, message: str) -> NoReturn:
        raise ModelError(
            message if len(message) < 1000 else message[:1000] + "…", file=str(self.file)
        )  # names may be 64 KiB

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.pos:
            self.fail(
                f"{what} needs {count} bytes at offset {self.pos}, but the file ends at {self.size} (cut short? get it again)"
            )

    def charge(self, count: int, what: str) -> None:
        """Take memory from the budget before making objects with it."""
        self.memory -= count
        if self.memory < 0:
            self.fail(
                f"{what}: the metadata needs more memory than the file's size, {METADATA_MEMORY >> 20} MiB and "
                f"{ARRAY_MEMORY} times its arrays"
            )

    def grant(self, count: int) -> None:
        """Bytes of an array that are in the file, before objects are made of them: they raise the budget."""
        self.memory += ARRAY_MEMORY * count

    def u32(self, what: str) -> int:
        self.need(4, what)
        value: int = _U32.unpack_from(self.view, self.pos)[0]
        self.pos += 4
        return value

    def u64(self, what: str) -> int:
        self.need(8, what)
        value: int = _U64.unpack_from(self.view, self.pos)[0]
        self.pos += 8
        return value

    def text(self, what: str, limit: int | None = None) -> str:
        length = self.u64(what)
        if limit is not None and length > limit:
            self.fail(f"{what} is {length} bytes long, more than {limit}")
        self.need(length, what)
        self.charge(5 * length + 64, what)  # the bytes, and up to four bytes a character
        start = self.pos
        self.pos += length
        try:
            return self.view[start : self.pos].decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")

    def header(self) -> tuple[int, int, int]:
        if self.view[:4] != b"GGUF":
            self.fail(f"not a GGUF file: it begins with {self.view[:4]!r}")
        self.pos = 4
        version = self.u32("version")
        if version not in (2, 3):
            if version & 0xFFFF == 0 and version:
                self.fail("a big-endian GGUF file; only little-endian files are read (convert it)")
            self.fail(f"GGUF version {version}; versions 2 and 3 are read")
        tensors = self.u64("tensor count")
        keys = self.u64("metadata count")
        left = self.size - self.pos
        # the shortest key-value pair takes 8 + 4 + 1 bytes, the shortest tensor info 8 + 4 + 8 + 4 + 8
        if keys > min(MAX_KEYS, left // 13):
            self.fail(
                f"metadata count {keys} does not fit the file ({left} bytes left, at most {MAX_KEYS} keys)"
            )
        if tensors > min(MAX_TENSORS, left // 32):
            self.fail(
                f"tensor count {tensors} does not fit the file ({left} bytes left, at most {MAX_TENSORS} tensors)"
            )
        return version, tensors, keys

    # ------------------------------------------------------------------------------------------------------- metadata

    def metadata(self, count: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for index in range(count):
            key = self.text(f"metadata key {index}", MAX_NAME)
            if key in result:
                self.fail(f"metadata key {key!r} appears twice")
            self.charge(128, key)
            result[key] = self.value(self.u32(f"type of {key!r}"), key)
        return result

    def value(self, kind: int, key: str) -> Any:
        if kind == ARRAY:
            return self.array(key, 1)
        if kind not in KINDS:
            self.fail(f"metadata {key!r} has the unknown value type {kind}")
        self.types[key] = KINDS[kind]
        if kind == STRING:
            return self.text(f"value of {key!r}")
        unpack = _SCALAR_STRUCTS[kind]
        self.need(unpack.size, f"value of {key!r}")
        value = unpack.unpack_from(self.view, self.pos)[0]
        self.pos += unpack.size
        if kind == BOOL:
            if value > 1:
                self.fail(f"metadata {key!r} is a bool with the value {value}")
            return bool(value)
        return value

    def array(self, key: str, depth: int) -> list[Any]:
        if depth > MAX_NESTING:
            self.fail(f"metadata {key!r} nests arrays deeper than {MAX_NESTING}")
        kind = self.u32(f"element type of {key!r}")
        count = self.u64(f"length of {key!r}")
        if kind == ARRAY:
            return self.nested_array(key, count, depth)
        if kind not in KINDS:
            self.fail(f"metadata {key!r} is an array of the unknown value type {kind}")
        self.types[key] = KINDS[kind]
        if kind == STRING:
            return self.string_array(key, count)
        size = _SCALAR_STRUCTS[kind].size
        self.need(count * size, f"array {key!r} of {count} values")
        self.numbers -= count
        if self.numbers < 0:
            self.fail(f"metadata {key!r}: more than {MAX_NUMBERS} numbers in arrays")
        self.grant(count * size)
        self.charge(count * 40 + 64, key)
        code = "u1" if kind == BOOL else SCALARS[kind]
        values = np.frombuffer(
            self.view, dtype=np.dtype(code).newbyteorder("<"), count=count, offset=self.pos
        )
        self.pos += count * size
        if kind == BOOL:
            if values.size and values.max() > 1:
                self.fail(f"metadata {key!r} is an array of bools with the value {values.max()}")
            values = values.astype(np.bool_)
        listed: list[Any] = values.tolist()
        return listed

    def string_array(self, key: str, count: int) -> list[str]:
        self.need(8 * count, f"array {key!r} of {count} strings")
        self.strings -= count
        if self.strings < 0:
            self.fail(f"metadata {key!r}: more than {MAX_STRINGS} strings in arrays")
        self.charge(8 * count + 64, key)
        result: list[str] = []
        while len(result) < count:
            chunk = min(count - len(result), _STRING_CHUNK)
            if not self.short_strings(chunk, key, result):
                self.any_strings(chunk, key, result)
        return result

    def short_strings(self, count: int, key: str, result: list[str]) -> bool:
        """The quick way through a vocabulary (100,000 to 800,000 strings): lengths below 256 are one byte and seven zeros.

        Walk by that byte; prove the zeros for all at once; put a NUL in the place of each length, decode once, split at the NULs.
        False, and nothing read, where a string is longer, holds a NUL itself, is not UTF-8 or leaves the file."""
        raw = self.view[self.pos : self.pos + count * (8 + 255)]
        pos, starts = 0, []
        try:
            for _ in range(count):
                starts.append(pos)
                pos += 8 + raw[pos]
        except IndexError:
            return False
        if pos > len(raw):
            return False
        region = np.frombuffer(raw, dtype=np.uint8, count=pos).copy()
        at = np.array(starts)
        rest = at[:, None] + np.arange(1, 8)
        if region[rest].any():
            return False
        region[at] = 0
        keep = np.ones(region.size, dtype=np.bool_)
        keep[rest] = False
        joined = region[keep]
        if np.count_nonzero(joined) != joined.size - count:
            return False
        self.grant(pos)
        self.charge(72 * count + 2 * joined.size, key)
        try:
            result += joined.tobytes().decode().split("\0")[1:]
        except UnicodeDecodeError:
            return False
        self.pos += pos
        return True

    def any_strings(self, count: int, key: str, result: list[str]) -> None:
        for _ in range(count):
            item = f"metadata {key!r}[{len(result)}]"
            if (
                self.size - self.pos < 8
                or self.size - self.pos - 8 < _U64.unpack_from(self.view, self.pos)[0]
            ):
                self.fail(f"{item} reaches beyond the end of the file")
            self.grant(
                8 + min(_U64.unpack_from(self.view, self.pos)[0], 255)
            )  # no more for a long one
            result.append(self.text(item))

    def nested_array(self, key: str, count: int, depth: int) -> list[Any]:
        self.need(12 * count, f"array {key!r} of {count} arrays")
        self.arrays -= count
        if self.arrays < 0:
            self.fail(f"metadata {key!r}: more than {MAX_ARRAYS} arrays in arrays")
        self.charge(8 * count + 64, key)
        return [self.array(key, depth + 1) for _ in range(count)]

    # -------------------------------------------------------------------------------------------------------- tensors

    def tensor_infos(self, count: int) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """name -> (type, shape with the contiguous axis last, offset into the data)."""
        result: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for index in range(count):
            name = self.text(f"name of tensor {index}", MAX_NAME)
            if name in result:
                self.fail(f"tensor {name!r} appears twice")
            self.charge(512, name)
            axes = self.u32(f"dimensions of tensor {name!r}")
            if not 1 <= axes <= MAX_DIMS:
                self.fail(f"tensor {name!r} has {axes} dimensions; 1 to {MAX_DIMS} are possible")
            shape = tuple(self.u64(f"dimensions of tensor {name!r}") for _ in range(axes))[::-1]
            kind = self.u32(f"type of tensor {name!r}")
            if kind not in TYPES:
                named = OTHER_TYPES.get(kind, f"number {kind}")
                self.fail(
                    f"tensor {name!r} has the type {named}, which is not read; read are {', '.join(BLOCKS)}"
                )
            result[name] = (TYPES[kind], shape, self.u64(f"offset of tensor {name!r}"))
        return result


def _place(
    reader: _Reader, metadata: dict[str, Any], infos: dict[str, tuple[str, tuple[int, ...], int]]
) -> dict[str, Tensor]:
    """Check where every tensor lies, then make views of the map. No two overlap, none leaves the file."""
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        type(alignment) is not int
        or not 0 < alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        reader.fail(
            f"general.alignment is {alignment!r}; a power of two up to {MAX_ALIGNMENT} is needed"
        )
    start = -(-reader.pos // alignment) * alignment
    spans: list[tuple[int, int, str]] = []
    for name, (kind, shape, offset) in infos.items():
        if 0 in shape:
            reader.fail(f"tensor {name!r} has the empty shape {shape}")
        try:
            length = nbytes(kind, shape)
        except ModelError as error:
            reader.fail(f"tensor {name!r}: {error.message}")
        if offset % alignment:
            reader.fail(
                f"tensor {name!r} lies at offset {offset}, which is not a multiple of the alignment {alignment}"
            )
        if start + offset + length > reader.size:
            reader.fail(
                f"tensor {name!r} ({kind} {shape}) ends at byte {start + offset + length}; the file has {reader.size} (cut short? get it again)"
            )
        spans.append((offset, offset + length, name))
    spans.sort()
    for (_, end, name), (begin, _, other) in pairwise(spans):
        if begin < end:
            reader.fail(f"tensors {name!r} and {other!r} overlap")
    whole = np.frombuffer(reader.view, dtype=np.uint8)
    ends = {name: (start + begin, start + end) for begin, end, name in spans}
    return {
        name: Tensor(name, kind, shape, whole[slice(*ends[name])])
        for name, (kind, shape, _) in infos.items()
    }


# ------------------------------------------------------------------------------------------------------------- digest

_SAMPLE_BYTES = 256


def sample_runs(tensors: int) -> int:
    """Samples of each tensor: 16, or fewer where there are thousands of tensors, so that the digest stays cheap."""
    return max(2, min(16, (1 << 16) // max(tensors, 1)))


def sample(digest: Any, tensor: Tensor, runs: int) -> None:
    """Feed `runs` evenly spaced pieces of 256 bytes of the tensor (all of it, if it is smaller) to a hash."""
    data = tensor.data
    digest.update(f"{tensor.name}\0{tensor.type}\0{tensor.shape}\0".encode(errors="surrogatepass"))
    if data.size <= runs * _SAMPLE_BYTES:
        digest.update(np.ascontiguousarray(data))
        return
    for index in range(runs):
        at = index * (data.size - _SAMPLE_BYTES) // (runs - 1)
        digest.update(data[at : at + _SAMPLE_BYTES])


def _digest(view: mmap.mmap, header_end: int, tensors: dict[str, Tensor]) -> str:
    """SHA-256 of the whole header and of 4 KiB of every tensor.

    It tells models apart at no cost worth noting, and is the same wherever the file lies. It is a name, not a seal: a change of
    a few weights between two samples is not seen. (The catalog checks the whole file's SHA-256 when it fetches it.)"""
    digest = hashlib.sha256()
    with memoryview(view) as whole, whole[:header_end] as header:
        digest.update(header)
    runs = sample_runs(len(tensors))
    for tensor in tensors.values():
        sample(digest, tensor, runs)
    return digest.hexdigest()
