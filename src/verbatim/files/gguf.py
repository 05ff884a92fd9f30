"""GGUF reader: a path in, metadata and memory-mapped tensors out. Weights are not read here.

Layout of a file: magic, version, two counts; metadata (key, type, value); tensor infos (name,
dimensions, type, offset); padding; data.

Files are untrusted. Every count, length, offset and dimension is checked against the file size
before memory is allocated for it. Two budgets bound the metadata. Memory: the file size, plus
48 MiB, plus five times the bytes of all arrays. Time: limits on the number of array elements, so
that reading takes at most a second (real files have fewer than 800,000 strings). Any violation is
a ModelError that names the file and the item.

The array budget is for vocabularies: a 6-byte token takes 14 bytes in the file and 92 as a Python
string in a list. 262,144 tokens and 514,906 merges take about 100 MB, in a file of only 15 MB if
it has no tensors (the first part of a split model). Strings must be valid UTF-8.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.files.gguf_file import GGUFFile as GGUFFile
from verbatim.files.gguf_types import (
    ARRAY,
    BOOL,
    DEFAULT_ALIGNMENT,
    KINDS,
    MAX_DIMS,
    MAX_NESTING,
    OTHER_TYPES,
    SCALARS,
    STRING,
    TYPES,
)
from verbatim.files.mapped_file import hash_samples, map_file, samples_per_tensor
from verbatim.files.split import join, split_info
from verbatim.formats.conversion import nbytes
from verbatim.formats.registry import BLOCKS
from verbatim.formats.tensor import Tensor

MAX_ALIGNMENT = 1 << 20  # bytes
MAX_NAME = 1 << 16  # bytes of a key or of a tensor's name
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 15
MAX_STRINGS = 1 << 20  # in all arrays of the file together; also for numbers
MAX_NUMBERS = 1 << 22
MAX_ARRAYS = 1 << 16  # nested arrays in one file
METADATA_MEMORY = 48 << 20  # bytes of memory for metadata, beyond the file size
ARRAY_MEMORY = 5  # bytes allowed per byte of an array in the header, beyond METADATA_MEMORY
_STRING_CHUNK = 8192  # strings decoded at once; at most 2 MiB

_SCALAR_STRUCTS = {
    number: struct.Struct("<" + code.replace("?", "B")) for number, code in SCALARS.items()
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Map a file, or all parts of a split model, and parse everything but the weights."""
    file = _read_file(Path(path))
    info = split_info(file.metadata, file.path)
    return file if info is None else join(file, info, _read_file)


def _read_file(file: Path) -> GGUFFile:
    view = map_file(file, min_size=24)
    reader = _Reader(file, view)
    version, tensor_count, key_count = reader.header()
    metadata = reader.metadata(key_count)
    infos = reader.tensor_infos(tensor_count)
    header_end = reader.pos
    tensors = _map_tensors(reader, metadata, infos)
    return GGUFFile(
        file, metadata, tensors, _digest(view, header_end, tensors), version, reader.types
    )


# --------------------------------------------------------------------------------------- header


