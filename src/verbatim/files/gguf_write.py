"""GGUF writer: metadata and tensors in, a file out. The file is written completely or not at all.

The header holds the offset of every tensor, so names, types and shapes are needed first, but not
the data. A LazyTensor produces its data when it is written, so a conversion needs memory for the
header and one tensor.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.files.gguf_types import (
    ARRAY,
    DEFAULT_ALIGNMENT,
    KINDS,
    MAX_DIMS,
    MAX_NESTING,
    SCALARS,
    STRING,
    TYPES,
)
from verbatim.formats.conversion import nbytes
from verbatim.formats.registry import BLOCKS
from verbatim.formats.requantise import requantise
from verbatim.formats.tensor import Tensor

_KIND_NUMBERS = {name: number for number, name in KINDS.items()}
_TYPE_NUMBERS = {name: number for number, name in TYPES.items()}
_NUMPY_KINDS = {np.dtype(code).name: KINDS[number] for number, code in SCALARS.items()}


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor whose bytes are produced when it is written.

    `make` returns uint8 of exactly the size that type and shape need."""

    name: str
    type: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]


def converted(tensor: Tensor, type: str) -> LazyTensor:
    """`tensor` in another type, converted when it is written."""
    return LazyTensor(tensor.name, type, tensor.shape, lambda: requantise(tensor, type).data)


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, object],
    tensors: Iterable[Tensor | LazyTensor] = (),
    *,
    types: Mapping[str, str] | None = None,
) -> None:
    """Write GGUF version 3, little endian.

    `types`: value type by key (u32, f32, str, ...; for an array, the type of its elements), as in
    GGUFFile.types. The types of other keys are inferred: int becomes u32 (i32 in arrays) or wider
    if necessary, float becomes f32."""
    target = Path(path)
    items = list(tensors)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ModelError(f"general.alignment {alignment!r} is not a power of two", file=str(target))
    try:
        header = _header(metadata, items, types or {}, alignment)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(target)
        with _part(target) as out:
            try:
                out.write(header)
                for item in items:
                    _pad(out, alignment)
                    out.write(_data(item))
                out.close()
                os.replace(out.name, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    out.close()
                with contextlib.suppress(OSError):
                    os.unlink(out.name)
                raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "; free some space, or choose another place" if full else ""
        raise ModelError(
            f"cannot be written: {error.strerror or error}{remedy}", file=str(target)
        ) from error


def _part(target: Path) -> BinaryIO:
    """Create a temporary file beside the target, locked while it is open.

    The lock tells other processes that its writer is alive."""
    while True:
        name = f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}.part"
        out = open(target.with_name(name), "xb")  # noqa: SIM115
        _locked(out, wait=True)
        if os.path.exists(out.name):
            return out
        out.close()  # another process removed it as abandoned before the lock was held; retry


def remove_abandoned(target: Path) -> None:
    """Remove temporary files of `target` that killed processes left behind."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
        middle = path.name[len(target.name) + 2 : -len(".part")]
        if re.fullmatch(r"\d+\.[0-9a-f]{8}", middle) is None:
            continue  # not one of our temporary files
        with contextlib.suppress(OSError), open(path, "rb") as found:
            if _locked(found, wait=False):
                os.unlink(path)


def _locked(file: BinaryIO, *, wait: bool) -> bool:
    """Try to lock the file; True on success. The system releases the lock when the holder exits.

    Windows has no flock, but does not remove a file that is open."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # held by another process, or the file system has no locks
        return False
    return True


def _pad(out: BinaryIO, alignment: int) -> None:
    out.write(b"\0" * (-out.tell() % alignment))


def _data(item: Tensor | LazyTensor) -> memoryview:
    made = item.data if isinstance(item, Tensor) else item.make()
    data = np.ascontiguousarray(made).reshape(-1).view(np.uint8)
    if data.size != (expected := nbytes(item.type, item.shape)):
        raise ModelError(
            f"tensor {item.name!r} has {data.size} bytes; {item.type} {item.shape} takes {expected}"
        )
    return data.data


