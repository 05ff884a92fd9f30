"""Format: all that the engine knows of one number format, in one record.

A format module builds its records, FORMATS; registry.py collects them. The C++ and Triton
kernels of a format name it in their own tables (backend/cpu/kernels/pack.cpp,
backend/cuda/kernels/block_readers.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# blocks uint8 [n, bytes per block] -> out float32 [n, values per block], written
Unpack = Callable[[np.ndarray, np.ndarray], None]
# x float32 [n, values per block] -> out uint8 [n, bytes per block], written
Pack = Callable[[np.ndarray, np.ndarray], None]
# blocks -> scale float32 [n, runs], integers int8 [n, values]; a value is their exact product
Scaled = tuple[np.ndarray, np.ndarray]


class GpuBlocks(NamedTuple):
    """How the cuda backend keeps blocks of a format."""

    bits: int
    group: int  # inputs per scale
    scale_bytes: int  # per group, of scale and offset or zero point
    code: str = "int"  # or e4m3, e2m1
    offset: str = "none"  # added to scale * code; or zero: subtracted from the code
    result: str = "f16"  # type of the unpacked weights; or bf16


class FileType(NamedTuple):
    """How llama.cpp names files whose matrices mostly have the format."""

    number: int  # value of general.file_type
    mixtures: tuple[str, ...] = ()
    small: str = ""  # format for rows that do not divide into blocks


@dataclass(frozen=True, slots=True)
class Format:
    """One of `unpack` and `scaled` is given. The order of float operations is part of the format:
    every value has the bits of ggml's conversion."""

    name: str
    values: int  # per block
    size: int  # bytes per block
    number: int | None = None  # tensor type in GGUF; None: exists in memory only
    unpack: Unpack | None = None
    scaled: Callable[[np.ndarray], Scaled] | None = None
    pack: Pack | None = None  # None: cannot be written
    # Most RMS error of `pack` on normally distributed values, relative to their RMS. Measured, plus
    # a margin smaller than the gain of the K-quants' search for scales.
    pack_error: float = 0.0
    scales: tuple[int, ...] = ()  # byte offsets of the scales in a block
    scale_type: str = "<f2"
    # blocks -> bool [n, scales]: the scale is NaN or infinite; None: `scales` has them all
    broken: Callable[[np.ndarray], np.ndarray] | None = None
    gpu: GpuBlocks | None = None  # None: a GPU unpacks it when it is loaded
    cpu_type: str = ""  # type of the native engine that backend/cpu/repack.py writes; own: its name
    cpu_bytes: float | None = None  # bytes per weight in the native engine; None: as in the file
    file_type: FileType | None = None
