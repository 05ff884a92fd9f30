"""Helper: split a GGUF file into parts, as gguf-split does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verbatim.files.gguf import read_gguf
from verbatim.files.gguf_write import write_gguf

SPLIT_TYPES = {"split.no": "u16", "split.count": "u16", "split.tensors.count": "i32"}


def part_name(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number:05d}-of-{count:05d}.gguf"


def split_gguf(
    source: Path, folder: Path, stem: str, sizes: Sequence[int], **changes: Any
) -> list[Path]:
    """Write one part per entry of `sizes` (tensors per part).

    `changes`: other values of the split keys in every part, such as split_count=7."""
    file = read_gguf(source)
    tensors = list(file.tensors.values())
    assert sum(sizes) == len(tensors)
    folder.mkdir(exist_ok=True)
    paths = []
    for number, size in enumerate(sizes):
        keys = {
            "split.no": number,
            "split.count": len(sizes),
            "split.tensors.count": len(file.tensors),
        }
        keys |= {key.replace("_", "."): value for key, value in changes.items()}
        path = folder / part_name(stem, number + 1, len(sizes))
        write_gguf(
            path,
            (file.metadata if number == 0 else {}) | keys,
            tensors[:size],
            types=file.types | SPLIT_TYPES,
        )
        del tensors[:size]
        paths.append(path)
    return paths