def _header(
    metadata: Mapping[str, object],
    items: list[Tensor | LazyTensor],
    types: Mapping[str, str],
    alignment: int,
) -> bytes:
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(items), len(metadata)))
    for key, value in metadata.items():
        _text(out, key)
        _value(out, key, value, types.get(key))
    offset = 0
    seen: set[str] = set()
    for item in items:
        if item.name in seen:
            raise ModelError(f"tensor {item.name!r} is given twice")
        seen.add(item.name)
        if item.type not in BLOCKS:
            raise ModelError(f"tensor {item.name!r} has the unknown type {item.type!r}")
        if not 1 <= len(item.shape) <= MAX_DIMS or min(item.shape) < 1:
            raise ModelError(
                f"tensor {item.name!r} has the shape {item.shape}; "
                f"1 to {MAX_DIMS} dimensions above 0 are possible"
            )
        _text(out, item.name)
        out += struct.pack(f"<I{len(item.shape)}Q", len(item.shape), *item.shape[::-1])
        out += struct.pack("<IQ", _TYPE_NUMBERS[item.type], offset)
        offset += -(-nbytes(item.type, item.shape) // alignment) * alignment
    return bytes(out)


def _text(out: bytearray, text: str) -> None:
    raw = text.encode()
    out += struct.pack("<Q", len(raw))
    out += raw


def _value(out: bytearray, key: str, value: object, kind: str | None) -> None:
    if isinstance(value, (list, tuple, np.ndarray)):
        out += struct.pack("<I", ARRAY)
        _array(out, key, value, kind, 1)
        return
    number = _KIND_NUMBERS[kind or _infer(key, [value], array=False)]
    out += struct.pack("<I", number)
    _scalars(out, key, [value], number)


def _array(out: bytearray, key: str, values: Any, kind: str | None, depth: int) -> None:
    if isinstance(values, np.ndarray):
        kind = kind or _NUMPY_KINDS.get(values.dtype.name)
        values = values.tolist()
    if any(isinstance(value, (list, tuple)) for value in values):
        if depth >= MAX_NESTING:
            raise ModelError(f"metadata {key!r} nests arrays deeper than {MAX_NESTING}")
        out += struct.pack("<IQ", ARRAY, len(values))
        for value in values:
            if not isinstance(value, (list, tuple)):
                raise ModelError(f"metadata {key!r} mixes arrays and values")
            _array(out, key, value, kind, depth + 1)
        return
    number = _KIND_NUMBERS[kind or _infer(key, values, array=True)]
    out += struct.pack("<IQ", number, len(values))
    _scalars(out, key, values, number)


def _scalars(out: bytearray, key: str, values: Iterable[Any], number: int) -> None:
    try:
        if number == STRING:
            for value in values:
                _text(out, value)
        else:
            out += b"".join(map(struct.Struct("<" + SCALARS[number]).pack, values))
    except (struct.error, AttributeError, OverflowError, UnicodeEncodeError) as error:
        raise ModelError(
            f"metadata {key!r} does not fit the type {KINDS[number]}: {error}"
        ) from None


def _infer(key: str, values: Any, *, array: bool) -> str:
    """One type for all values: the narrowest that other GGUF readers expect and that fits."""
    kinds = {type(value) for value in values}
    if kinds <= {bool} and kinds:
        return "bool"
    if kinds <= {str} and kinds:
        return "str"
    if kinds <= {int}:
        low, high = min(values, default=0), max(values, default=0)
        if low >= 0 and not array:
            return "u32" if high < 1 << 32 else "u64"
        if low >= -(1 << 31) and high < 1 << 31:
            return "i32"
        return "u64" if low >= 0 else "i64"
    if kinds <= {int, float}:
        return "f32"
    raise ModelError(
        f"metadata {key!r} holds {sorted(kind.__name__ for kind in kinds)}; GGUF has no such value"
    )
