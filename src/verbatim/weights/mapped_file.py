"""Map a model file into memory, and identify it by samples of its tensors, for both file formats.

In: a path. Out: a read-only memory map; nothing is read yet. `hash_samples` reads 4 KiB of a tensor
at most, so that the digest of a model does not read the whole file.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.weights.tensor import Tensor

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


def samples_per_tensor(tensors: int) -> int:
    """Number of hashed samples per tensor: 16, or fewer for files with thousands of tensors."""
    return max(2, min(16, (1 << 16) // max(tensors, 1)))


def hash_samples(digest: Any, tensor: Tensor, count: int) -> None:
    """Hash `count` evenly spaced samples of 256 bytes, or the whole tensor if it is smaller."""
    data = tensor.data
    digest.update(f"{tensor.name}\0{tensor.type}\0{tensor.shape}\0".encode(errors="surrogatepass"))
    if data.size <= count * _SAMPLE_BYTES:
        digest.update(np.ascontiguousarray(data))
        return
    for index in range(count):
        at = index * (data.size - _SAMPLE_BYTES) // (count - 1)
        digest.update(data[at : at + _SAMPLE_BYTES])
