"""Map a model file into memory, and identify it by samples of its tensors, for both file formats.

In: a path. Out: a read-only memory map; nothing is read yet. `hash_samples` reads 4 KiB of a tensor
at most, so that the digest of a model does not read the whole file.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.formats.tensor import Tensor

_SAMPLE_BYTES = 256


def map_file(file: Path, *, min_size: int = 0) -> mmap.mmap:
    """Map a regular file of at least `min_size` bytes, read-only."""
    try:
        with open(file, "rb", opener=_open_nonblocking) as handle:
            info = os.fstat(handle.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise ModelError("not a regular file", file=str(file))
            if info.st_size < max(min_size, 1):
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
    """Open without blocking, so that a named pipe without a writer fails instead of waiting."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def content_digest(files: Sequence[Path]) -> str:
    """SHA-256 of whole files, which takes about a second per gigabyte."""
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()


def samples_per_tensor(tensors: int) -> int:
    """Number of hashed samples per tensor: 16, or fewer for files with thousands of tensors."""
    return max(2, min(16, (1 << 16) // max(tensors, 1)))


def hash_samples(digest: Any, tensor: Tensor, count: int) -> None:
    """Hash a tensor's name, type and shape, and samples of its data."""
    digest.update(f"{tensor.name}\0{tensor.type}\0{tensor.shape}\0".encode(errors="surrogatepass"))
    hash_data(digest, tensor.data, count)


def hash_data(digest: Any, data: np.ndarray, count: int) -> None:
    """Hash `count` evenly spaced samples of 256 bytes, or all bytes if they are fewer."""
    if data.size <= count * _SAMPLE_BYTES:
        digest.update(np.ascontiguousarray(data))
        return
    for index in range(count):
        at = index * (data.size - _SAMPLE_BYTES) // (count - 1)
        digest.update(data[at : at + _SAMPLE_BYTES])