class _Reader:
    """Cursor over the header. Every method checks bounds and budgets before it reads."""

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
        # Messages quote names from the file, which may have 64 KiB.
        raise ModelError(
            message if len(message) < 1000 else message[:1000] + "…", file=str(self.file)
        )

    def require(self, count: int, what: str) -> None:
        if count > self.size - self.pos:
            self.fail(
                f"{what} needs {count} bytes at offset {self.pos}, "
                f"but the file ends at {self.size} (cut short? get it again)"
            )

    def charge(self, count: int, what: str) -> None:
        """Take memory from the budget, before objects are created."""
        self.memory -= count
        if self.memory < 0:
            self.fail(
                f"{what}: the metadata needs more memory than the file's size, "
                f"{METADATA_MEMORY >> 20} MiB and {ARRAY_MEMORY} times its arrays"
            )

    def grant(self, count: int) -> None:
        """Raise the memory budget for `count` bytes of an array that are present in the file."""
        self.memory += ARRAY_MEMORY * count

    def u32(self, what: str) -> int:
        self.require(4, what)
        value: int = _U32.unpack_from(self.view, self.pos)[0]
        self.pos += 4
        return value

    def u64(self, what: str) -> int:
        self.require(8, what)
        value: int = _U64.unpack_from(self.view, self.pos)[0]
        self.pos += 8
        return value

    def text(self, what: str, limit: int | None = None) -> str:
        length = self.u64(what)
        if limit is not None and length > limit:
            self.fail(f"{what} is {length} bytes long, more than {limit}")
        self.require(length, what)
        self.charge(5 * length + 64, what)  # the bytes, and up to four bytes per character
        start = self.pos
        self.pos += length
        try:
            return self.view[start : self.pos].decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")

    def header(self) -> tuple[int, int, int]:
        if self.view[:4] != b"GGUF":
            self.fail(
                f"not a GGUF file: it begins with {self.view[:4]!r}; give a .gguf file, or a "
                "directory with config.json and *.safetensors"
            )
        self.pos = 4
        version = self.u32("version")
        if version not in (2, 3):
            if version & 0xFFFF == 0 and version:
                self.fail("a big-endian GGUF file; only little-endian files are read (convert it)")
            self.fail(f"GGUF version {version}; versions 2 and 3 are read")
        tensors = self.u64("tensor count")
        keys = self.u64("metadata count")
        left = self.size - self.pos
        # A key-value pair has at least 8 + 4 + 1 bytes, a tensor info 8 + 4 + 8 + 4 + 8.
        if keys > min(MAX_KEYS, left // 13):
            self.fail(
                f"metadata count {keys} does not fit the file "
                f"({left} bytes left, at most {MAX_KEYS} keys; cut short? get it again)"
            )
        if tensors > min(MAX_TENSORS, left // 32):
            self.fail(
                f"tensor count {tensors} does not fit the file "
                f"({left} bytes left, at most {MAX_TENSORS} tensors; cut short? get it again)"
            )
        return version, tensors, keys

    # --------------------------------------------------------------------------------- metadata

    def metadata(self, count: int) -> dict[str, object]:
        result: dict[str, object] = {}
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
        self.require(unpack.size, f"value of {key!r}")
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
        self.require(count * size, f"array {key!r} of {count} values")
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
        self.require(8 * count, f"array {key!r} of {count} strings")
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
        """Fast path for vocabularies (100,000 to 800,000 strings) of strings below 256 bytes.

        Such a length is one byte and seven zeros. Walk by that byte, check all zeros at once,
        replace each length by a NUL, decode once and split at the NULs. Returns False and consumes
        nothing if a string is longer, contains a NUL, is not UTF-8 or exceeds the file."""
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
            item, left = f"metadata {key!r}[{len(result)}]", self.size - self.pos - 8
            if left < 0 or left < _U64.unpack_from(self.view, self.pos)[0]:
                self.fail(f"{item} reaches beyond the end of the file")
            # Memory budget: a string earns its length in the file, 255 bytes at most.
            self.grant(8 + min(_U64.unpack_from(self.view, self.pos)[0], 255))
            result.append(self.text(item))

    def nested_array(self, key: str, count: int, depth: int) -> list[object]:
        self.require(12 * count, f"array {key!r} of {count} arrays")
        self.arrays -= count
        if self.arrays < 0:
            self.fail(f"metadata {key!r}: more than {MAX_ARRAYS} arrays in arrays")
        self.charge(8 * count + 64, key)
        return [self.array(key, depth + 1) for _ in range(count)]

    # ---------------------------------------------------------------------------------- tensors

    def tensor_infos(self, count: int) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """name -> (type, shape with the contiguous axis last, byte offset into the data)."""
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
                type_name = OTHER_TYPES.get(kind, f"number {kind}")
                self.fail(
                    f"tensor {name!r} has the type {type_name}, which is not supported; "
                    f"supported: {', '.join(BLOCKS)}"
                )
            result[name] = (TYPES[kind], shape, self.u64(f"offset of tensor {name!r}"))
        return result


def _map_tensors(
    reader: _Reader, metadata: dict[str, object], infos: dict[str, tuple[str, tuple[int, ...], int]]
) -> dict[str, Tensor]:
    """Check that tensors are aligned, inside the file and disjoint; return views of the map."""
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    powers = [1 << n for n in range(MAX_ALIGNMENT.bit_length())]
    if type(alignment) is not int or alignment not in powers:
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
                f"tensor {name!r} lies at offset {offset}, which is not a multiple of the "
                f"alignment {alignment}"
            )
        if start + offset + length > reader.size:
            reader.fail(
                f"tensor {name!r} ({kind} {shape}) ends at byte {start + offset + length}; "
                f"the file has {reader.size} (cut short? get it again)"
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


# --------------------------------------------------------------------------------------- digest


def _digest(view: mmap.mmap, header_end: int, tensors: dict[str, Tensor]) -> str:
    """SHA-256 of the whole header and of 4 KiB of every tensor.

    The digest identifies a model, independent of its path, without reading the whole file. It is
    not an integrity check: a change between two samples goes unnoticed. The catalog verifies the
    SHA-256 of the whole file after a download."""
    digest = hashlib.sha256()
    with memoryview(view) as whole, whole[:header_end] as header:
        digest.update(header)
    count = samples_per_tensor(len(tensors))
    for tensor in tensors.values():
        hash_samples(digest, tensor, count)
    return digest.hexdigest()
